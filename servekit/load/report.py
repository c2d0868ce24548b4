"""How a run is shown: a table for people, a JSON document for everything else."""

from __future__ import annotations

import os
import platform
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from servekit import __version__
from servekit.config.bench import BenchConfig, SloConfig
from servekit.config.errors import require
from servekit.config.resolve import config_hash, flatten
from servekit.load.metrics import e2e_s, itl_s, meets, tpot_s, ttft_s
from servekit.load.openai import ServerFacts
from servekit.load.percentiles import SAMPLES_BEYOND, Distribution, Percentile
from servekit.load.records import RequestRecord
from servekit.load.summary import LAG_LIMIT_S, Summary
from servekit.load.target import FailureKind

FORMAT_VERSION = 1
_STATIONARY_WITHIN = 0.2
"""Share by which the two sides of Little's law may differ before the report points it out."""
_FAILURES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """Where the load came from."""

    servekit: str = __version__
    python: str = field(default_factory=platform.python_version)
    system: str = field(default_factory=platform.platform)
    cpus: int | None = field(default_factory=os.cpu_count)


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run and everything that is known about it."""

    config: BenchConfig
    seed: int
    started_at: str
    """Wall-clock time in ISO format, UTC."""
    is_interrupted: bool
    server: ServerFacts
    summary: Summary
    records: list[RequestRecord]
    client: ClientFacts = field(default_factory=ClientFacts)


# --- the JSON document ------------------------------------------------------------------------------------------------

def check_out(path: str | None, overwrite: bool) -> None:
    """Raise ConfigError, before any load is sent, if the result could not be written in the end."""
    if path is None:
        return
    require(overwrite or not Path(path).exists(), "out", path, "exists already",
            "give another name or set overwrite=true")
    folder = Path(path).absolute().parent
    require(folder.is_dir() and os.access(folder, os.W_OK), "out", path, f"{folder} is not a folder to write in",
            "create it or give another name")
    require(not Path(path).is_dir(), "out", path, "is a folder", "give the name of a file")


def write_document(run: Run, path: str) -> None:
    """Write the JSON document at once or not at all: one line for what is known of the run, then one a request."""
    encode = msgspec.json.Encoder(enc_hook=_plain).encode
    head = encode(document_head(run)).removesuffix(b"}")
    rows = b",\n".join(encode(row(record, run.config.slo)) for record in sorted(run.records, key=lambda r: r.index))
    target = Path(path).absolute()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(head + b',\n"requests":[\n' + rows + b"\n]}\n")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def document_head(run: Run) -> dict[str, Any]:
    """Everything about a run but its requests. Times in seconds."""
    return {
        "format_version": FORMAT_VERSION,
        "started_at": run.started_at,
        "is_interrupted": run.is_interrupted,
        "seed": run.seed,
        "config": flatten(run.config),
        "config_hash": config_hash(run.config),
        "client": run.client,
        "server": run.server,
        "summary": run.summary,
    }


def row(record: RequestRecord, slo: SloConfig) -> dict[str, Any]:
    """One request as a row: what was recorded, and what follows from it (latencies are null if it failed)."""
    return {name: getattr(record, name) for name in RequestRecord.__slots__} | _latencies(record, slo)


def _latencies(record: RequestRecord, slo: SloConfig) -> dict[str, Any]:
    judged = slo.is_set
    if record.failure is not None:
        return (dict.fromkeys(("first_token_s", "ttft_s", "tpot_s", "max_itl_s", "e2e_s"))
                | {"meets_slo": False if judged else None})
    timeline = record.timeline
    return {"first_token_s": timeline.token_times_s[0], "ttft_s": ttft_s(timeline), "tpot_s": tpot_s(timeline),
            "max_itl_s": max(itl_s(timeline), default=None), "e2e_s": e2e_s(timeline),
            "meets_slo": meets(timeline, slo) if judged else None}


def _plain(value: object) -> object:
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in a result file")


# --- the table --------------------------------------------------------------------------------------------------------

def print_report(run: Run, console: Console) -> None:
    """Print the figures of a run, and what keeps them from being trusted."""
    summary = run.summary
    for line in _facts(run):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_latency_table(summary))
    for line in [*_footnote(summary), *_figures(summary), *_failures(run)]:
        console.print(line, highlight=False, soft_wrap=True)
    for line in _warnings(run):
        console.print(f"warning: {line}", style="yellow", highlight=False, soft_wrap=True)


def _facts(run: Run) -> Iterator[str]:
    counts = run.summary.counts
    yield f"{run.server.model} at {run.config.url}, seed {run.seed}"
    yield (f"{counts.measured} requests measured: {counts.succeeded} succeeded, {counts.failed} failed; "
           f"left out: {counts.warmup} for warm-up, {counts.interrupted} interrupted")
    if lengths := run.summary.lengths:
        cached = "" if lengths.cached_share is None else f", {lengths.cached_share:.0%} of the prompt cached"
        yield f"mean prompt {lengths.prompt_tokens:.0f} tokens, mean output {lengths.output_tokens:.0f} tokens{cached}"


def _latency_table(summary: Summary) -> Table:
    table = Table("latency in ms", "mean", *(percentile.value for percentile in Percentile), "samples")
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column is table.columns[0] else "right"
    for name, distribution in _latency_rows(summary):
        if distribution is None:
            table.add_row(name, *["–"] * (len(Percentile) + 1), "0")
        else:
            table.add_row(name, _ms(distribution.mean), *(_quantile(distribution, p) for p in Percentile),
                          str(distribution.count))
    return table


def _latency_rows(summary: Summary) -> list[tuple[str, Distribution | None]]:
    latencies = summary.latencies
    rows = [("TTFT", latencies.ttft_s), ("TPOT", latencies.tpot_s), ("ITL", latencies.itl_s),
            ("longest ITL", latencies.max_itl_s), ("E2E", latencies.e2e_s)]
    return rows if summary.lag_s is None else [*rows, ("generator lag", summary.lag_s)]


def _quantile(distribution: Distribution, percentile: Percentile) -> str:
    mark = "*" if percentile in distribution.too_few_samples_for else ""
    return _ms(distribution.percentiles[percentile]) + mark


def _footnote(summary: Summary) -> Iterator[str]:
    marked = {p for _, d in _latency_rows(summary) if d is not None for p in d.too_few_samples_for}
    if marked:
        needed = ", ".join(f"{p.value} needs {p.samples_needed:,} samples" for p in Percentile if p in marked)
        yield f"* fewer than {SAMPLES_BEYOND} samples lie beyond it, so it is an indication only: {needed}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"


def _figures(summary: Summary) -> Iterator[str]:
    if throughput := summary.throughput:
        yield (f"throughput: {throughput.output_tokens_per_s:.1f} output tok/s, "
               f"{throughput.total_tokens_per_s:.1f} total tok/s, {throughput.requests_per_s:.3f} req/s, over the "
               f"{throughput.window_s:.1f} s from the first intended send to the last end")
    if goodput := summary.goodput:
        yield f"goodput: {goodput.share:.1%} of the requests meet the SLO, {goodput.requests_per_s:.3f} req/s"
    if law := summary.littles_law:
        yield (f"Little's law: {law.mean_in_system:.2f} requests in the system on average; "
               f"{law.rate_per_s:.3f} req/s x {law.mean_time_s:.3f} s = {law.predicted:.2f}")


def _failures(run: Run) -> Iterator[str]:
    failures = Counter((r.failure.kind.value, r.failure.status, r.failure.text) for r in run.records
                       if r.failure is not None and not r.is_warmup and r.failure.kind is not FailureKind.interrupted)
    for (kind, status, text), count in failures.most_common(_FAILURES_SHOWN):
        yield f"failed {count} x {kind}{f' {status}' if status else ''}: {text}"
    if len(failures) > _FAILURES_SHOWN:
        yield f"and {len(failures) - _FAILURES_SHOWN} other failures; out=FILE lists them all"


def _warnings(run: Run) -> Iterator[str]:
    summary = run.summary
    if run.is_interrupted:
        yield "the run was ended by hand; the figures are of what had ended by then"
    if summary.is_generator_late and summary.lag_s is not None:
        yield (f"the load generator was late: p99 {_ms(summary.lag_s.percentiles[Percentile.p99])} ms exceeds "
               f"{_ms(LAG_LIMIT_S)} ms, so the numbers are not to be trusted; lower the rate or give it a free core")
    if summary.counts.short:
        yield (f"{summary.counts.short} answers were shorter than asked for; "
               "the server may not honour ignore_eos, or its max_model_len was reached")
    law = summary.littles_law
    if law is not None and abs(law.mean_in_system - law.predicted) > _STATIONARY_WITHIN * law.predicted:
        yield ("Little's law does not hold within "
               f"{_STATIONARY_WITHIN:.0%}: the queue grew or shrank, or the run was short beside its requests")
