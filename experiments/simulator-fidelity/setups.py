"""What is measured: servers, and the loads on them."""

from __future__ import annotations

from dataclasses import dataclass

CHAT = ("workload=chat", "workload.length_scale=0.5")
SHARED = ("workload=shared_prefix", "workload.num_prefixes=4", "workload.prefix_tokens=192",
          "workload.suffix_tokens=24", "workload.output_tokens=24")
LENGTH = ("model.max_model_len=1024",)
"""Of every model, so that steps of whole prompts need not be longer."""


@dataclass(frozen=True)
class Setup:
    """One configuration of the server."""

    name: str
    scheduler: tuple[str, ...] = ()
    """Settings that `servekit serve` and `servekit simulate` both take."""
    workload: tuple[str, ...] = CHAT
    is_fitted: bool = False
    """Whether the step-time model learns from its steps; the others are predicted."""


SETUPS = (
    Setup("default", is_fitted=True),
    Setup("4 sequences", ("scheduler.max_num_seqs=4",)),
    Setup("16 sequences", ("scheduler.max_num_seqs=16",)),
    Setup("short steps", ("scheduler.max_num_seqs=64", "scheduler.max_step_tokens=128",
                          "scheduler.prefill.chunk_tokens=64"), is_fitted=True),
    Setup("long steps", ("scheduler.max_step_tokens=1024", "scheduler.prefill.chunk_tokens=512")),
    Setup("whole prompts", ("scheduler/prefill=whole", "scheduler.max_step_tokens=1024",
                            "scheduler.max_num_seqs=32"), is_fitted=True),
    Setup("whole, mixed", ("scheduler/prefill=whole", "scheduler.prefill.mix_decodes=true",
                           "scheduler.max_step_tokens=1024", "scheduler.max_num_seqs=32")),
    Setup("interleaved", ("scheduler/prefill=interleaved", "scheduler.prefill.chunk_tokens=128",
                          "scheduler.prefill.decode_steps=4")),
    Setup("splitfuse", ("scheduler/prefill=splitfuse", "scheduler.max_step_tokens=256")),
    Setup("shortest first", ("scheduler/policy=sjf", "scheduler.max_num_seqs=8")),
    Setup("shortest left", ("scheduler/policy=srtf", "scheduler.policy.margin_tokens=8",
                            "scheduler.policy.min_run_tokens=4", "scheduler.max_num_seqs=8")),
    Setup("shared prefixes", (), SHARED),
    Setup("no prefix cache", ("scheduler/prefix_cache=none",), SHARED, is_fitted=True),
    Setup("little memory", ("memory.num_kv_blocks=128",), is_fitted=True),
    Setup("little memory, swap", ("memory.num_kv_blocks=128", "scheduler/preemption=swap")),
    Setup("static batches", ("scheduler/batching=static", "scheduler.max_num_seqs=16")),
)

CAPACITY = "closed"
CAPACITY_LOAD = ("arrival=closed", "arrival.concurrency=32")
"""Its requests per second are what the shares below are shares of."""
SHARES = (0.4, 0.7, 0.95)


@dataclass(frozen=True)
class Load:
    """One run against one server: what bench and the simulator are told alike."""

    setup: Setup
    name: str
    arrival: tuple[str, ...]
    num_requests: int
    seed: int

    @property
    def words(self) -> list[str]:
        return [*self.setup.workload, *self.arrival, f"num_requests={self.num_requests}", f"seed={self.seed}",
                "warmup_requests=2"]


def open_load(setup: Setup, share: float, capacity_per_s: float, seconds: float, seed: int) -> Load:
    """Poisson arrivals at a share of the capacity, for about so many seconds."""
    rate_per_s = round(share * capacity_per_s, 3)
    return Load(setup, f"{share:.0%}".replace("%", ""), ("arrival=poisson", f"arrival.rate_per_s={rate_per_s}"),
                max(3, round(rate_per_s * seconds)), seed)


def closed_load(setup: Setup, seconds: float, seed: int) -> Load:
    """As many requests as a closed loop needs to be steady for a while."""
    return Load(setup, CAPACITY, CAPACITY_LOAD, max(36, round(4 * seconds)), seed)
