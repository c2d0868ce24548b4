"""The operations of the decoder: one file each, and one dispatch.

Every operation has a `reference` in torch, which is the oracle: float64, float32, float16 and bfloat16, on a
CPU and on CUDA. A `Kernels` gathers one implementation of each, once, when the engine starts.
"""

from servekit.kernels.attention import AttentionBatch
from servekit.kernels.dispatch import Kernels, reference_kernels
from servekit.kernels.fused_layer import FusedLayer, KVLayer, LayerOperands, Product

__all__ = ["AttentionBatch", "FusedLayer", "KVLayer", "Kernels", "LayerOperands", "Product", "reference_kernels"]
