"""What `servekit bench` can be told: the endpoint, the workload, the arrivals, the objective.

The rules are those of schema.py. `workload` and `arrival` are component groups: the kind is chosen as a group
(`workload=chat`, `arrival=gamma`), and each kind is a class with the options that it has and no others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Protocol

from servekit.config.bounds import above_zero, at_least
from servekit.config.errors import ConfigError, require


class Endpoint(Enum):
    """Which route the requests go to."""

    completions = "completions"
    """/v1/completions, with the prompt as token ids."""
    chat = "chat"
    """/v1/chat/completions, with a prompt of common words, about one token each."""


class WorkloadKind(Enum):
    """Where prompts and lengths come from."""

    fixed = "fixed"
    lognormal = "lognormal"
    shared_prefix = "shared_prefix"
    azure = "azure"
    mooncake = "mooncake"


class ArrivalKind(Enum):
    """When requests are sent."""

    poisson = "poisson"
    gamma = "gamma"
    fixed = "fixed"
    trace = "trace"
    closed = "closed"


def _fixed_kind(group: str, given: Enum, own: Enum) -> None:
    """A component's kind follows from its group choice and cannot be set on its own."""
    if given is not own:
        raise ConfigError(f"{group}.kind", given.value, f"these are the options of {own.value}",
                          f"choose a {group} of that kind with {group}=<name>")


@dataclass(frozen=True)
class WorkloadConfig:
    """Base of the workloads."""

    kind: WorkloadKind = WorkloadKind.fixed
    """Which component this is."""
    length_scale: float = 1.0
    """Factor on every prompt and output length, rounded to whole tokens and never below one."""
    num_tenants: int | None = None
    """Tenants that the requests are spread over at random, sent as the field `user`; null: none is sent."""
    priorities: dict[int, float] = field(default_factory=dict)
    """Share of the requests in each class, by priority, as in {0: 1, 1: 9}; sent as the field `priority`. Empty: none
    is sent."""
    prediction_sigma: float | None = None
    """How far predicted output lengths, sent as `predicted_output_tokens`, lie from the wanted ones: standard deviation
    of the logarithm of their quotient. 0: they are exact. None is above the request's max_tokens, the wanted length,
    since no server could believe it. null: none is sent."""

    def __post_init__(self) -> None:
        above_zero("workload.length_scale", self.length_scale, 0.25)
        at_least("workload.num_tenants", self.num_tenants, 1, 4)
        for priority, share in self.priorities.items():
            above_zero(f"workload.priorities.{priority}", share, 0.5)
        at_least("workload.prediction_sigma", self.prediction_sigma, 0, 0.5)


@dataclass(frozen=True)
class FixedWorkloadConfig(WorkloadConfig):
    """Every request has the same lengths."""

    prompt_tokens: int = 256
    """Length of every prompt."""
    output_tokens: int = 64
    """Length of every output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _fixed_kind("workload", self.kind, WorkloadKind.fixed)
        at_least("workload.prompt_tokens", self.prompt_tokens, 1, 256)
        at_least("workload.output_tokens", self.output_tokens, 1, 64)


@dataclass(frozen=True)
class LognormalWorkloadConfig(WorkloadConfig):
    """Lengths as in chat logs: log-normal, drawn again while above their limit."""

    kind: WorkloadKind = WorkloadKind.lognormal
    """Which component this is."""
    prompt_median_tokens: int = 128
    """Median prompt length before the limit."""
    prompt_sigma: float = 0.7
    """Standard deviation of the logarithm of the prompt length."""
    max_prompt_tokens: int = 1024
    """Longest prompt."""
    output_median_tokens: int = 64
    """Median output length before the limit."""
    output_sigma: float = 0.6
    """Standard deviation of the logarithm of the output length."""
    max_output_tokens: int = 256
    """Longest output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _fixed_kind("workload", self.kind, WorkloadKind.lognormal)
        for side in ("prompt", "output"):
            median, limit = getattr(self, f"{side}_median_tokens"), getattr(self, f"max_{side}_tokens")
            at_least(f"workload.{side}_median_tokens", median, 1, 128)
            at_least(f"workload.{side}_sigma", getattr(self, f"{side}_sigma"), 0, 0.7)
            require(limit >= median, f"workload.max_{side}_tokens", limit,
                    f"must be at least workload.{side}_median_tokens={median}",
                    f"set workload.max_{side}_tokens={median * 8} or lower the median")


