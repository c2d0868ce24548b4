"""A model on the GPUs that serve one copy of it: what it weighs, reads and keeps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from servekit.config.errors import require
from servekit.config.roofline import Precision
from servekit.model.footprint import WeightBits, activation_bytes, weights_bytes
from servekit.model.spec import ModelSpec
from servekit.sim.gpus import BITS, Gpu

_PLAIN_BITS = BITS[Precision.bfloat16]
"""Of embedding, head, norms and activations."""


@dataclass(frozen=True)
class Replica:
    """One copy of a model, sharded over `tensor_parallel` GPUs.

    The layers' matrices are kept and multiplied in `weights`. Embedding, head and norms stay in 16 bits, as
    quantised checkpoints have them.

    Raises ConfigError for a model or a number format that this reckoning does not cover.
    """

    model: ModelSpec
    gpu: Gpu
    tensor_parallel: int = 1
    weights: Precision = Precision.bfloat16
    kv: Precision = Precision.bfloat16
    """Number format of keys and values; attention multiplies in bfloat16 whatever it is."""

    def __post_init__(self) -> None:
        known = ", ".join(precision.name for precision in self.gpu.flops_per_s)
        require(self.weights in self.gpu.flops_per_s, "weight_precision", self.weights.name,
                f"{self.gpu.name} does not multiply in it", f"choose one of {known}, or another gpu")
        require(self.model.num_kv_heads % self.tensor_parallel == 0, "tensor_parallel", self.tensor_parallel,
                f"must divide the model's {self.model.num_kv_heads} key-value heads", "for example tensor_parallel=1")
        require(not any(self.model.windows), "model", self.model.family.value,
                "has layers with a sliding window, whose smaller reads are not modelled", "choose a model without")

    @cached_property
    def head_parameters(self) -> int:
        """Numbers in the matrix that turns a hidden state into logits."""
        return self.model.vocab_size * self.model.hidden_size

    @cached_property
    def layer_bytes(self) -> float:
        """Bytes of the layers' matrices: what every step reads."""
        return self.model.num_matrix_parameters * BITS[self.weights] / 8

    @cached_property
    def head_bytes(self) -> float:
        """Bytes of the head: what a step that samples reads as well."""
        return self.head_parameters * BITS[Precision.bfloat16] / 8

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of all weights, over all its GPUs."""
        return weights_bytes(self.model, WeightBits(BITS[self.weights], _PLAIN_BITS, _PLAIN_BITS))

    def activation_bytes(self, max_step_tokens: int, max_num_seqs: int) -> int:
        """Estimate of the temporary tensors of the largest step, over all its GPUs."""
        return self.tensor_parallel * activation_bytes(self.model, max_step_tokens, max_num_seqs, int(_PLAIN_BITS) // 8,
                                                       self.tensor_parallel)

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token over all layers and GPUs."""
        return self.model.kv_bytes_per_token(1) * BITS[self.kv] / 8

    @cached_property
    def memory_bytes(self) -> float:
        """Memory of its GPUs together."""
        return self.gpu.memory_bytes * self.tensor_parallel

    @cached_property
    def weight_streaming_s(self) -> float:
        """Time to read the weights once at full bandwidth, in seconds: no decode step can be shorter."""
        return (self.layer_bytes + self.head_bytes) / (self.gpu.memory_bytes_per_s * self.tensor_parallel)
