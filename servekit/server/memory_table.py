"""Where the device's memory went, as the lines of a table."""

from __future__ import annotations

from collections.abc import Iterator

from servekit.engine.messages import EngineFacts
from servekit.model.footprint import MemoryUse, gigabytes


def memory_table(facts: EngineFacts) -> list[str]:
    """One line a part: name, size, what is in it. Nothing where the engine has not said."""
    if facts.memory is None:
        return []
    rows = list(_rows(facts, facts.memory))
    name_width, size_width = max(len(name) for name, _, _ in rows), max(len(gigabytes(size)) for _, size, _ in rows)
    return [f"{name:{name_width}}  {gigabytes(size):>{size_width}}  {text}".rstrip() for name, size, text in rows]


def _rows(facts: EngineFacts, use: MemoryUse) -> Iterator[tuple[str, int, str]]:
    yield "memory", use.usable_bytes, use.others
    kind = facts.dtype if facts.quantization == "none" else f"{facts.quantization}, others {facts.dtype}"
    yield "  weights", use.weights_bytes, kind
    yield "  largest step", use.activation_bytes, "measured" if use.is_measured else "estimated"
    if use.graph_bytes:
        yield "  CUDA graphs", use.graph_bytes, ""
    yield "  headroom", use.headroom_bytes, ""
    yield "  KV cache", facts.kv_bytes, (f"{facts.num_kv_blocks:,} blocks of {facts.block_size_tokens} = "
                                         f"{facts.kv_tokens:,} tokens, {facts.kv_dtype}")
    block_bytes = facts.kv_bytes // max(1, facts.num_kv_blocks)
    if (unused := use.room_bytes - facts.kv_bytes) > block_bytes:
        yield "  unused", unused, "more than all requests can fill, or memory.num_kv_blocks"
