"""How a plan is shown: a table for people, a JSON document for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from servekit.config.resolve import as_dict, config_hash
from servekit.config.roofline import Precision
from servekit.plan.capacity import Bound, CapacityPlan
from servekit.plan.claims import Verdict
from servekit.plan.numbers import count, figure, gigabytes, milliseconds
from servekit.plan.steady import OperatingPoint

FORMAT_VERSION = 1


# --- the JSON document ------------------------------------------------------------------------------------------------

def document(plan: CapacityPlan, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Everything a plan says. Times in seconds, sizes in bytes; null stands for a figure without a limit."""
    return {
        "format_version": FORMAT_VERSION,
        "config": as_dict(plan.config),
        "config_hash": config_hash(plan.config),
        "memory": asdict(plan.memory) | {"kv_bytes_per_token": plan.replica.kv_bytes_per_token},
        "weight_streaming_s": plan.replica.weight_streaming_s,
        "prefill_s": plan.steady.prefill_s,
        "bounds": [_bound(bound, plan) for bound in plan.bounds],
        "binding": plan.binding.limit.name,
        "rate_per_s": plan.rate_per_s,
        "highest_rate_per_s": plan.highest_rate_per_s,
        "utilization": plan.utilization,
        "replicas": plan.replicas,
        "gpus": plan.gpus,
        "gpus_with_spares": plan.gpus_with_spares,
        "replica_at_rate": _point(plan.point),
        "claims": [asdict(verdict) for verdict in verdicts],
        "assumptions": list(assumptions(plan)),
    }


def _bound(bound: Bound, plan: CapacityPlan) -> dict[str, Any]:
    return {"limit": bound.limit.name, "requests_per_s": bound.requests_per_s,
            "replicas": plan.rate_per_s / bound.requests_per_s, "point": bound.point and _point(bound.point)}


def _point(point: OperatingPoint) -> dict[str, Any]:
    return asdict(point) | {"num_in_flight": point.num_in_flight}


# --- the text ---------------------------------------------------------------------------------------------------------

def print_plan(plan: CapacityPlan, verdicts: Sequence[Verdict], console: Console) -> None:
    """Print a plan, the verdicts on claims, and what both rest on."""
    _print_lines(console, _facts(plan))
    console.print(_table(plan))
    _print_lines(console, _answer(plan))
    _print_lines(console, _warnings(plan), style="yellow")
    for verdict in verdicts:
        _print_lines(console, [_verdict_line(verdict)], style="" if verdict.holds else "yellow")
    _print_lines(console, _labelled("assume", assumptions(plan)))


def _print_lines(console: Console, lines: Iterable[str], style: str = "") -> None:
    for line in lines:
        console.print(line, style=style, highlight=False, soft_wrap=True, markup=False)


def _labelled(label: str, lines: Iterable[str]) -> Iterator[str]:
    """Lines of text with a word in the margin of the first."""
    for number, line in enumerate(lines):
        yield f"{'' if number else label:9}{line}"


def _facts(plan: CapacityPlan) -> Iterator[str]:
    config, replica, memory = plan.config, plan.replica, plan.memory
    yield from _labelled("model", [
        f"{config.model}: weights {gigabytes(replica.weights_bytes)} ({config.weight_precision.name}), "
        f"KV {replica.kv_bytes_per_token:,.0f} bytes a token ({config.kv_precision.name})"])
    yield from _labelled("replica", [
        f"{replica.tensor_parallel} x {replica.gpu.name}: {gigabytes(memory.usable_bytes)} usable of "
        f"{gigabytes(memory.total_bytes)}, {gigabytes(memory.activation_bytes)} of it for the largest step and "
        f"{gigabytes(memory.kv_bytes)} for KV = {memory.kv_tokens:,} tokens",
        f"reading the weights once takes {milliseconds(replica.weight_streaming_s)} ms at full bandwidth, "
        f"computing a prompt {milliseconds(plan.steady.prefill_s)} ms"])
    prompt, output = config.prompt_tokens, config.output_tokens
    yield from _labelled("load", [
        f"{figure(plan.rate_per_s)} req/s of {figure(prompt)} prompt and {figure(output)} output tokens: "
        f"{figure(plan.rate_per_s * prompt)} tok/s in, {figure(plan.rate_per_s * output)} tok/s out"])


