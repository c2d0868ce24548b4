"""Times every operation of a decode step of SmolLM2-135M by itself, beside what the machine can do.

    python experiments/cpu-speed/operations.py [batches=1,8,32,128] [contexts=128,290,1024,4096] [threads=2]
                                               [out=operations.json]

Random weights in four bits (the head in eight), a bfloat16 KV cache whose blocks lie in random order. An operation runs
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
HEAD_BYTES = VOCAB * HIDDEN * 9 / 8
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

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._matrices = {name: self._copies(*shape) for name, shape in SHAPES.items()}
        head = Int8Weight(torch.randint(-127, 128, (VOCAB, HIDDEN), dtype=torch.int8), torch.rand(VOCAB, HIDDEN // 32))
        self._heads = [kernels.int8(head) for _ in range(num_copies(HEAD_BYTES))]

    def by_batch(self, batch: int) -> Iterator[Operation]:
        """What does not depend on the context."""
        kernels = self._kernels
        for name, (rows, columns) in SHAPES.items():
            x = torch.randn(batch, columns)
            yield Operation(name, batch, None, [partial(product, x) for product in self._matrices[name]], LAYERS,
                            int4_bytes(rows, columns), 2 * batch * rows * columns)
        x, weight, wide = torch.randn(batch, HIDDEN), torch.ones(HIDDEN), torch.randn(batch, 2 * INTERMEDIATE)
        yield Operation("add_rms_norm", batch, None, [partial(kernels.add_rms_norm, x, x, weight, 1e-5)], 2 * LAYERS,
                        0, 0)
        yield Operation("silu_and_mul", batch, None, [partial(kernels.silu_and_mul, wide)], LAYERS, 0, 0)
        yield Operation("head", batch, None, [partial(head, x) for head in self._heads], 1, HEAD_BYTES,
                        2 * batch * VOCAB * HIDDEN)
        yield Operation("argmax", batch, None, [partial(kernels.argmax, self._heads[0](x))], 1, 4 * batch * VOCAB, 0)

    def by_context(self, batch: int, context: int) -> Iterator[Operation]:
        """Attention and the write to the cache."""
        kernels, layer_bytes = self._kernels, 4 * batch * context * KV_HEADS * HEAD_DIM
        caches = [paged_cache(batch, context) for _ in range(num_copies(layer_bytes))]
        step = decode_batch(batch, context)
        heads = torch.randn(batch, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = heads.split_with_sizes([HEADS, KV_HEADS, KV_HEADS], 1)
        angles = torch.outer(torch.arange(context), torch.rand(HEAD_DIM // 2))
        cos_sin, positions = torch.cat((angles.cos(), angles.sin()), dim=1), torch.full((batch,), context - 1)
        yield Operation("rope_and_cache", batch, context,
                        [partial(kernels.rope_and_cache, q, k, v, cos_sin, positions, *kv, step.slots)
                         for kv in caches], LAYERS, 0, 0)
        yield Operation("paged_attention", batch, context,
                        [partial(kernels.paged_attention, q.contiguous(), *kv, step, HEAD_DIM ** -0.5, None)
                         for kv in caches], LAYERS, layer_bytes, 4 * batch * context * HEADS * HEAD_DIM)

    def _copies(self, rows: int, columns: int) -> list[Product]:
        groups = columns // 32
        weight = Int4Weight(torch.randint(0, 16, (rows, columns), dtype=torch.uint8),
                            torch.rand(rows, groups).half(), torch.rand(rows, groups).half())
        return [self._kernels.int4(weight) for _ in range(num_copies(int4_bytes(rows, columns)))]


SHAPES = {"qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), "o": (HIDDEN, HEADS * HEAD_DIM),
          "gate_up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}


def int4_bytes(rows: int, columns: int) -> float:
    return rows * columns * 5 / 8


def blocks_of(context: int) -> int:
    return -(-context // BLOCK_SIZE)


def paged_cache(batch: int, context: int) -> tuple[Tensor, Tensor]:
    shape = batch * blocks_of(context), KV_HEADS, BLOCK_SIZE, HEAD_DIM
    keys, values = empty(shape, torch.bfloat16), empty(shape, torch.bfloat16)
    return keys.normal_(), values.normal_()


def decode_batch(batch: int, context: int) -> AttentionBatch:
    """Every request computes its last token; its blocks lie anywhere."""
    tables = torch.randperm(batch * blocks_of(context)).view(batch, -1)
    last = context - 1
    return AttentionBatch(torch.arange(batch + 1, dtype=torch.int32), torch.full((batch,), context, dtype=torch.int32),
                          tables.to(torch.int32), tables[:, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE, 1,
                          context, tuple(range(batch + 1)), (context,) * batch)


def show(figure: Figure, facts: dict[str, float]) -> None:
    context = "" if figure.context is None else str(figure.context)
    read, products = figure.gb_s / facts["read_gb_s"], figure.gop_s / facts["int8_gop_s"]
    print(f"{figure.name:16}{figure.batch:6}{context:>9}{figure.step_ms:10.3f} ms{figure.gb_s:8.1f} GB/s{read:6.0%}"
          f"{figure.gop_s:9.1f} GOP/s{products:6.0%}", flush=True)


def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    batches, contexts = ([int(value) for value in options.get(key, default).split(",")] for key, default in
                         (("batches", "1,8,32,128"), ("contexts", "128,290,1024,4096")))
    threads = int(options.get("threads", len(os.sched_getaffinity(0))))
    torch.set_num_threads(threads)
    kernels = cpu_kernels(reference_kernels(), default_cache_dir(os.environ) / "kernels", threads, lambda: None)
    facts = {"threads": threads, **limits()}
    print(json.dumps(facts))
    figures = []
    with torch.inference_mode():
        bench = Bench(kernels)
        for batch in batches:
            for operation in bench.by_batch(batch):
                figures.append(measure(operation))
                show(figures[-1], facts)
        for batch in batches:
            for context in contexts:
                for operation in bench.by_context(batch, context):
                    figures.append(measure(operation))
                    show(figures[-1], facts)
    if "out" in options:
        result = {"facts": facts, "figures": list(map(asdict, figures))}
        Path(options["out"]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
