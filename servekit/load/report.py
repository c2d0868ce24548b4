"""How a run is shown: a table for people, a JSON document for everything else."""

from __future__ import annotations

import os
import platform
import shutil
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
from servekit.config.simulate import SimulateConfig
from servekit.load.metrics import e2e_s, itl_s, meets, tpot_s, ttft_s
from servekit.load.openai import ServerFacts
from servekit.load.percentiles import SAMPLES_BEYOND, Distribution, Percentile
from servekit.load.records import RequestRecord
from servekit.load.summary import LAG_LIMIT_S, GroupSummary, Summary
from servekit.load.target import FailureKind

FORMAT_VERSION = 1
_STATIONARY_WITHIN = 0.2
"""Share by which the two sides of Little's law may differ before the report points it out."""
_FAILURES_SHOWN = 3
_GROUPS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """Where the load came from."""

    servekit: str = __version__
    python: str = field(default_factory=platform.python_version)
    system: str = field(default_factory=platform.platform)
    cpus: int | None = field(default_factory=os.cpu_count)


@dataclass(frozen=True, slots=True)
class SimulatedFacts:
    """The engine that a simulation stood for."""

    model: str
    num_kv_blocks: int
    block_size_tokens: int
    max_model_len: int
    num_steps: int
    elapsed_s: float
    """How long the simulation took."""


Failures = Counter[tuple[str, int | None, str]]
"""Kind, HTTP status if there was one, and text."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run and everything that is known about it."""

    title: str
    """What was measured, for people."""
    config: BenchConfig | SimulateConfig
    seed: int
    started_at: str
    """Wall-clock time in ISO format, UTC."""
    is_interrupted: bool
    server: ServerFacts | SimulatedFacts
    summary: Summary
    failures: Failures
    """How often which failure occurred, of the requests that count."""
    client: ClientFacts = field(default_factory=ClientFacts)


# --- the JSON document ------------------------------------------------------------------------------------------------

def check_out(path: str | None, overwrite: bool, key: str = "out") -> None:
    """Raise ConfigError, before any load is sent, if a file could not be written in the end. `key` is its setting."""
    if path is None:
        return
    require(overwrite or not Path(path).exists(), key, path, "exists already",
            "give another name or set overwrite=true")
    folder = Path(path).absolute().parent
    require(folder.is_dir() and os.access(folder, os.W_OK), key, path, f"{folder} is not a folder to write in",
            "create it or give another name")
    require(not Path(path).is_dir(), key, path, "is a folder", "give the name of a file")


class DocumentFile:
    """The JSON document in the making: one line for what is known of the run, then one a request.

    Requests are written as they come, to a file of their own beside the document, which appears at once and whole.
    """

    def __init__(self, path: str, slo: SloConfig) -> None:
        self._target = Path(path).absolute()
        self._slo = slo
        self._encode = msgspec.json.Encoder(enc_hook=_plain).encode
        self._rows_path = self._target.with_name(f".{self._target.name}.{os.getpid()}.rows")
        self._rows = self._rows_path.open("wb")

    def __enter__(self) -> DocumentFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()
        self._rows_path.unlink(missing_ok=True)

    def add(self, record: RequestRecord) -> None:
        """Write one request."""
        self._rows.write((b",\n" if self._rows.tell() else b"") + self._encode(row(record, self._slo)))

    def finish(self, run: Run) -> None:
        """Put the document in its place."""
        self._rows.close()
        part = self._target.with_name(f".{self._target.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as document, self._rows_path.open("rb") as rows:
                document.write(self._encode(document_head(run)).removesuffix(b"}") + b',\n"requests":[\n')
                shutil.copyfileobj(rows, document)
                document.write(b"\n]}\n")
            part.replace(self._target)
        finally:
            part.unlink(missing_ok=True)


def write_document(run: Run, records: Iterable[RequestRecord], path: str) -> None:
    """Write the JSON document at once or not at all, the requests in the order of their sending."""
    with DocumentFile(path, run.config.slo) as document:
        for record in sorted(records, key=lambda record: record.index):
            document.add(record)
        document.finish(run)


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
    for title, groups in (("class", summary.classes), ("tenant", summary.tenants)):
        if groups:
            console.print(_group_table(title, groups))
    for line in [*_footnote(summary), *_groups_left_out(summary), *_figures(summary), *_failures(run)]:
        console.print(line, highlight=False, soft_wrap=True)
    for line in _warnings(run):
        console.print(f"warning: {line}", style="yellow", highlight=False, soft_wrap=True)


def _facts(run: Run) -> Iterator[str]:
    counts = run.summary.counts
    yield f"{run.title}, seed {run.seed}"
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
    shown = [d for _, d in _latency_rows(summary)] + [
        d for group in (*summary.classes.values(), *summary.tenants.values())
        for d in (group.ttft_s, group.tpot_s)]
    marked = {p for d in shown if d is not None for p in d.too_few_samples_for}
    if marked:
        needed = ", ".join(f"{p.value} needs {p.samples_needed:,} samples" for p in Percentile if p in marked)
        yield f"* fewer than {SAMPLES_BEYOND} samples lie beyond it, so it is an indication only: {needed}"


def _group_table(title: str, groups: Mapping[Any, GroupSummary]) -> Table:
    """One line for each class or tenant, those with the most output first where there are too many."""
    table = Table(title, "requests", "failed", "TTFT p50", "TTFT p99", "TPOT p99", "out tok", "in SLO", box=None)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column is table.columns[0] else "right"
    for name in _shown_groups(groups):
        group = groups[name]
        cells = (_group_quantile(group.ttft_s, Percentile.p50), _group_quantile(group.ttft_s, Percentile.p99),
                 _group_quantile(group.tpot_s, Percentile.p99))
        good = "–" if group.good_share is None else f"{group.good_share:.1%}"
        table.add_row(str(name), str(group.succeeded + group.failed), str(group.failed), *cells,
                      f"{group.output_tokens:,}", good)
    return table


def _shown_groups(groups: Mapping[Any, GroupSummary]) -> list[Any]:
    largest = sorted(groups, key=lambda name: -groups[name].output_tokens)[:_GROUPS_SHOWN]
    return [name for name in groups if name in largest]


def _group_quantile(distribution: Distribution | None, percentile: Percentile) -> str:
    return "–" if distribution is None else _quantile(distribution, percentile)


def _groups_left_out(summary: Summary) -> Iterator[str]:
    for title, groups in (("classes", summary.classes), ("tenants", summary.tenants)):
        if len(groups) > _GROUPS_SHOWN:
            yield f"and {len(groups) - _GROUPS_SHOWN} other {title}; out=FILE lists them all"


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
    for (kind, status, text), count in run.failures.most_common(_FAILURES_SHOWN):
        yield f"failed {count} x {kind}{f' {status}' if status else ''}: {text}"
    if len(run.failures) > _FAILURES_SHOWN:
        yield f"and {len(run.failures) - _FAILURES_SHOWN} other failures; out=FILE lists them all"


def count_failures(records: Iterable[RequestRecord]) -> Failures:
    """The failures of the requests that count."""
    return Counter((r.failure.kind.value, r.failure.status, r.failure.text) for r in records
                   if r.failure is not None and not r.is_warmup and r.failure.kind is not FailureKind.interrupted)


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
