"""The objective: which share of the requests must keep which latency limits.

    slo:
      ttft: {p99: 2s}
      tpot: {p50: 80ms, p99: 150ms}
      goodput: {share: 95%, ttft: 2s, tpot: 150ms}

`itl` judges the longest gap of a request, as `servekit bench` does. A request that failed or was refused breaks every
promise; a single token has no TPOT and no gap, and keeps those.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite

from servekit.config.bench import SloConfig
from servekit.config.describe import nearest
from servekit.config.errors import ConfigError, require
from servekit.load.metrics import RequestLatencies
from servekit.load.percentiles import rank

LATENCIES = tuple(limit.name.removesuffix("_s") for limit in fields(SloConfig))
"""What may be limited: ttft, tpot, itl, e2e."""
GOODPUT = "goodput"
_SHARE = "share"
_LOWEST_PER_MILLE, _HIGHEST_PER_MILLE = 500, 999
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_DURATION = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS_S)})")
_PERCENTILE = re.compile(r"p(\d{1,2})(?:\.(\d))?")
_PERCENTAGE = re.compile(r"(\d{1,2})(?:\.(\d))?\s*%")


@dataclass(frozen=True)
class Promise:
    """At least `per_mille` thousandths of the requests keep all of `limits`."""

    name: str
    """As in slo.yaml: `ttft.p99`, `goodput`."""
    per_mille: int
    """Thousandths, so that counts are exact: 990 is p99."""
    limits: SloConfig
    """What one request must keep."""

    def misses_allowed(self, num_requests: int) -> int:
        """Requests of so many that may miss: by nearest rank, p99 <= limit exactly when no more than that do."""
        return num_requests - rank(self.per_mille, num_requests)

    def is_missed_by(self, request: RequestLatencies | None) -> bool:
        """Whether a request breaks it. None is one that failed."""
        return request is None or not request.keep(self.limits)


@dataclass(frozen=True)
class Slo:
    """Promises that must all hold."""

    promises: tuple[Promise, ...]

    def __post_init__(self) -> None:
        if not self.promises:
            raise ValueError("an objective needs at least one promise")

    @property
    def names(self) -> tuple[str, ...]:
        """Of its promises, in order."""
        return tuple(promise.name for promise in self.promises)

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that two objectives share exactly when they promise the same."""
        promised = sorted(json.dumps([promise.per_mille, asdict(promise.limits)]) for promise in self.promises)
        return hashlib.sha256(" ".join(promised).encode()).hexdigest()[:12]

    def misses(self, requests: Sequence[RequestLatencies | None]) -> tuple[int, ...]:
        """For each promise, the requests that break it."""
        return tuple(sum(map(promise.is_missed_by, requests)) for promise in self.promises)

    def holds(self, requests: Sequence[RequestLatencies | None]) -> bool:
        """The verdict on a complete run, by count. None is a request that failed."""
        if not requests:
            raise ValueError("a run without requests has no verdict")
        return all(missed <= promise.misses_allowed(len(requests))
                   for promise, missed in zip(self.promises, self.misses(requests), strict=True))


# --- reading ----------------------------------------------------------------------------------------------------------

def parse_slo(value: object) -> Slo:
    """The objective that a mapping describes, as in the head of this file. Raises ConfigError, keys below `slo`."""
    example = "for example slo={ttft: {p99: 2s}}"
    require(isinstance(value, Mapping), "slo", value, "must be a mapping of latencies to percentiles", example)
    assert isinstance(value, Mapping)
    require(len(value) > 0, "slo", "{}", "promises nothing", example)
    return Slo(tuple(promise for key, inner in value.items() for promise in _promises(str(key), inner)))


def _promises(key: str, value: object) -> Iterator[Promise]:
    path = f"slo.{key}"
    if key == GOODPUT:
        yield _goodput(path, value)
    elif key in LATENCIES:
        yield from _percentiles(path, key, value)
    else:
        known = (*LATENCIES, GOODPUT)
        meant = nearest(key, known)
        raise ConfigError(path, value, f"must be one of {', '.join(known)}",
                          f"did you mean slo.{meant}?" if meant else "for example slo.ttft={p99: 2s}")


def _percentiles(path: str, latency: str, value: object) -> Iterator[Promise]:
    require(isinstance(value, Mapping) and len(value) > 0, path, value, "names no percentile",
            f"write {path}={{p99: {value if _is_duration(value) else '2s'}}}")
    assert isinstance(value, Mapping)
    limits: dict[int, float] = {}
    for name, duration in value.items():
        per_mille, limit_s = _per_mille(path, str(name), duration), seconds(f"{path}.{name}", duration)
        wider = [other for other, other_s in limits.items() if (other - per_mille) * (other_s - limit_s) <= 0]
        require(not wider, f"{path}.{name}", duration, f"one of the limits of {path} follows from another",
                "a higher percentile needs a longer limit; leave one of them out")
        limits[per_mille] = limit_s
        yield Promise(f"{latency}.{name}", per_mille, SloConfig(**{f"{latency}_s": limit_s}))


def _goodput(path: str, value: object) -> Promise:
    example = f"for example {path}={{share: 95%, ttft: 2s, tpot: 150ms}}"
    require(isinstance(value, Mapping), path, value, "must be a share and the limits that a good request keeps",
            example)
    assert isinstance(value, Mapping)
    unknown = next((key for key in value if key not in (_SHARE, *LATENCIES)), None)
    require(unknown is None, f"{path}.{unknown}", value.get(unknown),
            f"must be one of {', '.join((_SHARE, *LATENCIES))}", example)
    require(_SHARE in value, path, dict(value), "has no share", example)
    require(len(value) > 1, path, dict(value), "limits no latency", example)
    limits = {f"{key}_s": seconds(f"{path}.{key}", limit) for key, limit in value.items() if key != _SHARE}
    return Promise(GOODPUT, _share(f"{path}.{_SHARE}", value[_SHARE]), SloConfig(**limits))


def _per_mille(path: str, name: str, value: object) -> int:
    return _thousandths(_PERCENTILE.fullmatch(name), f"{path}.{name}", value,
                        "a percentile must lie between p50 and p99.9, in tenths", f"for example {path}={{p99: 2s}}")


def _share(path: str, value: object) -> int:
    return _thousandths(_PERCENTAGE.fullmatch(str(value)), path, value, "must be a percentage between 50% and 99.9%, "
                        "in tenths", f"for example {path}=95%")


def _thousandths(found: re.Match[str] | None, path: str, value: object, limit: str, remedy: str) -> int:
    per_mille = 10 * int(found[1]) + int(found[2] or 0) if found else 0
    require(_LOWEST_PER_MILLE <= per_mille <= _HIGHEST_PER_MILLE, path, value, limit, remedy)
    return per_mille


def seconds(path: str, value: object) -> float:
    """A duration such as `2s`, `150ms` or `1.5 min`, in seconds. Raises ConfigError for the key `path`."""
    found = _DURATION.fullmatch(str(value))
    units = ", ".join(_UNITS_S)
    is_bare = isinstance(value, int | float) and not isinstance(value, bool)
    require(not is_bare, path, value, "has no unit", f"write {path}={value}s or {path}={value}ms")
    require(found is not None, path, value, f"must be a number and one of {units}", f"for example {path}=150ms")
    assert found is not None
    duration_s = float(found[1]) * _UNITS_S[found[2]]
    require(duration_s > 0 and isfinite(duration_s), path, value, "must be longer than 0", f"for example {path}=150ms")
    return duration_s


def _is_duration(value: object) -> bool:
    return _DURATION.fullmatch(str(value)) is not None
