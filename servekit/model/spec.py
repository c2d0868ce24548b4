"""What a model is, without its weights: every number its mathematics, its memory and its limits follow from.

Nothing here imports torch, so that reading a model's facts stays quick.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from servekit.config.errors import require
from servekit.model.stored_quantization import StoredQuantization


class Family(Enum):
    """The architectures that the decoder computes, by their names in config.json."""

    llama = "LlamaForCausalLM"
    mistral = "MistralForCausalLM"
    qwen2 = "Qwen2ForCausalLM"
    qwen3 = "Qwen3ForCausalLM"


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every position is divided by `factor` (Chen et al., 2023)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware scaling of theta, by the longest context that is served (bloc97 and emozilla, 2023).

    Up to the trained length nothing changes. Published implementations let theta grow with the text, which makes
    a token's key depend on when it was computed; here theta is fixed by the longest context that is served.
    """

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: high frequencies stay, low ones are interpolated, a ramp lies between (Peng et al., 2023)."""

    factor: float
    original_max_position: int
    """Length the model was trained for, in tokens."""
    attention_factor: float
    """Factor of cosines and sines."""
    beta_fast: float = 32.0
    """Rotations over the trained length from which a frequency stays as it is."""
    beta_slow: float = 1.0
    """Rotations over the trained length below which a frequency is divided by `factor`."""
    truncate: bool = True
    """Whether the ramp's ends are whole dimensions."""


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Growth of cosines and sines that YaRN recommends for an extension by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1: by wavelength against the trained length."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    """Length the model was trained for, in tokens."""


@dataclass(frozen=True)
class FrequencyFactors:
    """One divisor for each frequency, as GGUF files carry them in `rope_freqs.weight`."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | FrequencyFactors


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over the whole head dimension."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, gated feed-forward."""

    family: Family
    vocab_size: int
    """Rows of the embedding: the only valid token ids are below it."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest context the model declares, in tokens."""
    rms_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    """For each layer the positions that a query sees, its own included; None: all."""
    tied_head: bool
    """Whether the output head is the embedding."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's query and key are normalised before the rotation."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Every token that ends a text."""
    checkpoint_dtype: str = "float32"
    """Number format in which the weights are stored, as the checkpoint names it."""
    stored_quantization: StoredQuantization | None = None
    """How the checkpoint stores matrices that are quantised; None where its tensors are plain numbers, or in GGUF."""
    generation_defaults: Mapping[str, float | int | bool] = field(default_factory=dict, hash=False)
    """Sampling defaults of generation_config.json, by their names there."""

    def __post_init__(self) -> None:
        require(self.num_heads % self.num_kv_heads == 0, "num_key_value_heads", self.num_kv_heads,
                f"must divide the number of attention heads, {self.num_heads}", "correct the model's configuration")
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "must be even for rotary positions",
                "correct the model's configuration")
        require(len(self.windows) == self.num_layers, "layer_types", len(self.windows),
                f"must have one entry for each of the {self.num_layers} layers", "correct the model's configuration")

    @property
    def max_context_tokens(self) -> int:
        """Longest context that the model can be served with: what it was trained for, times its scaling."""
        match self.rope.scaling:
            case LinearScaling(factor) | DynamicScaling(factor):
                return max(self.max_position, int(self.max_position * factor))
            case YarnScaling(factor, original_max_position):
                return max(self.max_position, int(original_max_position * factor))
            case _:
                return self.max_position

    @property
    def num_parameters(self) -> int:
        """Numbers in all weight tensors; a tied head counts once."""
        return sum(math.prod(shape) for shape in tensor_shapes(self).values())

    @property
    def num_matrix_parameters(self) -> int:
        """Numbers in the layers' matrices: what a step multiplies by for every token, without embedding and head."""
        return self.num_layers * sum(math.prod(shape) for shape in _layer_shapes(self).values() if len(shape) == 2)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The weight tensors of a model: Hugging Face names and shapes, in the order of computation."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(spec).items()}
    shapes["model.norm.weight"] = (spec.hidden_size,)
    if not spec.tied_head:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (spec.hidden_size,)}
    for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        shapes |= _linear_shapes(f"self_attn.{name}", size, spec.hidden_size, spec.qkv_bias)
    if spec.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    shapes |= _linear_shapes("self_attn.o_proj", spec.hidden_size, q_size, spec.o_bias)
    shapes["post_attention_layernorm.weight"] = (spec.hidden_size,)
    for name in ("gate_proj", "up_proj"):
        shapes |= _linear_shapes(f"mlp.{name}", spec.intermediate_size, spec.hidden_size, spec.mlp_bias)
    return shapes | _linear_shapes("mlp.down_proj", spec.hidden_size, spec.intermediate_size, spec.mlp_bias)


def _linear_shapes(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight
