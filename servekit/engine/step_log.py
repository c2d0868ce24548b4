"""The step log: all that a scheduler was told and decided, in its order, so that it can be replayed exactly.

One JSON object a line. A scheduler depends on nothing but its configuration, the size of its KV cache, and the calls
that the log holds with their times; a fresh one that gets the same calls makes the same plans. Where steps overlap, a
step is planned before the one before it is updated; plans are updated in their order. The log holds prompts (as token
ids) and answers: keep it as you would keep them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec

from servekit.core.plan import BlockCopy, Bound, Plan, PreemptionKind, Sampled, StepResult
from servekit.core.request import FinishReason, RequestId, RequestSpec
from servekit.core.scheduler import Scheduler

FORMAT_VERSION = 1


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """An engine has started: what its scheduler was made of. A restarted engine goes on in the same file."""

    config: dict[str, Any]
    """Every setting, nested, as `servekit config --yaml` shows it (config.compose.recompose reads it)."""
    num_kv_blocks: int
    num_host_blocks: int
    block_size_tokens: int
    max_model_len: int
    format_version: int = FORMAT_VERSION


class Added(msgspec.Struct, frozen=True, tag="added"):
    """Requests arrived, accepted or refused as one. All times are seconds on the engine's clock."""

    at_s: float
    specs: tuple[RequestSpec, ...]


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """Requests were ended from outside; ids that are not there any more are ignored."""

    at_s: float
    request_ids: tuple[RequestId, ...]


class AllAborted(msgspec.Struct, frozen=True, tag="all_aborted"):
    """Every request was ended from outside."""

    at_s: float
    reason: FinishReason
    message: str


class CacheReset(msgspec.Struct, frozen=True, tag="cache_reset"):
    """Cached prefixes that no request held were forgotten."""

    at_s: float


class ItemRecord(NamedTuple):
    """One request's share of a step: its tokens `start` up to `start + num_tokens`."""

    request_id: RequestId
    start: int
    num_tokens: int


class PreemptedRecord(NamedTuple):
    """A request that stopped running."""

    request_id: RequestId
    kind: PreemptionKind


class EndedRecord(NamedTuple):
    """A request that was found to be out of time."""

    request_id: RequestId
    reason: FinishReason


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """A step was planned, beginning at `at_s`. Plans without items are part of the log too."""

    at_s: float
    items: tuple[ItemRecord, ...]
    bound: Bound
    preempted: tuple[PreemptedRecord, ...] = ()
    swap_out: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()
    ended: tuple[EndedRecord, ...] = ()
    wake_s: float | None = None

    @classmethod
    def of(cls, plan: Plan, at_s: float) -> Planned:
        """What the log keeps of a plan."""
        return cls(at_s, tuple(ItemRecord(item.request.request_id, item.start, item.num_tokens) for item in plan.items),
                   plan.bound, tuple(PreemptedRecord(request.request_id, kind) for request, kind in plan.preempted),
                   plan.swap_out, plan.swap_in,
                   tuple(EndedRecord(request.request_id, reason) for request, reason, _ in plan.ended), plan.wake_s)


class Updated(msgspec.Struct, frozen=True, tag="updated"):
    """The first planned step not updated was begun at `started_s` and done by `at_s`: the tokens that came of it, and
    what failed.
    """

    at_s: float
    started_s: float
    sampled: dict[RequestId, int]
    failed: dict[RequestId, str] = {}


Record = Opened | Added | Aborted | AllAborted | CacheReset | Planned | Updated


class StepLog(Protocol):
    """Told of every call to a scheduler, in order."""

    def added(self, specs: Sequence[RequestSpec], at_s: float) -> None: ...

    def aborted(self, request_ids: Sequence[RequestId], at_s: float) -> None: ...

    def all_aborted(self, at_s: float, reason: FinishReason, message: str) -> None: ...

    def cache_reset(self, at_s: float) -> None: ...

    def planned(self, plan: Plan, at_s: float) -> None: ...

    def updated(self, result: StepResult, started_s: float, at_s: float) -> None: ...


