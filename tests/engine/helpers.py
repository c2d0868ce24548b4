"""Small real engines, and requests for them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

from servekit.config.admission import AdmissionConfig, OnDemandAdmissionConfig
from servekit.config.preemption import PreemptionConfig, RecomputePreemptionConfig
from servekit.config.prefill import ChunkedPrefillConfig
from servekit.config.prefix_cache import HashPrefixCacheConfig, NoPrefixCacheConfig, PrefixCacheConfig
from servekit.config.schema import Config, DType, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from servekit.core.request import RequestEvent, RequestId, RequestSpec, SamplingParams
from servekit.engine.build import BuiltEngine, build_engine
from servekit.engine.engine import Engine
from servekit.model.local import LocalModel, SourceKind
from servekit.model.source import default_cache_dir

CACHE_DIR = default_cache_dir(os.environ)

_numbers = itertools.count()


def dummy_model(shape: str = "tiny", seed: int = 0) -> LocalModel:
    return LocalModel(SourceKind.dummy, "tiny", None, shape, seed)


def make_config(*, dtype: DType = DType.float64, num_kv_blocks: int | None = 256, block_size: int = 16,
                max_model_len: int | None = 512, max_num_seqs: int = 16, max_step_tokens: int = 512,
                chunk_tokens: int | None = None, prefix_cache: bool | PrefixCacheConfig = False,
                watermark: float = 0.0, engine: EngineConfig | None = None, preemption: PreemptionConfig | None = None,
                admission: AdmissionConfig | None = None, **limits: Any) -> Config:
    if isinstance(prefix_cache, bool):
        prefix_cache = HashPrefixCacheConfig() if prefix_cache else NoPrefixCacheConfig()
    return Config(
        model=ModelConfig(source="dummy:tiny", dtype=dtype, max_model_len=max_model_len),
        engine=engine or EngineConfig(threads=1),
        memory=MemoryConfig(num_kv_blocks=num_kv_blocks, block_size_tokens=block_size),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens,
            admission=admission or OnDemandAdmissionConfig(watermark=watermark, **limits),
            prefill=ChunkedPrefillConfig(chunk_tokens=chunk_tokens), prefix_cache=prefix_cache,
            preemption=preemption or RecomputePreemptionConfig()))


def build(config: Config, local: LocalModel | None = None) -> BuiltEngine:
    return build_engine(config, local or dummy_model(), CACHE_DIR, lambda *_: None)


def make_engine(**options: Any) -> Engine:
    return build(make_config(**options)).engine


def spec(prompt: Sequence[int], max_tokens: int = 12, **sampling: Any) -> RequestSpec:
    params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling})
    return RequestSpec(RequestId(f"test-{next(_numbers)}"), tuple(prompt), params, time.monotonic())


@dataclasses.dataclass
class Heard:
    """Everything one request was told."""

    events: list[RequestEvent] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def last(self) -> RequestEvent:
        return self.events[-1]


def run(engine: Engine, specs: Sequence[RequestSpec], *, together: bool = True) -> list[Heard]:
    """Answer requests, all at once or one after the other; the engine's books are checked after every step."""
    heard = {one.request_id: Heard() for one in specs}
    for group in [specs] if together else [[one] for one in specs]:
        for one in group:
            engine.add([one])
        while engine.has_work:
            for event in engine.step().events:
                heard[event.request_id].events.append(event)
            engine.check()
    return [heard[one.request_id] for one in specs]
