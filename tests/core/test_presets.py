"""Every preset makes a scheduler that serves requests to their end, and has the components that its name promises."""

from __future__ import annotations

from typing import Any

import pytest

from core.helpers import Harness, expected_tokens, make_spec
from servekit.config.compose import compose_serve
from servekit.config.describe import PRESET
from servekit.config.origin import Layer
from servekit.config.resolve import flatten
from servekit.config.roots import serve_root
from servekit.config.schema import Config
from servekit.core.build import build_scheduler
from servekit.core.plan import PreemptionKind

MAX_MODEL_LEN = 8192
PRESETS = serve_root().groups[PRESET].option_names
COMPONENTS = ("batching", "policy", "prefill", "preemption", "prefix_cache", "admission")
SYSTEMS: dict[str, tuple[str, ...]] = {
    "faster-transformer": ("static", "fifo", "whole", "none", "none", "worst_case"),
    "triton": ("dynamic", "fifo", "whole", "none", "none", "worst_case"),
    "orca": ("continuous", "fifo", "whole", "none", "none", "worst_case"),
    "vllm-v0": ("continuous", "fifo", "whole", "recompute", "none", "on_demand"),
    "vllm-v1": ("continuous", "fifo", "chunked", "recompute", "hash", "on_demand"),
    "sarathi": ("continuous", "fifo", "chunked", "recompute", "none", "on_demand"),
    "splitfuse": ("continuous", "fifo", "splitfuse", "recompute", "none", "on_demand"),
    "tgi": ("continuous", "fifo", "whole", "none", "radix", "worst_case"),
    "trtllm": ("continuous", "fifo", "chunked", "none", "hash", "worst_case"),
    "sglang": ("continuous", "lpm", "whole", "recompute", "radix", "predicted"),
    "interactive": ("continuous", "fair", "chunked", "recompute", "hash", "on_demand"),
    "balanced": ("continuous", "fifo", "chunked", "recompute", "hash", "on_demand"),
    "batch": ("continuous", "fifo", "chunked", "recompute", "hash", "on_demand"),
    "tail": ("continuous", "fifo", "chunked", "none", "hash", "worst_case"),
    "vip": ("continuous", "priority", "chunked", "swap", "hash", "on_demand"),
    "economy": ("continuous", "lpm", "chunked", "swap", "radix", "predicted"),
}


def config_of(preset: str) -> Config:
    return compose_serve([f"+preset={preset}"]).config