@dataclass(frozen=True)
class SharedPrefixWorkloadConfig(WorkloadConfig):
    """Every prompt is one of a few long prefixes, chosen at random, and a suffix of its own."""

    kind: WorkloadKind = WorkloadKind.shared_prefix
    """Which component this is."""
    num_prefixes: int = 4
    """Different prefixes."""
    prefix_tokens: int = 512
    """Length of each prefix."""
    suffix_tokens: int = 64
    """Length of each suffix."""
    output_tokens: int = 64
    """Length of every output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _fixed_kind("workload", self.kind, WorkloadKind.shared_prefix)
        for name, example in (("num_prefixes", 4), ("prefix_tokens", 512), ("suffix_tokens", 64),
                              ("output_tokens", 64)):
            at_least(f"workload.{name}", getattr(self, name), 1, example)


@dataclass(frozen=True, kw_only=True)
class AzureWorkloadConfig(WorkloadConfig):
    """Lengths and times of a CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens."""

    kind: WorkloadKind = WorkloadKind.azure
    """Which component this is."""
    path: str
    """The CSV file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _fixed_kind("workload", self.kind, WorkloadKind.azure)
        require(self.path != "", "workload.path", self.path, "must not be empty", "name the CSV file")


@dataclass(frozen=True, kw_only=True)
class MooncakeWorkloadConfig(WorkloadConfig):
    """Lengths, times and shared prefixes of a JSONL with timestamp (ms), input_length, output_length, hash_ids."""

    kind: WorkloadKind = WorkloadKind.mooncake
    """Which component this is."""
    path: str
    """The JSONL file."""
    block_tokens: int = 512
    """Prompt tokens that one of its hash_ids stands for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _fixed_kind("workload", self.kind, WorkloadKind.mooncake)
        at_least("workload.block_tokens", self.block_tokens, 1, 512)
        require(self.path != "", "workload.path", self.path, "must not be empty", "name the JSONL file")


TraceWorkloadConfig = AzureWorkloadConfig | MooncakeWorkloadConfig
"""The workloads that come to an end and have times of their own."""


@dataclass(frozen=True)
class ArrivalConfig:
    """Base of the arrival processes."""

    kind: ArrivalKind = ArrivalKind.poisson
    """Which component this is."""


@dataclass(frozen=True)
class PoissonArrivalConfig(ArrivalConfig):
    """Open loop: independent arrivals, exponential gaps."""

    rate_per_s: float = 1.0
    """Mean requests per second."""

    def __post_init__(self) -> None:
        _fixed_kind("arrival", self.kind, ArrivalKind.poisson)
        above_zero("arrival.rate_per_s", self.rate_per_s, 1.0)


@dataclass(frozen=True)
class GammaArrivalConfig(ArrivalConfig):
    """Open loop: gamma-distributed gaps, to be burstier or smoother than Poisson."""

    kind: ArrivalKind = ArrivalKind.gamma
    """Which component this is."""
    rate_per_s: float = 1.0
    """Mean requests per second."""
    gap_cv: float = 2.0
    """Coefficient of variation of the gaps: 1 is Poisson, above is bursty, below is smooth."""

    def __post_init__(self) -> None:
        _fixed_kind("arrival", self.kind, ArrivalKind.gamma)
        above_zero("arrival.rate_per_s", self.rate_per_s, 1.0)
        above_zero("arrival.gap_cv", self.gap_cv, 2.0)


@dataclass(frozen=True)
class FixedArrivalConfig(ArrivalConfig):
    """Open loop: equal gaps."""

    kind: ArrivalKind = ArrivalKind.fixed
    """Which component this is."""
    rate_per_s: float = 1.0
    """Requests per second."""

    def __post_init__(self) -> None:
        _fixed_kind("arrival", self.kind, ArrivalKind.fixed)
        above_zero("arrival.rate_per_s", self.rate_per_s, 1.0)


@dataclass(frozen=True)
class TraceArrivalConfig(ArrivalConfig):
    """Open loop: the times of the trace that the workload replays."""

    kind: ArrivalKind = ArrivalKind.trace
    """Which component this is."""
    rate_scale: float = 1.0
    """Factor on the trace's rate: 2 halves every gap."""

    def __post_init__(self) -> None:
        _fixed_kind("arrival", self.kind, ArrivalKind.trace)
        above_zero("arrival.rate_scale", self.rate_scale, 1.0)


@dataclass(frozen=True)
class ClosedArrivalConfig(ArrivalConfig):
    """Closed loop: a fixed number of clients, each sending its next request when the last one ends."""

    kind: ArrivalKind = ArrivalKind.closed
    """Which component this is."""
    concurrency: int = 8
    """Requests in flight."""

    def __post_init__(self) -> None:
        _fixed_kind("arrival", self.kind, ArrivalKind.closed)
        at_least("arrival.concurrency", self.concurrency, 1, 8)


