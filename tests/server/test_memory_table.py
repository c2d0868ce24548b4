"""The table of the device's memory at the start of a server."""

from __future__ import annotations

from dataclasses import replace

from servekit.engine.messages import EngineFacts
from servekit.model.footprint import MemoryUse, memory_use
from servekit.server.memory_table import memory_table

GB = 10**9
FACTS = EngineFacts("tiny", 8192, 128256, 1000, 16, "a GPU", "bfloat16", "fp8", "bfloat16", "triton", 8, 8 * GB,
                    40 * GB, 1.0)


def table(use: MemoryUse) -> list[str]:
    return memory_table(replace(FACTS, memory=use))


def test_every_part_has_a_line_and_the_sizes_add_up() -> None:
    lines = table(memory_use(80 * GB, 70 * GB, 0.9, 0.1, 8 * GB, 5 * GB, graphs=GB // 2, is_measured=True))
    assert lines == [
        "memory          70.00 GB  others hold 10.00 GB of 80.00 GB",
        "  weights        8.00 GB  fp8, others bfloat16",
        "  largest step   5.00 GB  measured",
        "  CUDA graphs    0.50 GB",
        "  headroom       7.00 GB",
        "  KV cache      40.00 GB  1,000 blocks of 16 = 16,000 tokens, bfloat16",
        "  unused         9.50 GB  more than all requests can fill, or memory.num_kv_blocks"]


def test_what_is_not_there_has_no_line() -> None:
    lines = table(memory_use(60 * GB, 60 * GB, 1.0, 0.1, 8 * GB, 6 * GB))
    assert [line.split("  ")[0] or line.split("  ")[1] for line in lines] == [
        "memory", "weights", "largest step", "headroom", "KV cache"]
    assert "estimated" in lines[2]


def test_an_engine_that_says_nothing_has_no_table() -> None:
    assert memory_table(FACTS) == []
