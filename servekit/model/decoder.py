"""The one decoder: what every supported family computes, with its attention state as an argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from servekit.kernels import AttentionBatch, FusedLayer, Kernels, KVLayer, LayerOperands, Product
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

    @property
    def products(self) -> Iterator[Product]:
        """With each matrix."""
        for layer in self.layers:
            yield from (layer.qkv.product, layer.o.product, layer.gate_up.product, layer.down.product)
        yield self.head.product


class Decoder:
    """Token ids in, logits out. It holds weights and no state: two threads may use one decoder."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, kernels: Kernels, max_model_len: int) -> None:
        """Prepare for contexts of up to `max_model_len` tokens."""
        embedding = weights.embedding
        self.spec = spec
        self.weights = weights
        self._kernels = kernels
        self._cos_sin = cos_sin_table(spec, max_model_len, embedding.dtype, embedding.device)
        next_norms = (*(layer.attention_norm for layer in weights.layers[1:]), weights.final_norm)
        self._layers = [self._prepare(layer, next_norm, window) for layer, next_norm, window
                        in zip(weights.layers, next_norms, spec.windows, strict=True)]

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
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            normed, residual = layer(normed, residual, self._cos_sin, positions, batch, layer_kv)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] to [S, vocab], in float32 at least."""
        logits = self.weights.head(hidden)
        return logits.to(at_least_float32(logits.dtype))

    def _prepare(self, layer: LayerWeights, next_norm: Tensor, window: int | None) -> FusedLayer:
        """The layer as one operation where the kernels have one for it, else as a sequence of them."""
        is_plain = layer.q_norm is None and all(linear.bias is None for linear in
                                                (layer.qkv, layer.o, layer.gate_up, layer.down))
        fused = self._kernels.fused_layer(self._operands(layer, next_norm, window)) if is_plain else None
        return fused or _Layer(layer, next_norm, window, self.spec, self._kernels)

    def _operands(self, layer: LayerWeights, next_norm: Tensor, window: int | None) -> LayerOperands:
        spec = self.spec
        return LayerOperands(layer.qkv.product, layer.o.product, layer.mlp_norm, layer.gate_up.product,
                             layer.down.product, next_norm, spec.hidden_size, spec.num_heads, spec.num_kv_heads,
                             spec.head_dim, window, spec.rms_eps)


class _Layer:
    """One layer, operation by operation."""

    def __init__(self, weights: LayerWeights, next_norm: Tensor, window: int | None, spec: ModelSpec,
                 kernels: Kernels) -> None:
        self._weights = weights
        self._next_norm = next_norm
        self._window = window
        self._spec = spec
        self._kernels = kernels
        self._scale = spec.head_dim ** -0.5
        self._head_counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]

    def __call__(self, normed: Tensor, residual: Tensor, cos_sin: Tensor, positions: Tensor, batch: AttentionBatch,
                 kv: KVLayer) -> tuple[Tensor, Tensor]:
        attended = self._attention(normed, cos_sin, positions, batch, kv)
        normed, residual = self._kernels.add_rms_norm(attended, residual, self._weights.mlp_norm, self._spec.rms_eps)
        fed_forward = self._weights.down(self._kernels.silu_and_mul(self._weights.gate_up(normed)))
        return self._kernels.add_rms_norm(fed_forward, residual, self._next_norm, self._spec.rms_eps)

    def _attention(self, x: Tensor, cos_sin: Tensor, positions: Tensor, batch: AttentionBatch, kv: KVLayer) -> Tensor:
        weights, kernels, (key_cache, value_cache) = self._weights, self._kernels, kv
        heads = weights.qkv(x).view(len(x), -1, self._spec.head_dim)
        q, k, v = heads.split_with_sizes(self._head_counts, 1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = kernels.rms_norm(q, weights.q_norm, self._spec.rms_eps)
            k = kernels.rms_norm(k, weights.k_norm, self._spec.rms_eps)
        q = kernels.rope_and_cache(q, k, v, cos_sin, positions, key_cache, value_cache, batch.slots)
        attended = kernels.paged_attention(q, key_cache, value_cache, batch, self._scale, self._window)
        return weights.o(attended.flatten(1))