@dataclass(frozen=True)
class SloConfig:
    """What a request must meet to count as good. null: not asked for."""

    ttft_s: float | None = None
    """Longest time to the first token, in seconds."""
    tpot_s: float | None = None
    """Longest mean time per output token after the first, in seconds."""
    itl_s: float | None = None
    """Longest single gap between two output tokens, in seconds."""
    e2e_s: float | None = None
    """Longest time to the last token, in seconds."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            above_zero(f"slo.{limit.name}", getattr(self, limit.name), 1.0)

    @property
    def is_set(self) -> bool:
        """Whether any limit is asked for."""
        return any(getattr(self, limit.name) is not None for limit in fields(self))


@dataclass(frozen=True)
class BenchConfig:
    """Everything one benchmark run is made of."""

    url: str = "http://127.0.0.1:8000"
    """The server, without /v1."""
    endpoint: Endpoint = Endpoint.completions
    """Which route the requests go to."""
    model: str | None = None
    """Model to ask for; null takes the first that the server lists."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key; null: none is sent."""
    timeout_s: float = 600.0
    """Longest time for one request from sending to its end, in seconds."""
    num_requests: int | None = 100
    """Requests to measure; null: until the trace ends or `duration_s` is over."""
    duration_s: float | None = None
    """Seconds during which requests are sent; null: until `num_requests`."""
    warmup_requests: int = 2
    """Requests at the start, in addition to `num_requests`, that are left out of every figure."""
    seed: int | None = None
    """Seed of prompts, lengths and arrivals; null: a new one each run, printed and recorded."""
    vocab_low: int = 100
    """Smallest token id in prompts."""
    vocab_high: int = 30000
    """Token ids in prompts are below this; it must not exceed the model's vocabulary."""
    ignore_eos: bool = True
    """Ask the server to go on to the wanted output length, whatever the model says."""
    temperature: float | None = 0.0
    """Sampling temperature; null: not sent."""
    continuous_usage: bool = True
    """Ask for token counts in every chunk (`continuous_usage_stats`); without, chunks share the total evenly."""
    tenant_header: str | None = None
    """HTTP header that carries a request's tenant, for servers with scheduler.tenants.key=header; null: the field
    `user` does."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Fields to add to every request body."""
    slo: SloConfig = field(default_factory=SloConfig)
    """What goodput is judged against."""
    out: str | None = None
    """JSON file to write: everything measured and one row a request; null: none."""
    overwrite: bool = False
    """Replace `out` if it exists."""
    workload: WorkloadConfig = field(default_factory=LognormalWorkloadConfig)
    """Prompts and lengths."""
    arrival: ArrivalConfig = field(default_factory=PoissonArrivalConfig)
    """When requests are sent."""

    def __post_init__(self) -> None:
        require(self.url.startswith(("http://", "https://")), "url", self.url, "must start with http:// or https://",
                "for example url=http://127.0.0.1:8000")
        require(not self.url.rstrip("/").endswith("/v1"), "url", self.url, "must be given without /v1",
                f"set url={self.url.rstrip('/').removesuffix('/v1')}")
        at_least("temperature", self.temperature, 0, 0.0)
        require(self.tenant_header != "", "tenant_header", self.tenant_header, "must be the name of a header",
                "for example tenant_header=x-tenant, or null")
        check_load(self)


class LoadConfig(Protocol):
    """The settings that a benchmark and a simulation have in common."""

    @property
    def num_requests(self) -> int | None: ...
    @property
    def duration_s(self) -> float | None: ...
    @property
    def warmup_requests(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def vocab_low(self) -> int: ...
    @property
    def vocab_high(self) -> int: ...
    @property
    def workload(self) -> WorkloadConfig: ...
    @property
    def arrival(self) -> ArrivalConfig: ...


def check_load(config: LoadConfig) -> None:
    """Refuse a load that has no end, or times that its workload does not have. Raises ConfigError."""
    above_zero("timeout_s", config.timeout_s, 600)
    at_least("num_requests", config.num_requests, 1, 100)
    above_zero("duration_s", config.duration_s, 60)
    at_least("warmup_requests", config.warmup_requests, 0, 2)
    at_least("seed", config.seed, 0, 1)
    at_least("vocab_low", config.vocab_low, 0, 100)
    require(config.vocab_high > config.vocab_low, "vocab_high", config.vocab_high,
            f"must be greater than vocab_low={config.vocab_low}", "for example vocab_high=30000")
    replays_trace = isinstance(config.workload, TraceWorkloadConfig)
    require(replays_trace or config.num_requests is not None or config.duration_s is not None,
            "num_requests", config.num_requests, "leaves a synthetic workload without an end",
            "set num_requests or duration_s")
    require(replays_trace or not isinstance(config.arrival, TraceArrivalConfig), "arrival", "trace",
            f"needs a workload with times of its own, and {config.workload.kind.value} has none",
            "set workload=azure or workload=mooncake, or another arrival")
