"""Times every operation of a decode step of SmolLM2-135M by itself, beside what the machine can do.

    python experiments/cpu-speed/operations.py [weights=int8] [batches=1,8,32,128] [contexts=128,290,1024,4096]
                                               [prompts=256,512] [shared=512] [threads=2] [out=operations.json]

Random weights in eight or four bits (the head in eight), a bfloat16 KV cache whose blocks lie in random order. prompts:
also attention of one prompt of so many tokens to itself; shared: also attention of every batch when the first so many
tokens of all contexts are the same blocks. An operation runs
on one copy of its data after the other, which together are several times the last cache, so that nothing is found there
which a real step would have to read. Each copy's time is the least of many rounds, since machines are shared; a figure
is the copies' mean, times the calls of one step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from run import limits
from torch import Tensor

from servekit.kernels import AttentionBatch, Kernels, Product, reference_kernels
from servekit.kernels.cpu import cpu_kernels
from servekit.kernels.cpu.huge_pages import empty
from servekit.kernels.int4_linear import Int4Weight
from servekit.kernels.int8_linear import Int8Weight
from servekit.model.source import default_cache_dir

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 576, 1536, 30, 49152
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
HEAD_BYTES = VOCAB * HIDDEN * 9 / 8  # A scale for 32 columns, as in the default model's file.
BEYOND_CACHE_BYTES = 160 * 2 ** 20
TIMED_S = 0.7


@dataclass(frozen=True)
class Operation:
    """One operation of a step."""

    name: str
    batch: int
    context: int | None
    """Where it matters."""
    calls: list[Callable[[], object]]
    """One for each copy of the data."""
    count: int
    """How often a step calls it."""
    read_bytes: float
    """Weights or cache that one call reads."""
    products: float
    """Multiplications and additions of one call."""


@dataclass(frozen=True)
class Figure:
    """What one operation takes of a step."""

    name: str
    batch: int
    context: int | None
    step_ms: float
    gb_s: float
    gop_s: float


def measure(operation: Operation) -> Figure:
    least_s, deadline = [float("inf")] * len(operation.calls), time.perf_counter() + TIMED_S
    while time.perf_counter() < deadline:
        for index, call in enumerate(operation.calls):
            start = time.perf_counter()
            call()
            least_s[index] = min(least_s[index], time.perf_counter() - start)
    call_s = sum(least_s) / len(least_s)
    return Figure(operation.name, operation.batch, operation.context, 1e3 * call_s * operation.count,
                  operation.read_bytes / call_s / 1e9, operation.products / call_s / 1e9)


def num_copies(num_bytes: float) -> int:
    return 1 + int(BEYOND_CACHE_BYTES / num_bytes)


class Bench:
    """The operations with random weights."""

    def __init__(self, kernels: Kernels, weights: Weights) -> None:
        self._kernels = kernels
        self._weights = weights
        self._matrices = {name: self._copies(*shape) for name, shape in SHAPES.items()}
        head = Int8Weight(torch.randint(-127, 128, (VOCAB, HIDDEN), dtype=torch.int8), torch.rand(VOCAB, HIDDEN // 32))
        self._heads = [kernels.int8(head) for _ in range(num_copies(HEAD_BYTES))]

    def by_batch(self, batch: int) -> Iterator[Operation]:
        """What does not depend on the context."""
        kernels = self._kernels
        for name, (rows, columns) in SHAPES.items():
            x = torch.randn(batch, columns)
            yield Operation(name, batch, None, [partial(product, x) for product in self._matrices[name]], LAYERS,
                            rows * columns * self._weights.bytes_each, 2 * batch * rows * columns)
        x, weight, wide = torch.randn(batch, HIDDEN), torch.ones(HIDDEN), torch.randn(batch, 2 * INTERMEDIATE)
        yield Operation("add_rms_norm", batch, None, [partial(kernels.add_rms_norm, x, x, weight, 1e-5)], 2 * LAYERS,
                        0, 0)
        yield Operation("silu_and_mul", batch, None, [partial(kernels.silu_and_mul, wide)], LAYERS, 0, 0)
        yield Operation("head", batch, None, [partial(head, x) for head in self._heads], 1, HEAD_BYTES,
                        2 * batch * VOCAB * HIDDEN)
        yield Operation("argmax", batch, None, [partial(kernels.argmax, self._heads[0](x))], 1, 4 * batch * VOCAB, 0)

    def by_context(self, batch: int, context: int) -> Iterator[Operation]:
        """Attention and the write to the cache."""
        layer_bytes = 4 * batch * context * KV_HEADS * HEAD_DIM
        caches = [paged_cache(batch, context) for _ in range(num_copies(layer_bytes))]
        step = attention_batch(1, blocks(batch, context), (context,) * batch)
        heads = torch.randn(batch, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = heads.split_with_sizes([HEADS, KV_HEADS, KV_HEADS], 1)
        angles = torch.outer(torch.arange(context), torch.rand(HEAD_DIM // 2))
        cos_sin, positions = torch.cat((angles.cos(), angles.sin()), dim=1), torch.full((batch,), context - 1)
        yield Operation("rope_and_cache", batch, context,
                        [partial(self._kernels.rope_and_cache, q, k, v, cos_sin, positions, *kv, step.slots)
                         for kv in caches], LAYERS, 0, 0)
        yield self._attention("paged_attention", step, caches)

    def by_prompt(self, tokens: int) -> Iterator[Operation]:
        """Attention of a whole prompt to itself."""
        layer_bytes = 4 * tokens * KV_HEADS * HEAD_DIM
        caches = [paged_cache(1, tokens) for _ in range(num_copies(layer_bytes))]
        yield self._attention("attention of a prompt", attention_batch(tokens, blocks(1, tokens), (tokens,)), caches)

    def by_shared_prefix(self, batch: int, context: int, shared: int) -> Iterator[Operation]:
        """Attention when all contexts begin with the same blocks."""
        caches = [paged_cache(batch, context) for _ in range(num_copies(4 * batch * context * KV_HEADS * HEAD_DIM))]
        tables = blocks(batch, context)
        tables[:, :shared // BLOCK_SIZE] = tables[0, :shared // BLOCK_SIZE].clone()
        yield self._attention(f"shared {shared}", attention_batch(1, tables, (context,) * batch), caches)

    def _attention(self, name: str, step: AttentionBatch, caches: list[tuple[Tensor, Tensor]]) -> Operation:
        lens = step.context_lens_host
        q = torch.randn(len(step.slots), HEADS, HEAD_DIM)
        seen = sum(context * step.max_query_tokens - step.max_query_tokens * (step.max_query_tokens - 1) // 2
                   for context in lens)
        return Operation(name, len(lens), lens[0],
                         [partial(self._kernels.paged_attention, q, *kv, step, HEAD_DIM ** -0.5, None)
                          for kv in caches], LAYERS, 4 * sum(lens) * KV_HEADS * HEAD_DIM, 4 * seen * HEADS * HEAD_DIM)

    def _copies(self, rows: int, columns: int) -> list[Product]:
        count = num_copies(rows * columns * self._weights.bytes_each)
        return [self._weights.product(self._kernels, rows, columns) for _ in range(count)]


@dataclass(frozen=True)
class Weights:
    """A format of the layers' matrices."""

    bytes_each: float
    product: Callable[[Kernels, int, int], Product]
    """Of a random matrix [rows, columns]."""


