"""The one decoder: what every supported family computes, with its attention state as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from servekit.kernels import AttentionBatch, Kernels, Product
from servekit.kernels.precision import at_least_float32
from servekit.model.rope import cos_sin_table
from servekit.model.spec import ModelSpec


@dataclass(frozen=True)
class Linear:
    """A weight matrix [out, in], prepared for products, and its bias [out], if it has one."""

    product: Product
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        y = self.product(x)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class LayerWeights:
    """One layer; matrices that read the same input are one."""

    attention_norm: Tensor
    """[hidden]"""
    qkv: Linear
    """Rows: the query heads', the key heads', the value heads'."""
    q_norm: Tensor | None
    """[head_dim]"""
    k_norm: Tensor | None
    """[head_dim]"""
    o: Linear
    mlp_norm: Tensor
    """[hidden]"""
    gate_up: Linear
    """Rows: the gate's, then up's."""
    down: Linear


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a model, on one device."""

    embedding: Tensor
    """[vocab, hidden]"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[hidden]"""
    head: Linear
    """[vocab, hidden]; a view of the embedding where the two are tied and nothing is quantised."""


KVLayer = tuple[Tensor, Tensor]
"""Key and value cache of one layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""


class Decoder:
    """Token ids in, logits out. It holds weights and no state: two threads may use one decoder."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, kernels: Kernels, max_model_len: int) -> None:
        """Prepare for contexts of up to `max_model_len` tokens."""
        embedding = weights.embedding
        self.spec = spec
        self.weights = weights
        self._kernels = kernels
        self._cos_sin = cos_sin_table(spec, max_model_len, embedding.dtype, embedding.device)
        self._scale = spec.head_dim ** -0.5
        self._head_counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self._next_norms = (*(layer.attention_norm for layer in weights.layers[1:]), weights.final_norm)

    def forward(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, kv: Sequence[KVLayer]) -> Tensor:
        """Compute a step's tokens, writing their keys and values to the cache.

        Args:
            token_ids: [T] int64.
            positions: [T] int64, each below `max_model_len`.
            batch: Which tokens belong to which request, and where its context lies in the cache.
            kv: One key and value cache for each layer; written in place.

        Returns:
            [T, hidden] after the final norm: what `logits` takes.
        """
        residual = F.embedding(token_ids, self.weights.embedding)
        normed = self._kernels.rms_norm(residual, self.weights.layers[0].attention_norm, self.spec.rms_eps)
        for layer, window, layer_kv, next_norm in zip(self.weights.layers, self.spec.windows, kv, self._next_norms,
                                                      strict=True):
            attended = self._attention(layer, normed, positions, batch, layer_kv, window)
            normed, residual = self._kernels.add_rms_norm(attended, residual, layer.mlp_norm, self.spec.rms_eps)
            fed_forward = self._mlp(layer, normed)
            normed, residual = self._kernels.add_rms_norm(fed_forward, residual, next_norm, self.spec.rms_eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] to [S, vocab], in float32 at least."""
        logits = self.weights.head(hidden)
        return logits.to(at_least_float32(logits.dtype))

    def _attention(self, layer: LayerWeights, x: Tensor, positions: Tensor, batch: AttentionBatch, kv: KVLayer,
                   window: int | None) -> Tensor:
        key_cache, value_cache = kv
        heads = layer.qkv(x).view(len(x), -1, self.spec.head_dim)
        q, k, v = heads.split_with_sizes(self._head_counts, 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._kernels.rms_norm(q, layer.q_norm, self.spec.rms_eps)
            k = self._kernels.rms_norm(k, layer.k_norm, self.spec.rms_eps)
        q = self._kernels.rope_and_cache(q, k, v, self._cos_sin, positions, key_cache, value_cache, batch.slots)
        attended = self._kernels.paged_attention(q, key_cache, value_cache, batch, self._scale, window)
        return layer.o(attended.flatten(1))

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        return layer.down(self._kernels.silu_and_mul(layer.gate_up(x)))
