"""A model divided among ranks: its parts are the whole, and what they compute adds up to what the whole computes."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from paged_kv import PagedRun
from servekit.config.errors import ConfigError
from servekit.config.schema import Quantization
from servekit.kernels import reference_kernels
from servekit.kernels.grouped_int4_linear import quantize as quantize_grouped
from servekit.kernels.int8_linear import quantize as quantize_int8
from servekit.model.decoder import Decoder
from servekit.model.local import ModelFileError
from servekit.model.quantization import SCHEMES, QuantizedWeight, dequantize
from servekit.model.shapes import SHAPES
from servekit.model.sharding import Shard, cut, require_divisible, shard_spec, with_sums
from servekit.model.spec import ModelSpec
from servekit.model.stored_quantization import (
    GptqLayout,
    Inputs,
    Int8Layout,
    Layout,
    Modules,
    StoredQuantization,
    matches,
)
from servekit.model.weights import StoredTensor, TensorSource, load_weights
from servekit.model.weights_dummy import DummyTensors

CPU = torch.device("cpu")
BIASED = dataclasses.replace(SHAPES["tiny"], num_heads=8, num_kv_heads=4, qkv_bias=True, o_bias=True, mlp_bias=True,
                             qk_norm=True, tied_head=False)
ATTENTION = "model.layers.0.self_attn"


def alone(values: Tensor) -> Tensor:
    return values


def parts(source: TensorSource, spec: ModelSpec, size: int) -> list[TensorSource]:
    return [cut(source, spec, Shard(rank, size, alone))[0] for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_tensor_is_whole_on_every_rank_or_divided_among_them(size: int) -> None:
    whole = DummyTensors(BIASED, 0)
    ranks = parts(whole, BIASED, size)
    divided = set()
    for name in whole.tensors:
        read = [rank.read(name) for rank in ranks]
        assert [tuple(part.shape) for part in read] == [rank.tensors[name].shape for rank in ranks]
        if read[0].shape == whole.read(name).shape:
            assert all(torch.equal(part, whole.read(name)) for part in read)
        else:
            axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            assert torch.equal(torch.cat(read, axis), whole.read(name))
            divided.add(name.split(".")[-2] + "." + name.split(".")[-1])
    by_rows = {f"{module}_proj.{kind}" for module in ("q", "k", "v", "gate", "up") for kind in ("weight", "bias")}
    assert divided == (by_rows | {"o_proj.weight", "down_proj.weight"} if size > 1 else set())


def test_a_rank_computes_with_its_heads_and_keeps_their_keys_and_values_alone() -> None:
    part = shard_spec(BIASED, 4)
    assert (part.num_heads, part.num_kv_heads, part.head_dim, part.hidden_size) == (2, 1, 16, 64)
    assert part.intermediate_size == 32
    assert part.kv_bytes_per_token(2) * 4 == BIASED.kv_bytes_per_token(2)


class Ranks:
    """The ranks of one model as threads."""

    def __init__(self, size: int) -> None:
        self._values: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def add_up(self, rank: int) -> Callable[[Tensor], Tensor]:
        def add_up(values: Tensor) -> Tensor:
            self._values[rank] = values
            self._barrier.wait()
            total = torch.stack(self._values).sum(0)
            self._barrier.wait()
            return total

        return add_up


def decoder(spec: ModelSpec, shard: Shard | None = None) -> Decoder:
    source: TensorSource = DummyTensors(spec, 3)
    if shard is not None:
        source, spec = cut(source, spec, shard)
    weights = load_weights(source, spec, torch.float64, CPU, reference_kernels(), Quantization.none, lambda *_: None)
    return Decoder(spec, weights if shard is None else with_sums(weights, shard), reference_kernels(), 64)


def logits(model: Decoder) -> Tensor:
    """Of a prompt in two chunks and a decode."""
    paged, tokens = PagedRun(model, 4, 8), range(40, 60)
    return torch.cat([paged.step({"a": chunk})["a"] for chunk in (tokens[:11], tokens[11:19], tokens[19:])])


@pytest.mark.parametrize("size", [2, 4])
def test_what_the_ranks_compute_adds_up(size: int) -> None:
    ranks = Ranks(size)
    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(lambda rank: logits(decoder(BIASED, Shard(rank, size, ranks.add_up(rank)))),
                                 range(size)))
    expected = logits(decoder(BIASED))
    for one in found:
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)


# --- Quantised matrices -----------------------------------------------------------------------------------------------


class OneMatrix:
    """A checkpoint that stores a matrix as it is given."""

    def __init__(self, name: str, weight: QuantizedWeight) -> None:
        self._weight = weight
        self.tensors: Mapping[str, StoredTensor] = {name: StoredTensor(tuple(dequantize(weight).shape), 8)}

    def describe(self, name: str) -> str:
        return name

    def read(self, name: str) -> Tensor:
        return dequantize(self._weight)

    def read_stored(self, name: str) -> QuantizedWeight:
        return self._weight


def stored_parts(monkeypatch: pytest.MonkeyPatch, name: str, weight: QuantizedWeight, size: int = 2) -> list[Tensor]:
    monkeypatch.setattr("servekit.model.sharding.check_tensors", lambda *_: None)  # It is no whole model.
    read = [rank.read_stored(name) for rank in parts(OneMatrix(name, weight), BIASED, size)]
    return [dequantize(part) for part in read if part is not None]


def in_groups_of_int8(weight: Tensor) -> QuantizedWeight:
    return quantize_int8(weight, 32)


def in_groups_of_int4(weight: Tensor) -> QuantizedWeight:
    return quantize_grouped(weight, 32)


ROUNDINGS = [*(scheme.quantize for scheme in SCHEMES.values()), in_groups_of_int8, in_groups_of_int4]


@pytest.mark.parametrize("quantize", ROUNDINGS)
@pytest.mark.parametrize(("module", "axis"), [("q_proj", 0), ("o_proj", 1)])
def test_parts_of_a_quantised_matrix_are_the_whole(quantize: Callable[[Tensor], QuantizedWeight], module: str,
                                                   axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = quantize(torch.randn(16, 128))
    read = stored_parts(monkeypatch, f"{ATTENTION}.{module}.weight", weight)
    assert len(read) == 2 and torch.equal(torch.cat(read, axis), dequantize(weight))


@pytest.mark.parametrize("quantize", [in_groups_of_int8, in_groups_of_int4])
def test_a_cut_in_a_group_is_refused_by_name(quantize: Callable[[Tensor], QuantizedWeight],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel=2: .*o_proj.weight cannot be cut: its 3 groups"):
        stored_parts(monkeypatch, f"{ATTENTION}.o_proj.weight", quantize(torch.randn(16, 96)))


def test_scattered_groups_are_divided_by_rows_and_refused_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = dataclasses.replace(quantize_grouped(torch.randn(16, 64), 32), inputs=torch.randperm(64))
    read = stored_parts(monkeypatch, f"{ATTENTION}.q_proj.weight", weight)
    assert torch.equal(torch.cat(read), dequantize(weight))
    with pytest.raises(ConfigError, match=r"down_proj.weight cannot be cut: .*scattered.*model\.quantization=none"):
        stored_parts(monkeypatch, "model.layers.0.mlp.down_proj.weight", weight)


def test_a_checkpoint_of_another_model_is_refused_as_a_whole() -> None:
    with pytest.raises(ModelFileError, match=r"q_proj.weight has the shape \[64, 64\].*asks for \[128, 64\]"):
        cut(DummyTensors(SHAPES["tiny"], 0), dataclasses.replace(SHAPES["tiny"], num_heads=8), Shard(0, 2, alone))


# --- Sizes that work --------------------------------------------------------------------------------------------------


def stored_as(layout: Layout) -> ModelSpec:
    made = StoredQuantization("a method", layout, Inputs.kept, Modules(("Linear",), (), matches))
    return dataclasses.replace(SHAPES["llama-2-7b"], stored_quantization=made)


@pytest.mark.parametrize(("spec", "quantization", "size", "works"), [
    (SHAPES["smollm2-135m"], Quantization.none, 2, "1 or 3"),
    (SHAPES["tiny"], Quantization.none, 4, "1 or 2"),
    (dataclasses.replace(SHAPES["tiny"], intermediate_size=129), Quantization.none, 2, "1"),
    (dataclasses.replace(SHAPES["tiny"], intermediate_size=144), Quantization.int4, 2, "1"),
    (SHAPES["llama-2-7b"], Quantization.none, 3, "1 or 2 or 4 or 8 or 16 or 32"),
    (SHAPES["llama-2-7b"], Quantization.int4, 16, "1 or 2 or 4 or 8"),
    (SHAPES["llama-2-7b"], Quantization.nvfp4, 32, "1 or 2 or 4 or 8 or 16"),
    (dataclasses.replace(SHAPES["llama-2-7b"], checkpoint_dtype="Q8_0"), Quantization.int8, 16, "1 or 2 or 4 or 8"),
    (stored_as(Int8Layout(128)), Quantization.int8, 4, "1 or 2"),
    (stored_as(Int8Layout(None)), Quantization.int8, 64, "1 or 2 or 4 or 8 or 16 or 32"),
    (stored_as(GptqLayout(128, True, 1)), Quantization.int4, 2, "1"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_other_sizes_are_refused_with_those_that_work(spec: ModelSpec, quantization: Quantization, size: int,
                                                      works: str) -> None:
    for good in map(int, works.split(" or ")):
        require_divisible(spec, quantization, good)
    remedy = rf"set engine\.tensor_parallel( to |=){works}$"
    with pytest.raises(ConfigError, match=rf"engine\.tensor_parallel={size}: .*; {remedy}"):
        require_divisible(spec, quantization, size)
