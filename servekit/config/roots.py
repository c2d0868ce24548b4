"""Which configurations there are: one for each subcommand that runs something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from servekit.config.describe import Choice, Root
from servekit.config.schema import Config

if TYPE_CHECKING:
    from servekit.config.bench import BenchConfig
    from servekit.config.plan import PlanConfig
    from servekit.config.simulate import SimulateConfig


def serve_root() -> Root[Config]:
    """An engine and its server. A source of the user's own is never taken for the default model."""
    return Root("serve", Config, has_presets=True, implied={"model.source": Choice("model", "custom")})


def bench_root() -> Root[BenchConfig]:
    """A benchmark run."""
    from servekit.config.bench import BenchConfig

    return Root("bench", BenchConfig)


def plan_root() -> Root[PlanConfig]:
    """A capacity plan."""
    from servekit.config.plan import PlanConfig

    return Root("plan", PlanConfig)


def simulate_root() -> Root[SimulateConfig]:
    """A simulated run."""
    from servekit.config.simulate import SimulateConfig

    return Root("simulate", SimulateConfig, has_presets=True)


ROOTS: Mapping[str, Callable[[], Root[Any]]] = {"serve": serve_root, "bench": bench_root, "plan": plan_root,
                                                 "simulate": simulate_root}
