"""What config.json says of a checkpoint's quantisation in the format of compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass

from servekit.model.fields import Fields
from servekit.model.stored_quantization import (
    ROUNDED_BY_ROW,
    Fp8Layout,
    Inputs,
    Int8Layout,
    Layout,
    Modules,
    Mxfp4Layout,
    Nvfp4Layout,
    PackedInt4Layout,
    StoredQuantization,
    group_size,
    matches,
)

_GROUP_ORDERS = (True, "group", "dynamic")
"""Values of `actorder` that scatter the groups over the inputs; with the others they lie in order."""


def read_compressed_tensors(fields: Fields) -> StoredQuantization:
    """Raises ConfigError, naming the key, for what no kernel computes, ModelFileError for malformed keys."""
    fields.only("kv_cache_scheme", None)
    fields.only("transform_config", None, {})
    sparsity = fields.section("sparsity_config")
    if sparsity is not None and sparsity.get("format") != "dense" and fields.get("sparsity_config"):
        raise fields.refusal("sparsity_config", "sparse matrices cannot be read")
    group = _only_group(fields)
    group.only("output_activations", None)
    weights, inputs = _arguments(group, "weights"), _arguments(group, "input_activations")
    if weights is None:
        raise group.refusal("weights", "nothing is quantised")
    layout = _layout(weights, inputs, group if group.get("format") is not None else fields)
    group.refuse_unasked()
    return StoredQuantization("compressed-tensors", layout, _inputs(weights, inputs, layout),
                              Modules(group.names("targets"), fields.names("ignore"), matches))


def _only_group(fields: Fields) -> Fields:
    groups = fields.section("config_groups")
    names = [] if groups is None else groups.unasked()
    group = None if groups is None or len(names) != 1 else groups.section(names[0])
    if group is None:
        raise fields.refusal("config_groups", "only a single group can be read")
    group.names("targets")
    return group


@dataclass(frozen=True)
class _Arguments:
    """How weights or activations were rounded."""

    fields: Fields
    kind: str
    """`int` or `float`, and the bits."""
    strategy: str
    group_size: int | None
    is_symmetric: bool
    has_scattered_groups: bool
    dynamic: object


def _arguments(group: Fields, key: str) -> _Arguments | None:
    fields = group.section(key)
    if fields is None:
        return None
    size = None if fields.get("group_size") is None else group_size(fields, "group_size")
    implied = "tensor" if fields.get("group_size") is None else "channel" if size is None else "group"
    fields.only("actorder", None, False, "weight", "static", *_GROUP_ORDERS)
    fields.only("block_structure", None)
    for found_by in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
        fields.get(found_by)
    arguments = _Arguments(
        fields, f"{fields.get('type') or 'int'}{fields.integer('num_bits', 8)}", str(fields.get("strategy") or implied),
        size, fields.flag("symmetric", True), fields.get("actorder") in _GROUP_ORDERS, fields.get("dynamic"))
    fields.refuse_unasked()
    return arguments


def _layout(weights: _Arguments, inputs: _Arguments | None, named_by: Fields) -> Layout:
    """The layout that the section `named_by` names, if it suits the weights."""
    fields, has_input_scale = weights.fields, inputs is not None and inputs.dynamic is not True
    match weights.kind, named_by.get("format"):
        case "int4", "pack-quantized":
            _require_strategy(weights, "group", "channel")
            return PackedInt4Layout(weights.group_size, weights.is_symmetric, weights.has_scattered_groups)
        case "int8", "int-quantized" | "naive-quantized":
            _require_strategy(weights, "tensor", "channel", *(("group",) if inputs is None else ()))
            fields.only("symmetric", True)
            fields.only("actorder", None, False, "weight", "static")
            return Int8Layout(weights.group_size, has_input_scale)
        case "float8", "float-quantized" | "naive-quantized":
            _require_strategy(weights, "tensor", "channel")
            return Fp8Layout(has_input_scale)
        case "float4", "mxfp4-pack-quantized":
            fields.only("group_size", Mxfp4Layout.group_size)
            return Mxfp4Layout()
        case "float4", "nvfp4-pack-quantized":
            fields.only("group_size", Nvfp4Layout.group_size)
            return Nvfp4Layout(has_input_scale)
    raise named_by.refusal("format", f"holds {weights.kind}; only int4 as pack-quantized, int8 as int-quantized, "
                           "float8 as float-quantized, and float4 as mxfp4-pack-quantized or nvfp4-pack-quantized can "
                           "be read")


def _require_strategy(weights: _Arguments, *readable: str) -> None:
    if weights.strategy not in readable:
        raise weights.fields.refusal("strategy", f"only {' or '.join(readable)} can be read")


def _inputs(weights: _Arguments, inputs: _Arguments | None, layout: Layout) -> Inputs:
    if inputs is None:
        return Inputs.kept
    is_by_row = inputs.dynamic is True and inputs.strategy == "token" and inputs.is_symmetric
    is_suited = inputs.kind == weights.kind and layout.quantization in ROUNDED_BY_ROW
    return Inputs.rounded_by_row if is_by_row and is_suited else Inputs.rounded_otherwise
