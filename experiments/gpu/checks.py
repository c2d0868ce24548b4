"""Every Triton kernel against its reference on random shapes, and every configuration of those that have several."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from bench import Bench, Row
from torch import Tensor

from servekit.kernels import AttentionBatch, Kernels, fp8_kv, grouped_int4_linear, int8_linear, reference_kernels
from servekit.kernels.fp4_linear import quantize_mxfp4, quantize_nvfp4
from servekit.kernels.fp8_kv import KVScales
from servekit.kernels.fp8_linear import quantize as quantize_fp8
from servekit.kernels.int4_linear import quantize as quantize_int4
from servekit.kernels.triton import attention_decode, attention_prefill, eight_bit_linear, fp4_linear, int4_linear
from servekit.kernels.triton.launch import Tuned
from servekit.kernels.triton.rope_and_cache import rope_and_cache

STEP = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Distance of neighbouring numbers near 1; of float32, some such distances."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
TUNED = {"decode attention": attention_decode._PARTS, "prefill attention": attention_prefill._TILES,
         "eight-bit products": eight_bit_linear._PRODUCT, "int4 products": int4_linear._PRODUCT,
         "fp4 products": fp4_linear._PRODUCT}
_BORDERS = (1, 15, 16, 17, 63, 64, 65, 129, 300)


@dataclass(frozen=True)
class Case:
    """One random case of an operation."""

    kernels: Kernels
    device: torch.device
    dice: random.Random
    dtype: torch.dtype

    def numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(self.dice.randrange(2**31))
        return torch.randn(shape, generator=generator).to(self.dtype if dtype is None else dtype).to(self.device)

    def on_device(self, values: Iterable[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self.device)


Check = Callable[[Case], float]
"""How far kernel and reference are apart, in units of what is allowed."""
_REFERENCE = reference_kernels()


def checks(bench: Bench) -> Iterator[Row]:
    """A row for each case: every operation once in each number format, then again; then the tuned configurations.

    A kernel's first configuration serves the random shapes, so that nothing is timed here.
    """
    kernels = bench.kernels()
    with only_first():
        for seed, dtype in product(range(bench.sizes.cases), FLOATS):
            for name, check in all_checks(bench.gpu.has_fp8).items():
                if bench.has_time and (dtype is torch.float32 or name not in _FLOAT32_ONLY):
                    yield {"name": name, "numbers": str(dtype).removeprefix("torch."),
                           **outcome(check, Case(kernels, bench.device, random.Random(seed), dtype))}
    for name, tuned in TUNED.items() if bench.device.type == "cuda" else ():
        yield from configurations(bench, name, tuned, Case(kernels, bench.device, random.Random(1), torch.bfloat16))


def configurations(bench: Bench, name: str, tuned: Tuned, case: Case) -> Iterator[Row]:
    """One case in every configuration but the first; one that takes more of a GPU than it has is never chosen."""
    check = all_checks(bench.gpu.has_fp8)[_CHECK_OF[name]]
    for config in tuned.configs[1:]:
        if bench.has_time:
            with only(tuned, (config,)):
                yield {"name": name, "config": str(config), **outcome(check, case)}


def outcome(check: Check, case: Case) -> Row:
    """What a check says; a kernel that fails must not keep the others from being checked."""
    try:
        found = check(case)
    except Exception as error:
        return {"passed": type(error).__name__ == "OutOfResources",
                "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {"apart": found, "passed": found <= 1}


@contextmanager
def only(tuned: Tuned, configs: Sequence[Any]) -> Iterator[None]:
    """Lets a kernel have these configurations alone."""
    before, tuned.configs = tuned.configs, tuple(configs)
    try:
        yield
    finally:
        tuned.configs = before


@contextmanager
def only_first() -> Iterator[None]:
    """Lets every tuned kernel have its first configuration alone."""
    before = {name: tuned.configs for name, tuned in TUNED.items()}
    for tuned in TUNED.values():
        tuned.configs = tuned.configs[:1]
    try:
        yield
    finally:
        for name, configs in before.items():
            TUNED[name].configs = configs


def apart(actual: Tensor, expected: Tensor, dtype: torch.dtype, steps: float, scale: float = 1.0) -> float:
    """The largest difference over what is allowed: `steps` of the format, of each number or of one as large as `scale`.
    """
    if actual.shape != expected.shape:
        return float("inf")
    wide, truth = actual.double(), expected.double()
    allowed = steps * STEP[dtype] * (truth.abs() + scale)
    over = torch.where(wide == truth, 0.0, (wide - truth).abs() / allowed).nan_to_num(nan=float("inf"))
    return float(over.max()) if over.numel() else 0.0


# --- Element by element -----------------------------------------------------------------------------------------------


def norms(case: Case) -> float:
    rows, width = case.dice.randint(1, 70), case.dice.choice([1, 67, 576, 2049, 4096])
    x, residual, weight = case.numbers(rows, width), case.numbers(rows, width), case.numbers(width)
    normed, total = case.kernels.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = _REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    heads = case.numbers(rows, 6, 128)[:, :4]
    return max(apart(case.kernels.rms_norm(x, weight, 1e-5), _REFERENCE.rms_norm(x, weight, 1e-5), case.dtype, 2),
               apart(normed, expected, case.dtype, 2), apart(total, expected_total, case.dtype, 1),
               apart(case.kernels.rms_norm(heads, heads[0, 0], 1e-5), _REFERENCE.rms_norm(heads, heads[0, 0], 1e-5),
                     case.dtype, 2))


def silu_and_mul(case: Case) -> float:
    wide = case.numbers(case.dice.randint(1, 40), 2 * case.dice.choice([1, 70, 1536, 14336]))
    return apart(case.kernels.silu_and_mul(wide), _REFERENCE.silu_and_mul(wide), case.dtype, 2)


def rotation(case: Case) -> float:
    """Into a cache in the same format, and into one in e4m3, whose numbers may be neighbours where rounding is close.
    """
    head_dim, kv_heads = case.dice.choice([64, 96, 128, 256]), case.dice.randint(1, 3)
    heads = kv_heads * case.dice.randint(1, 8)
    tokens, blocks, block_size = case.dice.randint(1, 40), 8, case.dice.choice([7, 16])
    q, k, v = (case.numbers(tokens, count, head_dim) for count in (heads, kv_heads, kv_heads))
    angles = torch.outer(torch.arange(60), torch.rand(head_dim // 2, generator=torch.Generator().manual_seed(1)))
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(case.device)
    positions = case.on_device((case.dice.randrange(60) for _ in range(tokens)), torch.int64)
    slots = case.on_device(case.dice.sample(range(blocks * block_size), tokens), torch.int64)
    worst = 0.0
    for dtype in (case.dtype, torch.float8_e4m3fn):
        caches = [torch.zeros(blocks, kv_heads, block_size, head_dim, device=case.device).to(dtype) for _ in range(4)]
        rotated = rope_and_cache(q, k, v, table, positions, *caches[:2], slots)
        if dtype is torch.float8_e4m3fn:
            expected = fp8_kv.reference_rope_and_cache(q, k, v, table, positions, *caches[2:], slots, KVScales(1, 1))
            worst = max(worst, *(float((a.float() - b.float()).abs().div(b.float().abs() / 7 + 0.002).max())
                                 for a, b in zip(caches[:2], caches[2:], strict=True)))
        else:
            expected = _REFERENCE.rope_and_cache(q, k, v, table, positions, *caches[2:], slots)
            worst = max(worst, *(apart(a, b, case.dtype, 1) for a, b in zip(caches[:2], caches[2:], strict=True)))
        worst = max(worst, apart(rotated, expected, case.dtype, 1))
    return worst


def block_copies(case: Case) -> float:
    source, target = case.numbers(6, 2, 16, 33), case.numbers(5, 2, 16, 33)
    expected = target.clone()
    count = case.dice.randint(1, 5)
    sources = case.on_device((case.dice.randrange(6) for _ in range(count)), torch.int64)
    targets = case.on_device(case.dice.sample(range(5), count), torch.int64)
    case.kernels.copy_blocks(source, target, sources, targets)
    _REFERENCE.copy_blocks(source, expected, sources, targets)
    return 0.0 if torch.equal(target, expected) else float("inf")


# --- Attention --------------------------------------------------------------------------------------------------------


def attention(case: Case, kind: str) -> float:
    """Requests of random lengths with or without a window; the cache is NaN wherever no context lies."""
    dice, block_size = case.dice, case.dice.choice([7, 16, 32])
    head_dim, kv_heads, group = dice.choice([64, 96, 128, 256]), dice.randint(1, 2), dice.randint(1, 8)
    contexts = [dice.choice(_BORDERS) for _ in range(dice.randint(1, 4))]
    if kind == "decode":
        contexts.append(3000)  # Long enough to be split into parts.
    queries = [1 if kind == "decode" or (kind == "mixed" and dice.random() < 0.5) else dice.randint(1, context)
               for context in contexts]
    tables, num_blocks = scattered_tables(contexts, block_size, dice)
    batch = batch_of(queries, contexts, tables, block_size, case.device)
    keys, values = (torch.full((num_blocks, kv_heads, block_size, head_dim), float("nan"), dtype=case.dtype,
                               device=case.device) for _ in range(2))
    for context, table in zip(contexts, tables, strict=True):
        for index in range(0, context, block_size):
            length = min(block_size, context - index)
            for cache in (keys, values):
                cache[table[index // block_size], :, :length] = case.numbers(kv_heads, length, head_dim)
    q = case.numbers(sum(queries), kv_heads * group, head_dim)
    window = dice.choice([None, None, 1, 33, 200])
    arguments = keys, values, batch, head_dim**-0.5, window
    worst = apart(case.kernels.paged_attention(q, *arguments), _REFERENCE.paged_attention(q.double(), *arguments),
                  case.dtype, 3)
    narrow = [cache.nan_to_num(0.0).to(torch.float8_e4m3fn) for cache in (keys, values)]
    scales = KVScales(0.7, 1.3)
    actual = case.kernels.paged_attention(q, *narrow, batch, head_dim**-0.5, window, scales)  # type: ignore[call-arg]
    expected = fp8_kv.reference_attention(q.double(), *narrow, batch, head_dim**-0.5, window, scales)
    return max(worst, apart(actual, expected, case.dtype, 3))


def scattered_tables(contexts: Sequence[int], block_size: int, dice: random.Random) -> tuple[list[list[int]], int]:
    """Blocks in random order for each context, and how many blocks there are, one of which nobody has."""
    needed = [-(-context // block_size) for context in contexts]
    free = dice.sample(range(sum(needed) + 1), sum(needed) + 1)
    nobodys = free.pop()
    tables = [[free.pop() for _ in range(count)] for count in needed]
    width = max(needed)
    return [table + [nobodys] * (width - len(table)) for table in tables], sum(needed) + 1


def batch_of(queries: Sequence[int], contexts: Sequence[int], tables: Sequence[Sequence[int]], block_size: int,
             device: torch.device) -> AttentionBatch:
    starts = (0, *accumulate(queries))
    slots = [table[position // block_size] * block_size + position % block_size
             for count, context, table in zip(queries, contexts, tables, strict=True)
             for position in range(context - count, context)]
    return AttentionBatch(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        torch.tensor(tables, dtype=torch.int32, device=device), torch.tensor(slots, device=device), max(queries),
        max(contexts), starts, tuple(contexts))


# --- Products ---------------------------------------------------------------------------------------------------------


def plain_product(case: Case, field: str, quantize: Callable[[Tensor], Any]) -> float:
    """x @ W.T of a matrix with a weight of about 1: each number is a sum of as many random summands as columns."""
    rows, channels = case.dice.choice([1, 3, 17, 64, 200]), case.dice.choice([1, 70, 128, 515])
    columns = 32 * case.dice.choice([1, 5, 18, 128])
    weight = quantize(case.numbers(channels, columns, dtype=torch.float32))
    x = case.numbers(rows, columns)
    actual = getattr(case.kernels, field)(weight)(x)
    expected = getattr(_REFERENCE, field)(weight)(x.double())
    return apart(actual, expected, case.dtype, 2, columns**0.5)


def rounded_product(case: Case, field: str, quantize: Callable[[Tensor], Any]) -> float:
    """With activations that are rounded too: one that lies half-way between two numbers may be rounded either way.

    What is allowed is so the rounding of one activation in ten, not that of the result.
    """
    rows, channels = case.dice.choice([1, 3, 17, 64]), case.dice.choice([1, 70, 515])
    columns = 32 * case.dice.choice([1, 18, 128])
    weight, x = quantize(case.numbers(channels, columns, dtype=torch.float32)), case.numbers(rows, columns)
    actual = getattr(case.kernels, field)(weight)(x)
    expected = getattr(_REFERENCE, field)(weight)(x.double())
    steps = 2 + 0.1 * (0.03 if field == "int8_dynamic" else 0.06) / STEP[case.dtype]
    return apart(actual, expected, case.dtype, steps, columns**0.5)


# --- Sampling ---------------------------------------------------------------------------------------------------------


def largest(case: Case) -> float:
    logits = case.numbers(case.dice.randint(1, 9), case.dice.choice([1, 77, 4097, 128256])).round(decimals=1)
    values, indices = case.kernels.argmax(logits)
    is_first = indices == (logits == logits.amax(dim=1, keepdim=True)).int().argmax(dim=1)
    return 0.0 if torch.equal(values, logits.amax(dim=1)) and is_first.all() else float("inf")


def draws(case: Case) -> float:
    """Where float32 cannot tell the two best sums apart, the second best may be drawn."""
    rows = case.dice.randint(1, 9)
    logits = 3 * case.numbers(rows, case.dice.choice([3, 300, 4097, 128256]))
    temperatures = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).add(0.1)
    temperatures = temperatures.to(case.device)
    keys = case.on_device(([case.dice.randrange(2**32), case.dice.randrange(2**32)] for _ in range(rows)), torch.int64)
    expected = _REFERENCE.draw(logits, temperatures, keys)
    nudged = logits.double().scatter_add(1, expected.unsqueeze(1), -1e-4 * temperatures.unsqueeze(1))
    actual, second = case.kernels.draw(logits, temperatures, keys), _REFERENCE.draw(nudged, temperatures, keys)
    return 0.0 if ((actual == expected) | (actual == second)).all() else float("inf")


def truncation(case: Case) -> float:
    """The same tokens but for one at the border of a share: its own share of the row is what they are apart by."""
    rows, vocab = case.dice.randint(1, 5), case.dice.choice([5, 300, 4097, 128256])
    logits = 3 * case.numbers(rows, vocab)
    temperatures, top_p, min_p = (case.on_device((case.dice.uniform(*ends) for _ in range(rows)), torch.float64)
                                  for ends in ((0.3, 2), (0.05, 1), (0, 0.2)))
    top_k = case.on_device((case.dice.choice([1, 50, vocab]) for _ in range(rows)), torch.int64)
    arguments = logits, temperatures, top_k, top_p, min_p
    actual, expected = case.kernels.truncate(*arguments), _REFERENCE.truncate(*arguments)
    is_kept = actual > float("-inf")
    differs = is_kept != (expected > float("-inf"))
    if not torch.equal(actual[is_kept], logits[is_kept]) or not is_kept.any(dim=1).all():
        return float("inf")
    shares = (logits.double() / temperatures.unsqueeze(1)).softmax(dim=1)
    lost = (shares * differs).sum(dim=1) * (differs.sum(dim=1) > 1)
    return float(lost.max()) / 1e-5


_FLOAT32_ONLY = ("argmax", "draw", "truncate")
_CHECK_OF = {"decode attention": "attention decode", "prefill attention": "attention prefill",
             "eight-bit products": "fp8", "int4 products": "int4", "fp4 products": "mxfp4"}


def all_checks(has_fp8: bool) -> dict[str, Check]:
    """By the operation's name; `has_fp8`: whether the GPU multiplies eight-bit floats."""
    found: dict[str, Check] = {
        "norms": norms,
        "silu_and_mul": silu_and_mul,
        "rope_and_cache": rotation,
        "copy_blocks": block_copies,
        **{f"attention {kind}": partial(attention, kind=kind) for kind in ("decode", "prefill", "mixed")},
        "fp8": partial(plain_product, field="fp8", quantize=quantize_fp8),
        "int8": partial(plain_product, field="int8", quantize=int8_linear.quantize),
        "int8 by groups": partial(plain_product, field="int8", quantize=partial(int8_linear.quantize, group_size=32)),
        "int4": partial(plain_product, field="int4", quantize=quantize_int4),
        "int4 by groups": partial(plain_product, field="grouped_int4",
                                  quantize=partial(grouped_int4_linear.quantize, group_size=32)),
        "mxfp4": partial(plain_product, field="fp4", quantize=quantize_mxfp4),
        "nvfp4": partial(plain_product, field="fp4", quantize=quantize_nvfp4),
        "int8_dynamic": partial(rounded_product, field="int8_dynamic", quantize=int8_linear.quantize),
        "fp8_dynamic": partial(rounded_product, field="fp8_dynamic", quantize=quantize_fp8),
        "argmax": largest,
        "draw": draws,
        "truncate": truncation,
    }
    return found if has_fp8 else {name: check for name, check in found.items() if name != "fp8_dynamic"}