def _table(plan: CapacityPlan) -> Table:
    """What one replica carries within each limit alone."""
    table = Table("one replica, by", "req/s", "tok/s", "decodes", "TPOT ms", "TTFT ms", "replicas")
    for column in table.columns[1:]:
        column.justify = "right"
        column.overflow = "fold"
    for bound in plan.bounds:
        waits = ("any", "–", "–") if bound.point is None else (
            figure(bound.point.num_decodes), milliseconds(bound.point.tpot_s), milliseconds(bound.point.ttft_s))
        table.add_row(bound.limit.value + (" *" if bound is plan.binding else ""), f"{bound.requests_per_s:,.2f}",
                      f"{bound.requests_per_s * plan.config.output_tokens:,.0f}", *waits,
                      f"{plan.rate_per_s / bound.requests_per_s:,.1f}")
    return table


def _answer(plan: CapacityPlan) -> Iterator[str]:
    point, spares = plan.point, plan.config.spare_replicas
    yield (f"* {plan.binding.limit.value} binds. tok/s: output tokens; decodes: requests that decode at once; "
           "replicas: of those, if never idle")
    yield from _labelled("answer", [
        f"{_replicas(plan, plan.replicas)} for {figure(plan.rate_per_s)} req/s at utilisation {plan.utilization:.2f}; "
        f"{figure(plan.highest_rate_per_s)} req/s is the most they carry",
        *([f"{_replicas(plan, plan.replicas + spares)} with {spares} to spare"] if spares else [])])
    yield from _labelled("each", [
        f"{point.requests_per_s:,.2f} req/s, {figure(point.num_in_flight)} requests in flight "
        f"({figure(plan.replicas * point.num_in_flight)} on all), each for {point.e2e_s:,.2f} s; "
        f"TPOT {milliseconds(point.tpot_s)} ms, TTFT {milliseconds(point.ttft_s)} ms",
        f"{point.prefill_share:.0%} of the time for prompts, {point.kv_tokens / plan.memory.kv_tokens:.0%} of the KV "
        "cache held"])


def _warnings(plan: CapacityPlan) -> Iterator[str]:
    if plan.utilization > plan.config.max_utilization + 1e-9:
        yield (f"warning: utilisation {plan.utilization:.2f} exceeds max_utilization="
               f"{plan.config.max_utilization:g}, so bursts will queue")


def _verdict_line(verdict: Verdict) -> str:
    outcome = "holds" if verdict.holds else "wrong"
    figures = f"{verdict.key}={figure(verdict.claimed)}, the plan says {figure(verdict.right)}"
    return f"{outcome:9}{figures}: {verdict.reason}"


def assumptions(plan: CapacityPlan) -> Iterator[str]:
    """What the figures rest on, one sentence each."""
    config, efficiency = plan.config, plan.config.efficiency
    yield (f"kernels reach {efficiency.compute:.0%} of the dense arithmetic and {efficiency.bandwidth:.0%} of the "
           f"memory bandwidth; a step takes {milliseconds(efficiency.step_overhead_s)} ms, and each layer "
           f"{milliseconds(efficiency.layer_overhead_s, 3)} ms, beside them")
    if config.weight_precision is Precision.fp4:
        yield "in fp4, TensorRT-LLM's published figures correspond to efficiency.compute=0.38 on a B200"
    if config.tensor_parallel > 1:
        yield (f"all-reduces reach {efficiency.link:.0%} of the link bandwidth and start after "
               f"{milliseconds(efficiency.all_reduce_latency_s, 3)} ms")
    yield (f"prompts are computed in steps of their own of up to {config.prefill_batch_tokens:,} tokens; no prefix is "
           "cached")
    yield (f"the engine uses {config.memory.memory_fraction:.0%} of the memory less {config.memory.headroom:.0%} of "
           "that as headroom and less what its largest step takes; a request in flight counts at its full length")
    yield "TPOT and TTFT are means at Poisson arrivals, without a wait for a slot; percentiles lie above them"


def _replicas(plan: CapacityPlan, replicas: int) -> str:
    return f"{count(replicas, 'replica')} = {count(replicas * plan.replica.tensor_parallel, 'GPU')}"
