"""servekit's own engine under measurement: hot where its weights can stay, cold where they cannot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from servekit.config.errors import ConfigError
from servekit.config.schema import Config, RestartPolicy
from servekit.engine.client import EngineState, EngineUnavailable, StartError
from servekit.engine.messages import EngineFacts, EngineStats, Loading, StepRecord
from servekit.engine.process_client import ProcessClient
from servekit.model.local import LocalModel
from servekit.sim.fitted import TimedStep
from servekit.sim.step_time import PromptChunk, StepShape
from servekit.tuner.engine_target import EngineTarget
from servekit.tuner.executor import Description, EngineFailed, Warm
from servekit.tuner.launch import Configuration
from servekit.tuner.trial import Ending

_COLD_ONLY = ("model", "engine", "memory.kv_dtype")
"""Keys that a live engine refuses to change."""


class EngineHost:
    """A `Host` over engine processes."""

    is_live = True

    def __init__(self, local: LocalModel, cache_dir: Path) -> None:
        self.local = local
        self.cache_dir = cache_dir
        self.steps: list[TimedStep] = []
        self._client: ProcessClient | None = None
        self._loaded: Config | None = None
        self.on_run: Callable[[Config, EngineFacts, Sequence[TimedStep]], None] = lambda config, facts, steps: None
        """Told of the steps of every run that nothing disturbed."""
        self.always_cold: Callable[[], frozenset[str]] = frozenset
        """Knobs that were found to behave differently in a live engine."""

    @property
    def description(self) -> Description:
        """Of the engine that is up."""
        facts = self._up.facts
        return Description(
            f"{facts.model_name}, {facts.dtype}, quantization {facts.quantization}",
            f"{facts.device}, {facts.threads} threads", facts.max_model_len, facts.vocab_size,
            {"name": facts.device, "threads": facts.threads, "kernels": facts.kernels, "dtype": facts.dtype,
             "quantization": facts.quantization, "num_kv_blocks": facts.num_kv_blocks})

    @property
    def target(self) -> EngineTarget:
        """Over its client."""
        return EngineTarget(self._up)

    @property
    def bounds(self) -> Mapping[str, int]:
        """Steps by what bound them."""
        breakdown = self._up.stats.breakdown
        return {} if breakdown is None else breakdown.bounds

    def processes(self) -> Sequence[int]:
        """The engine's process, if it is alive."""
        process_id = None if self._client is None else self._client.process_id
        return [] if process_id is None else [process_id]

    async def prepare(self, config: Configuration, *, cold: bool) -> Warm:
        """Bring up an engine of this configuration with nothing in its caches. Raises EngineFailed."""
        assert isinstance(config, Config)
        if self._client is not None and not cold and not self._needs_fresh(config):
            try:
                await self._client.reconfigure(_for_trials(config))
                self._loaded = config
                return Warm.hot
            except ConfigError as error:
                if error.key not in _COLD_ONLY:
                    raise EngineFailed(_refusal(error), str(error)) from error
            except EngineUnavailable:
                pass
        await self.stop()
        await self._start(config)
        return Warm.cold

    def begin_run(self) -> None:
        """Forget the steps of the last one."""
        self.steps.clear()

    async def end_run(self, is_disturbed: bool) -> None:
        """Tell of its steps, and empty the engine. Raises EngineFailed."""
        if self._client is None:
            return  # The tuning was interrupted, and the engine stopped.
        if self._up.state is not EngineState.ready:
            raise EngineFailed(Ending.crashed, "the engine process ended under load")
        if not is_disturbed:
            assert self._loaded is not None
            self.on_run(self._loaded, self._up.facts, self.steps)
        await self._empty()

    async def stop(self) -> None:
        """End the engine."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.shutdown()

    @property
    def _up(self) -> ProcessClient:
        assert self._client is not None
        return self._client

    def _needs_fresh(self, config: Config) -> bool:
        """Whether a knob that was found to behave differently hot has another value now."""
        assert self._loaded is not None
        return any(_value(config, key) != _value(self._loaded, key) for key in self.always_cold())

    async def _start(self, config: Config) -> None:
        client = ProcessClient(_for_trials(config), self.local, self.cache_dir, _ignore_progress)
        try:
            await client.start()
        except ConfigError as error:
            await client.shutdown()
            raise EngineFailed(_refusal(error), str(error)) from error
        except StartError as error:
            await client.shutdown()
            ending = Ending.hung if "was not ready after" in str(error) else Ending.crashed
            raise EngineFailed(ending, str(error)) from error
        client.observe(self._note_step)
        self._client, self._loaded = client, config

    async def _empty(self) -> None:
        """Wait until what an early stop has left in the engine is gone, and forget cached prefixes."""
        client, deadline_s = self._up, time.monotonic() + 10.0
        while (client.stats.num_running or client.stats.num_waiting) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        try:
            await client.reset_prefix_cache()
        except EngineUnavailable as error:
            raise EngineFailed(Ending.crashed, str(error)) from error

    def _note_step(self, stats: EngineStats, step: StepRecord | None) -> None:
        if step is not None:
            self.steps.append(TimedStep(_shape(step), step.duration_s))


def _shape(step: StepRecord) -> StepShape:
    chunks = tuple(PromptChunk(num_tokens, num_computed) for num_tokens, num_computed in step.chunks)
    return StepShape(step.num_requests - len(chunks), step.decode_context_tokens, chunks, step.num_sampled,
                     step.num_swapped_blocks)


def _for_trials(config: Config) -> Config:
    """A dead engine ends its trial: nobody waits for another one."""
    return replace(config, engine=replace(config.engine, restart=RestartPolicy.never))


def _refusal(error: ConfigError) -> Ending:
    is_memory = error.key.startswith("memory.") or error.key == "model.max_model_len"
    return Ending.out_of_memory_at_start if is_memory else Ending.illegal


def _value(config: Config, key: str) -> object:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def _ignore_progress(_: Loading) -> None:
    pass
