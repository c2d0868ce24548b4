"""How plans reach an executor: each step by itself, or the next one planned while the last one runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from servekit.core.plan import Plan, StepResult


class Executor(Protocol):
    """Computes plans: the runner on a device, or a model of it."""

    def execute(self, plan: Plan) -> StepResult: ...


class RunningStep(Protocol):
    """A step that has been given to a device."""

    def result(self) -> StepResult:
        """Wait for the step to end."""


class Launcher(Protocol):
    """An executor that computes while its caller goes on. It computes steps in the order of their launch."""

    def launch(self, plan: Plan) -> RunningStep:
        """Begin a step. What it needs to know of the requests it reads before it returns.

        A token that is not known yet (UNKNOWN_TOKEN) is the one that the step before samples.
        """


class DoneStep(NamedTuple):
    """A step that is ready to be booked."""

    plan: Plan
    result: StepResult


class Pipeline(Protocol):
    """Takes each plan when it is made, and says which steps are done by then."""

    @property
    def is_busy(self) -> bool:
        """Whether a step runs between two calls."""

    def execute(self, plan: Plan) -> Sequence[DoneStep]:
        """Let the plan be computed; returns the steps that are done, in their order."""


class Lockstep:
    """Each step is done before the next one is planned."""

    is_busy = False

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def execute(self, plan: Plan) -> Sequence[DoneStep]:
        return (DoneStep(plan, self._executor.execute(plan) if plan.has_work else StepResult({})),)


class Overlapped:
    """A step is planned and launched while the one before it runs; then its results are waited for.

    So the device always has the next step at hand, and what the host does between two steps costs no time (Zhu et al.,
    NanoFlow, 2024; SGLang's overlap scheduler).
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._running: _Launched | None = None

    @property
    def is_busy(self) -> bool:
        return self._running is not None

    def execute(self, plan: Plan) -> Sequence[DoneStep]:
        """The step before this one is done, and with it a plan without work."""
        before, self._running = self._running, _Launched(plan, self._launcher.launch(plan)) if plan.has_work else None
        done = [] if before is None else [DoneStep(before.plan, before.step.result())]
        return done if plan.has_work else [*done, DoneStep(plan, StepResult({}))]


class _Launched(NamedTuple):
    plan: Plan
    step: RunningStep