def int8_product(kernels: Kernels, rows: int, columns: int) -> Product:
    return kernels.int8(Int8Weight(torch.randint(-127, 128, (rows, columns), dtype=torch.int8), torch.rand(rows, 1)))


def int4_product(kernels: Kernels, rows: int, columns: int) -> Product:
    return kernels.int4(Int4Weight(torch.randint(0, 16, (rows, columns), dtype=torch.uint8),
                                   *(torch.rand(rows, columns // 32).half() for _ in range(2))))


WEIGHTS = {"int8": Weights(1, int8_product), "int4": Weights(5 / 8, int4_product)}
SHAPES = {"qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), "o": (HIDDEN, HEADS * HEAD_DIM),
          "gate_up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}


def blocks_of(context: int) -> int:
    return -(-context // BLOCK_SIZE)


def paged_cache(batch: int, context: int) -> tuple[Tensor, Tensor]:
    shape = batch * blocks_of(context), KV_HEADS, BLOCK_SIZE, HEAD_DIM
    keys, values = empty(shape, torch.bfloat16), empty(shape, torch.bfloat16)
    return keys.normal_(), values.normal_()


def blocks(batch: int, context: int) -> Tensor:
    """[batch, blocks of a context]: they lie anywhere."""
    return torch.randperm(batch * blocks_of(context)).view(batch, -1)


def attention_batch(queries: int, tables: Tensor, context_lens: tuple[int, ...]) -> AttentionBatch:
    """Every request computes its last `queries` tokens."""
    starts = torch.arange(len(tables) + 1, dtype=torch.int32) * queries
    positions = torch.tensor([range(context - queries, context) for context in context_lens])
    slots = tables.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionBatch(starts, torch.tensor(context_lens, dtype=torch.int32), tables.to(torch.int32),
                          slots.flatten(), queries, max(context_lens), tuple(starts.tolist()), context_lens)


def show(figure: Figure, facts: dict[str, float]) -> None:
    context = "" if figure.context is None else str(figure.context)
    read, products = figure.gb_s / facts["read_gb_s"], figure.gop_s / facts["int8_gop_s"]
    print(f"{figure.name:22}{figure.batch:6}{context:>9}{figure.step_ms:10.3f} ms{figure.gb_s:8.1f} GB/s{read:6.0%}"
          f"{figure.gop_s:9.1f} GOP/s{products:6.0%}", flush=True)


def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    batches, contexts, prompts, shared = (
        [int(value) for value in options.get(key, default).split(",") if value] for key, default in
        (("batches", "1,8,32,128"), ("contexts", "128,290,1024,4096"), ("prompts", "256,512"), ("shared", "512")))
    weights = options.get("weights", "int8")
    threads = int(options.get("threads", len(os.sched_getaffinity(0))))
    torch.set_num_threads(threads)
    kernels = cpu_kernels(reference_kernels(), default_cache_dir(os.environ) / "kernels", threads, lambda: None)
    facts = {"threads": threads, **limits()}
    print(json.dumps(facts))
    figures = []
    with torch.inference_mode():
        bench = Bench(kernels, WEIGHTS[weights])
        for operation in chain(
                *map(bench.by_batch, batches), *map(bench.by_prompt, prompts),
                *(bench.by_context(batch, context) for batch in batches for context in contexts),
                *(bench.by_shared_prefix(batch, tokens + 64, tokens) for batch in batches for tokens in shared)):
            figures.append(measure(operation))
            show(figures[-1], facts)
    if "out" in options:
        result = {"facts": facts, "weights": weights, "figures": list(map(asdict, figures))}
        Path(options["out"]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
