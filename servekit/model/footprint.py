"""What a model takes of a device's memory: one reckoning for the engine and for plans of other machines."""

from __future__ import annotations

from dataclasses import dataclass

from servekit.model.spec import ModelSpec

_LOGITS_COPIES = 2
"""The logits themselves, in float32, and the probabilities that are drawn from."""


@dataclass(frozen=True)
class WeightBits:
    """Bits that a number takes, its share of the scales included."""

    matrices: float
    """In the layers' matrices."""
    head: float
    others: float
    """In the embedding, norms and biases."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Where the memory of a device goes, in bytes; the KV cache has what is left."""

    total_bytes: int
    others_bytes: int
    """Held by other processes, and on a GPU by its driver."""
    usable_bytes: int
    """Of the engine: its share of the total, but no more than the others leave."""
    weights_bytes: int
    activation_bytes: int
    """Temporary tensors of the largest step."""
    graph_bytes: int
    """Buffers of CUDA graphs."""
    headroom_bytes: int
    """Kept free for peaks."""
    is_measured: bool = False
    """Whether the largest step was run; otherwise its bytes are an estimate."""

    @property
    def room_bytes(self) -> int:
        """What is left for keys and values; below 0 where even the rest does not fit."""
        return (self.usable_bytes - self.weights_bytes - self.activation_bytes - self.graph_bytes
                - self.headroom_bytes)

    @property
    def is_limited_by_others(self) -> bool:
        """Whether others leave less than the engine's share."""
        return self.others_bytes > 0 and self.usable_bytes == self.total_bytes - self.others_bytes

    def __str__(self) -> str:
        graphs = f"{gigabytes(self.graph_bytes)} CUDA graphs, " if self.graph_bytes else ""
        others = f"; {self.others}" if self.is_limited_by_others else ""
        return (f"{gigabytes(self.usable_bytes)} usable, less {gigabytes(self.weights_bytes)} weights, "
                f"{gigabytes(self.activation_bytes)} for the largest step, {graphs}"
                f"{gigabytes(self.headroom_bytes)} headroom{others}")

    @property
    def others(self) -> str:
        """For people: what others hold."""
        return f"others hold {gigabytes(self.others_bytes)} of {gigabytes(self.total_bytes)}"


def memory_use(total_bytes: int, free_bytes: int, fraction: float, headroom: float, weights: int, activations: int,
               graphs: int = 0, is_measured: bool = False) -> MemoryUse:
    """Divide a device's memory.

    Args:
        total_bytes: What the device has.
        free_bytes: What of it nobody used before the engine.
        fraction: Share of the total that the engine may use.
        headroom: Share of that which is kept free.
        weights: Bytes of the weights.
        activations: Bytes of the largest step.
        graphs: Bytes of CUDA graphs.
        is_measured: Whether `activations` was measured.
    """
    usable = min(int(total_bytes * fraction), free_bytes)
    return MemoryUse(total_bytes, total_bytes - free_bytes, usable, weights, activations, graphs,
                     int(usable * headroom), is_measured)


def weights_bytes(spec: ModelSpec, bits: WeightBits) -> int:
    """Bytes of all weights. A tied head in another format than the embedding stands beside it."""
    head = spec.vocab_size * spec.hidden_size
    others = spec.num_parameters - spec.num_matrix_parameters - (0 if spec.tied_head else head)
    own_head = 0 if spec.tied_head and bits.head == bits.others else head
    return int((spec.num_matrix_parameters * bits.matrices + own_head * bits.head + others * bits.others) / 8)


def activation_bytes(spec: ModelSpec, max_step_tokens: int, max_num_seqs: int, dtype_bytes: int,
                     shards: int = 1) -> int:
    """Estimate of the largest step's temporary tensors on one device: the widest layer, and the logits.

    Of `shards` devices, each has its part of heads and feed-forward, and whole hidden states and logits.
    """
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    widest = 4 * spec.hidden_size + (3 * spec.intermediate_size + heads) // shards
    return max_step_tokens * widest * dtype_bytes + logits_bytes(spec, max_num_seqs)


def logits_bytes(spec: ModelSpec, max_num_seqs: int) -> int:
    """Bytes of what tokens are drawn from."""
    return _LOGITS_COPIES * 4 * max_num_seqs * spec.vocab_size


def gigabytes(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / 1e9:.2f} GB"