def harness_for(config: Config, kv_tokens: int) -> Harness:
    """The preset's scheduler, with so much KV memory and half as much on the host."""
    num_blocks = kv_tokens // config.memory.block_size_tokens
    return Harness(build_scheduler(config.scheduler, num_blocks, config.memory.block_size_tokens, MAX_MODEL_LEN,
                                   num_blocks // 2))


def test_every_preset_is_described() -> None:
    assert set(PRESETS) == set(SYSTEMS)


@pytest.mark.parametrize("preset", PRESETS)
def test_components(preset: str) -> None:
    composed = compose_serve([f"+preset={preset}"])
    values = flatten(composed.config)
    assert tuple(values[f"scheduler.{name}.kind"] for name in COMPONENTS) == SYSTEMS[preset]
    assert composed.dropped == ()
    assert any(origin.layer is Layer.preset for origin in composed.origins.values())


@pytest.mark.parametrize("preset", PRESETS)
def test_it_serves_everybody(preset: str) -> None:
    config = config_of(preset)
    harness = harness_for(config, kv_tokens=2 * MAX_MODEL_LEN)
    shared = list(range(1, 300))
    specs = {}
    for number in range(40):
        prompt = [*shared, number] if number % 4 == 0 else (10, 700, 130)[number % 3]
        spec = make_spec(f"r{number}", prompt, 3 + number % 7, arrived_s=harness.now, tenant=f"t{number % 3}",
                         priority=(-1, 0, 1)[number % 3])
        specs[f"r{number}"] = spec
        harness.add(spec)
        harness.step()
    harness.drain()
    refused = {name for name in specs if harness.finish(name) in ("queue_full", "queue_timeout")}
    assert len(refused) <= 30, "it refuses nearly everybody"
    assert not refused or config.scheduler.admission.max_queue_requests is not None
    for name, spec in specs.items():
        if name not in refused:
            assert harness.tokens(name) == expected_tokens(spec, MAX_MODEL_LEN), name
            assert harness.finish(name) == "length"


@pytest.mark.parametrize("preset", [name for name, components in SYSTEMS.items() if components[3] != "none"])
def test_it_survives_a_lack_of_memory(preset: str) -> None:
    """Sixteen requests that come to need twice the KV memory there is."""
    config = config_of(preset)
    harness = harness_for(config, kv_tokens=2048)
    specs = [make_spec(f"r{number}", 64, 192, tenant=f"t{number}") for number in range(16)]
    harness.now = 0.0
    for spec in specs:
        harness.add(spec)
    for _ in range(5000):
        if not harness.scheduler.has_requests:
            break
        now = harness.now
        harness.step()
        harness.now = now + 0.01
    served = [spec for spec in specs if harness.finish(spec.request_id) == "length"]
    assert len(served) >= 8
    for spec in served:
        assert harness.tokens(spec.request_id) == expected_tokens(spec, MAX_MODEL_LEN)
    kinds = {preempted.kind for plan in harness.plans for preempted in plan.preempted}
    expected = PreemptionKind.swap if SYSTEMS[preset][3] == "swap" else PreemptionKind.recompute
    assert expected in kinds


PROMISES: list[tuple[str, str, Any]] = [
    ("faster-transformer", "scheduler.admission.reserve", "max_model_len"),
    ("orca", "scheduler.prefill.mix_decodes", True),
    ("vllm-v0", "scheduler.max_num_seqs", 256),
    ("vllm-v1", "scheduler.max_step_tokens", 2048),
    ("sarathi", "scheduler.max_step_tokens", 512),
    ("splitfuse", "scheduler.max_step_tokens", 768),
    ("splitfuse", "memory.block_size_tokens", 128),
    ("splitfuse", "scheduler.preemption.only_on_deadlock", True),
    ("tgi", "scheduler.prefill.waiting_served_ratio", 0.3),
    ("trtllm", "scheduler.prefill.chunk_multiple_tokens", 16),
    ("sglang", "scheduler.preemption.victim", "fewest_output"),
    ("vip", "scheduler.policy.class_slots", {-1: 4}),
]


@pytest.mark.parametrize(("preset", "key", "value"), PROMISES)
def test_values_of_the_systems(preset: str, key: str, value: object) -> None:
    composed = compose_serve([f"+preset={preset}"])
    assert flatten(composed.config)[key] == value
    assert str(composed.origins[key]) == f"conf/preset/{preset}.yaml"


def test_static_batches_run_to_their_end() -> None:
    harness = harness_for(config_of("faster-transformer"), kv_tokens=16 * MAX_MODEL_LEN)
    for number in range(10):
        harness.add(make_spec(f"r{number}", 10, 4 + number, arrived_s=0.0))
    harness.drain()
    starts = [{item.request.request_id for item in plan.items} for plan in harness.plans if plan.items]
    assert starts[0] == {f"r{number}" for number in range(8)}
    first_of_the_others = next(i for i, names in enumerate(starts) if "r8" in names)
    assert first_of_the_others == 11, "the longest of the first eight computes eleven steps"


def test_better_classes_come_first_in_vip() -> None:
    harness = harness_for(config_of("vip"), kv_tokens=4 * MAX_MODEL_LEN)
    for number in range(80):
        harness.add(make_spec(f"bulk{number}", 8, 50, priority=1, arrived_s=0.0))
    harness.step()
    harness.step()
    harness.add(make_spec("vip", 8, 5, priority=-1, arrived_s=harness.now))
    plan = harness.step()
    assert "vip" in {item.request.request_id for item in plan.items}