class NoStepLog:
    """Nobody asked for a log."""

    def added(self, specs: Sequence[RequestSpec], at_s: float) -> None:
        pass

    def aborted(self, request_ids: Sequence[RequestId], at_s: float) -> None:
        pass

    def all_aborted(self, at_s: float, reason: FinishReason, message: str) -> None:
        pass

    def cache_reset(self, at_s: float) -> None:
        pass

    def planned(self, plan: Plan, at_s: float) -> None:
        pass

    def updated(self, result: StepResult, started_s: float, at_s: float) -> None:
        pass


class StepLogFile:
    """A log in a file. Each step is written out when it ends, so that a crash loses at most the one it happens in."""

    def __init__(self, file: BinaryIO, opened: Opened) -> None:
        self._file = file
        self._encode = msgspec.json.Encoder().encode
        self._write(opened)
        file.flush()

    def added(self, specs: Sequence[RequestSpec], at_s: float) -> None:
        self._write(Added(at_s, tuple(specs)))

    def aborted(self, request_ids: Sequence[RequestId], at_s: float) -> None:
        self._write(Aborted(at_s, tuple(request_ids)))

    def all_aborted(self, at_s: float, reason: FinishReason, message: str) -> None:
        self._write(AllAborted(at_s, reason, message))

    def cache_reset(self, at_s: float) -> None:
        self._write(CacheReset(at_s))

    def planned(self, plan: Plan, at_s: float) -> None:
        self._write(Planned.of(plan, at_s))

    def updated(self, result: StepResult, started_s: float, at_s: float) -> None:
        sampled = {request_id: sample.token_id for request_id, sample in result.sampled.items()}
        self._write(Updated(at_s, started_s, sampled, result.failed))
        self._file.flush()

    def _write(self, record: Record) -> None:
        self._file.write(self._encode(record) + b"\n")


class StepLogError(ValueError):
    """A step log that cannot be read; one line with file, line number and reason."""


def read_step_log(path: Path) -> Iterator[Record]:
    """The records of a log, in order. A last line that a crash cut short is left out.

    Raises StepLogError for a line that is no record, and for a log of another version; OSError for the file.
    """
    decode = msgspec.json.Decoder(Record).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record: Record = decode(line)
            except msgspec.MsgspecError as error:
                raise StepLogError(f"{path}:{number}: {error}") from None
            if isinstance(record, Opened) and record.format_version != FORMAT_VERSION:
                raise StepLogError(f"{path}:{number}: version {record.format_version} of the format, not "
                                   f"{FORMAT_VERSION}")
            yield record


class ReplayedStep(NamedTuple):
    """A step of the log, and the same step of the scheduler that replays it."""

    recorded: Planned
    replayed: Planned


def replay(records: Iterable[Record], make_scheduler: Callable[[Opened], Scheduler]) -> Iterator[ReplayedStep]:
    """Give a log's calls to a fresh scheduler for each engine in it, and yield its plans beside the recorded ones.

    The results are the recorded ones as well, so a scheduler of another configuration gets answers for requests that
    it may not have planned: compare, and stop at the first difference.
    """
    scheduler: Scheduler | None = None
    plans: deque[Plan] = deque()
    for record in records:
        if isinstance(record, Opened):
            scheduler = make_scheduler(record)
            plans.clear()
            continue
        if scheduler is None:
            raise StepLogError("the log does not begin with its engine's start")
        match record:
            case Added(at_s, specs):
                scheduler.add(specs, at_s)
            case Aborted(at_s, request_ids):
                scheduler.abort(request_ids, at_s)
            case AllAborted(at_s, reason, message):
                scheduler.abort_all(at_s, reason, message)
            case CacheReset():
                scheduler.reset_prefix_cache()
            case Planned(at_s):
                plan = scheduler.schedule(at_s)
                plans.append(plan)
                yield ReplayedStep(record, Planned.of(plan, at_s))
            case Updated(at_s, _, sampled, failed):
                tokens = {request_id: Sampled(token_id) for request_id, token_id in sampled.items()}
                scheduler.update(plans.popleft(), StepResult(tokens, failed), at_s)
