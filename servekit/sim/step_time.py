"""How long a step takes, from what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from servekit.config.roofline import EfficiencyConfig, Precision
from servekit.core.plan import Plan
from servekit.sim.gpus import BITS
from servekit.sim.replica import Replica


class PromptChunk(NamedTuple):
    """Several tokens of one request, computed in one step."""

    num_tokens: float
    num_computed: float
    """Tokens of the request before them, whose keys and values they read."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes, as far as its time depends on it.

    The numbers of a real step are whole. Those of an average step, as a capacity plan uses them, need not be.
    """

    num_decodes: float = 0
    """Requests that compute one token."""
    decode_context_tokens: float = 0
    """Sum of the tokens that these read keys and values of, their own included."""
    chunks: Sequence[PromptChunk] = ()
    num_sampled: float = 0
    """Requests whose next token is drawn: the rows that the head computes."""
    num_swapped_blocks: int = 0
    """KV blocks copied between the GPU and the host, both ways together."""

    @property
    def num_tokens(self) -> float:
        """Tokens that pass through the layers."""
        return self.num_decodes + sum(chunk.num_tokens for chunk in self.chunks)


def step_shape(plan: Plan) -> StepShape:
    """The shape of a planned step. A chunk of a single token counts as a decode: it is computed in the same way."""
    num_decodes = context_tokens = num_sampled = 0
    chunks = []
    for item in plan.items:
        num_sampled += item.samples
        if item.num_tokens == 1:
            num_decodes += 1
            context_tokens += item.start + 1
        else:
            chunks.append(PromptChunk(item.num_tokens, item.start))
    return StepShape(num_decodes, context_tokens, chunks, num_sampled, len(plan.swap_out) + len(plan.swap_in))


class StepTimeModel(Protocol):
    """Predicts the time of a step."""

    def step_s(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes."""
        ...


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where a step's time goes, in seconds."""

    overhead_s: float = 0.0
    linear_s: float = 0.0
    attention_s: float = 0.0
    communication_s: float = 0.0
    """All-reduces between GPUs, and copies to and from the host."""

    @property
    def total_s(self) -> float:
        """The whole step: the parts follow each other."""
        return self.overhead_s + self.linear_s + self.attention_s + self.communication_s


@dataclass(frozen=True)
class RooflineStepTime:
    """Step times from a GPU's data sheet: every kind of kernel is bound by arithmetic or by memory.

    The roofline model (Williams, Waterman and Patterson, 2009), applied to one kind of kernel at a time, since the
    kernels of a step follow each other: the products with the layers' matrices and with the head, the attention of
    the decodes together, that of each chunk. Each takes the longer of its arithmetic and its reads. All-reduces go
    around a ring. Sharding divides arithmetic and reads evenly.

    Left out: what small batches lose in matrix products, imbalance between GPUs, and overlap of any kind.
    """

    replica: Replica
    efficiency: EfficiencyConfig = field(default_factory=EfficiencyConfig)
    block_size_tokens: int = 16
    """Tokens in a KV block, for the time of swaps."""

    def step_s(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes."""
        return self.parts(shape).total_s

    def parts(self, shape: StepShape) -> StepParts:
        """Where the time of a step of this shape goes."""
        num_tokens = shape.num_tokens
        copies_s = shape.num_swapped_blocks * self._block_copy_s
        if not num_tokens:
            return StepParts(communication_s=copies_s)
        return StepParts(
            overhead_s=self._overhead_s,
            linear_s=self._layers_s(num_tokens) + self._head_s(shape.num_sampled),
            attention_s=self._decode_attention_s(shape) + sum(map(self._chunk_attention_s, shape.chunks)),
            communication_s=copies_s + self._all_reduces_s(num_tokens),
        )

    def _layers_s(self, num_tokens: float) -> float:
        return max(self._read_layers_s, num_tokens * self._layers_token_s)

    def _head_s(self, num_rows: float) -> float:
        return max(self._read_head_s, num_rows * self._head_row_s) if num_rows else 0.0

    def _decode_attention_s(self, shape: StepShape) -> float:
        return shape.decode_context_tokens * max(self._read_kv_token_s, self._attention_pair_s)

    def _chunk_attention_s(self, chunk: PromptChunk) -> float:
        """Each token reads those before it and itself; the keys and values themselves are read once."""
        num_tokens, num_computed = chunk
        pairs = num_tokens * num_computed + num_tokens * (num_tokens + 1) / 2
        return max((num_computed + num_tokens) * self._read_kv_token_s, pairs * self._attention_pair_s)

    def _all_reduces_s(self, num_tokens: float) -> float:
        """Two a layer, of the hidden states in 16 bits; a ring sends 2 (n - 1) / n of these over each link."""
        gpus, model = self.replica.tensor_parallel, self.replica.model
        if gpus == 1:
            return 0.0
        sent_bytes = 2 * (gpus - 1) / gpus * num_tokens * model.hidden_size * BITS[Precision.bfloat16] / 8
        link_bytes_per_s = self.replica.gpu.link_bytes_per_s * self.efficiency.link
        return 2 * model.num_layers * (self.efficiency.all_reduce_latency_s + sent_bytes / link_bytes_per_s)

    @cached_property
    def _overhead_s(self) -> float:
        return self.efficiency.step_overhead_s + self.replica.model.num_layers * self.efficiency.layer_overhead_s

    @cached_property
    def _read_layers_s(self) -> float:
        return self.replica.layer_bytes / self._bytes_per_s

    @cached_property
    def _read_head_s(self) -> float:
        return self.replica.head_bytes / self._bytes_per_s

    @cached_property
    def _read_kv_token_s(self) -> float:
        return self.replica.kv_bytes_per_token / self._bytes_per_s

    @cached_property
    def _layers_token_s(self) -> float:
        return 2 * self.replica.model.num_matrix_parameters / self._flops_per_s(self.replica.weights)

    @cached_property
    def _head_row_s(self) -> float:
        return 2 * self.replica.head_parameters / self._flops_per_s(Precision.bfloat16)

    @cached_property
    def _attention_pair_s(self) -> float:
        """A query with one key and one value: two products of the head dimension for each head and layer."""
        model = self.replica.model
        return 4 * model.num_layers * model.num_heads * model.head_dim / self._flops_per_s(Precision.bfloat16)

    @cached_property
    def _block_copy_s(self) -> float:
        block_bytes = self.block_size_tokens * self.replica.kv_bytes_per_token
        return block_bytes / (self.replica.gpu.host_bytes_per_s * self.replica.tensor_parallel * self.efficiency.link)

    @cached_property
    def _bytes_per_s(self) -> float:
        """Memory bandwidth that all GPUs of the replica reach together."""
        return self.replica.gpu.memory_bytes_per_s * self.replica.tensor_parallel * self.efficiency.bandwidth

    def _flops_per_s(self, precision: Precision) -> float:
        """Operations per second that all GPUs of the replica reach together."""
        return self.replica.gpu.flops_per_s[precision] * self.replica.tensor_parallel * self.efficiency.compute
