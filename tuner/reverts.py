"""Why the winner won, asked of the device: each knob that it changed is put back by itself, and measured again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from servekit.config.errors import ConfigError, show
from servekit.tuner.confirmation import Measurer
from servekit.tuner.executor import EngineFailed
from servekit.tuner.judgement import holds, latencies_of, use_of
from servekit.tuner.launch import Configuration
from servekit.tuner.run_log import LoggedRun, read_run
from servekit.tuner.slo import Promise, Slo
from servekit.tuner.space import Space, Value

STREAM = "revert"
"""Every run has the same requests, so that they differ by the knob alone."""


@dataclass(frozen=True)
class Revert:
    """The winner with one knob as it was, at the winner's rate."""

    knob: str
    """Empty: the winner as it is, on the same requests."""
    winner: Value
    default: Value
    holds: bool | None
    """None: it did not run, or the measurement was bad."""
    misses: Mapping[str, float]
    """Share of the requests that missed each promise."""
    note: str = ""
    """Why it was not measured."""


def describe_revert(revert: Revert) -> str:
    """In one line."""
    what = f"{revert.knob}={show(revert.default)} instead of {show(revert.winner)}" if revert.knob else "as it is"
    if revert.holds is None:
        return f"{what}: not measured ({revert.note})"
    missed = ", ".join(f"{name} missed by {share:.1%}" for name, share in revert.misses.items())
    return f"{what}: {'holds' if revert.holds else 'fails'}; {missed}"


def knobs_to_put_back(space: Space, values: Mapping[str, Value]) -> list[str]:
    """The knobs at which a point of the space differs from its start, choices of components first."""
    active = space.active(space.start)
    return [knob.key for knob in sorted(space.knobs, key=lambda knob: knob.condition is not None)
            if knob.key in values and values[knob.key] != active.get(knob.key, space.start.get(knob.key))]


def put_back(space: Space, values: Mapping[str, Value], assemble: Callable[[Sequence[str]], Configuration], slo: Slo,
             measurer: Measurer, rate_per_s: float, num_requests: int, left_s: Callable[[], float]) -> Iterator[Revert]:
    """The winner, then the winner with each changed knob put back; as many as there is time for.

    `values` are those of the winner. A run is begun while `left_s()` says that a whole one would fit.
    """
    run_s = num_requests / rate_per_s
    for knob in ("", *knobs_to_put_back(space, values)):
        if left_s() < run_s:
            return
        point = {**space.start, **values, **({knob: space.start[knob]} if knob else {})}
        default = space.start[knob] if knob else None
        try:
            config = assemble(space.overrides(point))
            _, path = measurer.measure_at(config, rate_per_s, num_requests, STREAM, cold=False, stops_early=False)
        except (ConfigError, EngineFailed) as error:
            yield Revert(knob, values.get(knob), default, None, {}, str(error))
            continue
        yield _revert(knob, values.get(knob), default, slo, read_run(path))


def _revert(knob: str, winner: Value, default: Value, slo: Slo, run: LoggedRun) -> Revert:
    if run.problems:
        return Revert(knob, winner, default, None, {}, f"bad measurement: {', '.join(run.problems)}")
    misses = {promise.name: _share_missed(promise, run) for promise in slo.promises}
    return Revert(knob, winner, default, holds(slo, [run]), misses)


def _share_missed(promise: Promise, run: LoggedRun) -> float:
    uses = [use_of(promise, latencies) for latencies in latencies_of(run)]
    return sum(use > 1 for use in uses) / len(uses)
