"""`servekit bench`: one load run against an OpenAI-compatible server, measured and judged."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from rich.console import Console

from servekit.config.bench import BenchConfig, ClosedArrivalConfig, LoadConfig, TraceWorkloadConfig
from servekit.config.errors import ConfigError, require
from servekit.garbage import left_alone
from servekit.load.arrivals import schedule
from servekit.load.driver import Limits, LoadRun
from servekit.load.openai import OpenAITarget, RequestOptions, ask_facts, open_session
from servekit.load.progress import progress
from servekit.load.records import RequestRecord
from servekit.load.report import Run, check_out, count_failures, print_report, write_document
from servekit.load.summary import summarise
from servekit.load.workload import ConfiguredWorkload, Vocabulary, shapes

if TYPE_CHECKING:
    from servekit.config.compose import Composed


def run(composed: Composed[BenchConfig]) -> int:
    """Run the benchmark and print its figures; returns the exit status, 0 if at least one request succeeded.

    Raises ConfigError, before any load is sent, for a server that cannot be reached, a trace that cannot be read,
    or a result file that cannot be written.
    """
    config = composed.config
    check_out(config.out, config.overwrite)
    finished, records = asyncio.run(bench(config, Console(stderr=True)))
    print_report(finished, Console())
    if config.out is not None:
        write_document(finished, records, config.out)
    return 0 if finished.summary.counts.succeeded else 1


async def bench(config: BenchConfig, console: Console) -> tuple[Run, list[RequestRecord]]:
    """Send the load that a configuration describes, showing progress on `console`. Raises ConfigError."""
    seed = secrets.randbits(32) if config.seed is None else config.seed
    limits = limits_of(config)
    total = check_trace(config, limits)
    async with open_session(config.url, api_key(config, os.environ)) as session:
        server = await ask_facts(session, config)
        console.print(f"seed {seed}; Ctrl-C stops sending, Ctrl-C again ends at once", soft_wrap=True)
        workload = ConfiguredWorkload(config.workload, Vocabulary(config.vocab_low, config.vocab_high), seed)
        target = OpenAITarget(session, RequestOptions.of(config, server.model))
        load = LoadRun(schedule(workload, config.arrival, seed), target, limits)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        with _ended_gently(load), left_alone():
            async with progress(load, total, console):
                records = await load.run()
    summary = summarise(records, config.slo, is_open_loop=limits.concurrency is None)
    run = Run(f"{server.model} at {config.url}", config, seed, started_at, load.is_stopped, server, summary,
              count_failures(records))
    return run, records


def limits_of(config: LoadConfig) -> Limits:
    """The limits of a run."""
    concurrency = config.arrival.concurrency if isinstance(config.arrival, ClosedArrivalConfig) else None
    return Limits(concurrency, config.num_requests, config.duration_s, config.warmup_requests, config.timeout_s)


def api_key(config: BenchConfig, environ: Mapping[str, str]) -> str | None:
    """The API key that the configured variable holds. Raises ConfigError if it holds none."""
    if config.api_key_env is None:
        return None
    key = environ.get(config.api_key_env)
    if not key:
        raise ConfigError("api_key_env", config.api_key_env, "is not set in the environment",
                          f"export {config.api_key_env}, or set api_key_env=null")
    return key


def check_trace(config: LoadConfig, limits: Limits) -> int | None:
    """How many requests will be sent at most, None if no number bounds them.

    Reads the window of a trace once, so that a line that cannot be used stops the run before it starts.
    Raises ConfigError.
    """
    if not isinstance(config.workload, TraceWorkloadConfig):
        return limits.total_requests
    found = sum(1 for _ in islice(shapes(config.workload, seed=0), limits.total_requests))
    require(found > limits.warmup_requests, "workload.path", config.workload.path,
            f"has {found} requests, and warmup_requests={limits.warmup_requests} of them are left out",
            "choose a longer trace or lower warmup_requests")
    return found


@contextmanager
def _ended_gently(load: LoadRun) -> Iterator[None]:
    """Let Ctrl-C stop the sending, and a second one the waiting as well."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: load.cut() if load.is_stopped else load.stop())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
