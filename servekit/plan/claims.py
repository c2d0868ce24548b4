"""What others state about a load, held against a plan of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from servekit.plan.capacity import CapacityPlan
from servekit.plan.numbers import count, figure, milliseconds
from servekit.plan.steady import OperatingPoint

_TOLERANCE = 0.1
"""Share by which a stated figure may differ from the right one: the plan is no more exact than that."""


@dataclass(frozen=True)
class Verdict:
    """A stated figure and what is right."""

    key: str
    """The setting that stated it."""
    claimed: float
    right: float
    """The right figure, in the same unit and for the same question."""
    holds: bool
    reason: str
    """How the right figure comes about, in a sentence."""


def check_claims(plan: CapacityPlan) -> tuple[Verdict, ...]:
    """A verdict on each claim that the plan's configuration states."""
    return tuple(_verdicts(plan))


def _verdicts(plan: CapacityPlan) -> Iterator[Verdict]:
    claim = plan.config.claim
    if claim.tokens_per_s is not None:
        yield _tokens_per_s(plan, claim.tokens_per_s, claim.concurrency)
    if claim.concurrency is not None:
        yield _concurrency(plan, claim.concurrency, claim.gpus or plan.gpus)
    if claim.kv_bytes is not None:
        yield _kv_bytes(plan, claim.kv_bytes, claim.concurrency or _in_flight_per_gpu(plan))
    if claim.gpus is not None:
        yield _gpus(plan, claim.gpus, claim.tokens_per_s)


def _tokens_per_s(plan: CapacityPlan, claimed: float, concurrency: float | None) -> Verdict:
    """One GPU's output: at a concurrency it follows from the time of a step, else from the binding limit."""
    if concurrency is None:
        right = _per_gpu(plan, plan.binding.requests_per_s) * plan.config.output_tokens
        reason = f"more is beyond the limit that binds, {plan.binding.limit.value}"
    else:
        point = _with_in_flight(plan, concurrency)
        right = _per_gpu(plan, point.requests_per_s) * plan.config.output_tokens
        reason = (f"{figure(concurrency)} in flight would get a token every {milliseconds(concurrency / claimed)} ms; "
                  f"their TPOT is {milliseconds(point.tpot_s)} ms, and reading the weights once takes "
                  f"{milliseconds(plan.replica.weight_streaming_s)} ms at full bandwidth")
    return Verdict("claim.tokens_per_s", claimed, right, claimed <= right * (1 + _TOLERANCE), reason)


def _concurrency(plan: CapacityPlan, claimed: float, gpus: int) -> Verdict:
    """Little's law: so many in flight, each for its time in the system, are so many requests per second."""
    point, right = _with_in_flight(plan, claimed), _in_flight_per_gpu(plan)
    carried = _per_gpu(plan, point.requests_per_s) * gpus
    reason = (f"by Little's law {figure(claimed)} in flight on each of {count(gpus, 'GPU')}, {point.e2e_s:.2f} s "
              f"each, are {figure(carried)} req/s, and the load is {figure(plan.rate_per_s)}")
    return Verdict("claim.concurrency", claimed, right, carried >= plan.rate_per_s / (1 + _TOLERANCE), reason)


def _kv_bytes(plan: CapacityPlan, claimed: float, in_flight: float) -> Verdict:
    """The requests' tokens, in whole blocks, times the bytes of a token."""
    request_bytes = plan.steady.request_kv_tokens * plan.replica.kv_bytes_per_token
    right = in_flight * request_bytes
    reason = (f"{figure(in_flight)} requests hold {figure(plan.steady.request_kv_tokens)} tokens of "
              f"{figure(plan.replica.kv_bytes_per_token)} bytes each; the claim would do for "
              f"{figure(claimed / request_bytes)} requests")
    return Verdict("claim.kv_bytes", claimed, right, abs(claimed / right - 1) <= _TOLERANCE, reason)


def _gpus(plan: CapacityPlan, claimed: int, tokens_per_s: float | None) -> Verdict:
    """Whole replicas, each as much as the binding limit allows."""
    replicas = claimed // plan.replica.tensor_parallel
    held = replicas * plan.binding.requests_per_s
    growth = plan.rate_per_s - held
    reason = (f"{figure(held)} req/s is the most for {count(replicas, 'replica')}, and the load is "
              f"{figure(plan.rate_per_s)}")
    if growth >= 0:
        reason += f": the queue grows by {figure(growth)} requests each second"
    if tokens_per_s is not None:
        at_claim = plan.rate_per_s * plan.config.output_tokens / tokens_per_s
        reason += f"; at the claimed {figure(tokens_per_s)} tok/s it would take {figure(at_claim)}, never idle"
    return Verdict("claim.gpus", claimed, plan.gpus, claimed >= plan.gpus, reason)


def _with_in_flight(plan: CapacityPlan, per_gpu: float) -> OperatingPoint:
    """A replica's equilibrium with so many in flight on each GPU, or as many as its KV cache holds."""
    most = per_gpu * plan.replica.tensor_parallel
    return plan.steady.highest(
        lambda point: point.num_in_flight <= most and point.kv_tokens <= plan.memory.kv_tokens)


def _in_flight_per_gpu(plan: CapacityPlan) -> float:
    return _per_gpu(plan, plan.point.num_in_flight)


def _per_gpu(plan: CapacityPlan, of_a_replica: float) -> float:
    return of_a_replica / plan.replica.tensor_parallel
