"""The line of statistics that a busy server prints every few seconds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from servekit.engine.messages import EngineStats
from servekit.server.metrics import counted_from

log = logging.getLogger(__name__)


async def log_throughput(stats: Callable[[], EngineStats], interval_s: float) -> None:
    """Log one line every `interval_s` in which the engine did something, for ever."""
    last = stats()
    while True:
        await asyncio.sleep(interval_s)
        now = stats()
        last = counted_from(last, now)
        if now.num_steps_total > last.num_steps_total or now.num_running or now.num_waiting:
            log.info("%s", throughput_line(last, now, interval_s))
        last = now


def throughput_line(last: EngineStats, now: EngineStats, interval_s: float) -> str:
    """What happened between two readings of the engine's counters."""
    prompt = now.prompt_tokens_total - last.prompt_tokens_total
    output = now.generation_tokens_total - last.generation_tokens_total
    queried = now.prefix_queries_total - last.prefix_queries_total
    hit = now.cached_tokens_total - last.cached_tokens_total
    kv_share = now.kv_blocks_used / now.kv_blocks_total if now.kv_blocks_total else 0.0
    line = (f"prompt {prompt / interval_s:.1f} tok/s, output {output / interval_s:.1f} tok/s, "
            f"running {now.num_running}, waiting {now.num_waiting}, KV {kv_share:.0%}")
    if queried:
        line += f", prefix hits {hit / queried:.0%}"
    return line + _given_way(last, now)


def _given_way(last: EngineStats, now: EngineStats) -> str:
    """Preemptions and swaps, if there were any."""
    preempted = now.preemptions_total - last.preemptions_total
    swapped_out = now.swapped_out_blocks_total - last.swapped_out_blocks_total
    swapped_in = now.swapped_in_blocks_total - last.swapped_in_blocks_total
    words = f", preempted {preempted}" if preempted else ""
    return words + (f", swapped {swapped_out} blocks out and {swapped_in} in" if swapped_out or swapped_in else "")
