"""What config.json says of a checkpoint's quantisation: `quantization_config`, by its `quant_method`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping

from servekit.config.errors import ConfigError
from servekit.model.compressed_tensors import read_compressed_tensors
from servekit.model.fields import Fields
from servekit.model.stored_quantization import (
    AwqLayout,
    Fp8Layout,
    GptqLayout,
    Inputs,
    Modules,
    StoredQuantization,
    contains,
    group_size,
    matches,
)

_HEAD = "lm_head"
_ALL_MODULES = ("Linear",)
_REMEDY = "choose another checkpoint, or one that is not quantised and model.quantization=int8, int4 or fp8"

_HARMLESS_KEYS = frozenset({
    "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment", "damp_percent",
    "dataset", "do_fuse", "exllama_config", "fuse_max_seq_len", "global_compression_ratio", "hyb_act",
    "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen", "modules_to_fuse",
    "pack_impl", "pad_token_id", "quantization_status", "static_groups", "tokenizer", "true_sequential",
    "use_cuda_fp16", "use_exllama", "version",
})
"""How the weights were found, and hints for other engines."""

_log = logging.getLogger(__name__)


def read_stored_quantization(config: Fields) -> StoredQuantization | None:
    """What config.json says of the checkpoint's quantisation; None if nothing.

    Raises ConfigError, naming the key, for what no kernel computes, ModelFileError for malformed keys.
    """
    key = "quantization_config" if config.get("quantization_config") is not None else "compression_config"
    fields = config.section(key, _REMEDY)
    if fields is None:
        return None
    method, known = fields.get("quant_method"), f"only {', '.join(_READERS)} can be read"
    if method is None:
        raise ConfigError(fields.file, config.get(key), f"names no quant_method, and {known}", _REMEDY)
    if not isinstance(method, str) or method not in _READERS:
        raise ConfigError(f"{fields.file}.quant_method", method, known, _REMEDY)
    stored = _READERS[method](fields)
    unknown = [name for name in fields.unasked() if name not in _HARMLESS_KEYS]
    if unknown:
        _log.warning("%s: unknown keys have no effect: %s", fields.file, ", ".join(unknown))
    return stored


def _awq(fields: Fields) -> StoredQuantization:
    """As AutoAWQ writes it; names of some keys differ between its own file and config.json."""
    fields.only("w_bit" if fields.has("w_bit") else "bits", 4)
    fields.only("version", None, "gemm", "GEMM")
    fields.only("zero_point", True)
    layout = AwqLayout(group_size(fields, "q_group_size" if fields.has("q_group_size") else "group_size"))
    ignored = (_HEAD, *fields.names("modules_to_not_convert"))
    return StoredQuantization("awq", layout, Inputs.kept, Modules(_ALL_MODULES, ignored, contains))


def _gptq(fields: Fields) -> StoredQuantization:
    """As AutoGPTQ and GPTQModel write it. `sym` needs no care: zero points are stored either way."""
    fields.get("sym")
    fields.only("bits", 4)
    fields.only("is_marlin_format", None, False)
    fields.only("pack_dtype", None, "int32")
    fields.only("checkpoint_format", None, "gptq", "gptq_v2")
    zero_offset = 0 if fields.get("checkpoint_format") == "gptq_v2" else 1
    layout = GptqLayout(group_size(fields, "group_size"), fields.flag("desc_act", False), zero_offset)
    return StoredQuantization("gptq", layout, Inputs.kept, _gptq_modules(fields))


def _gptq_modules(fields: Fields) -> Modules:
    """All in the layers, or those that are listed, but for what a `dynamic` pattern with a minus names."""
    dynamic = fields.section("dynamic", _REMEDY)
    patterns = [] if dynamic is None else dynamic.unasked()
    if not all(pattern.startswith("-:") for pattern in patterns):
        raise fields.refusal("dynamic", "only patterns that begin with -: can be read")
    ignored = [f"re:{pattern.removeprefix('-:')}" for pattern in patterns]
    if not fields.flag("lm_head", False):
        ignored.append(_HEAD)
    targets = tuple(f"re:.*\\.{re.escape(name)}$" for name in fields.names("modules_in_block_to_quantize"))
    return Modules(targets or _ALL_MODULES, (*ignored, *fields.names("modules_to_not_convert")), matches)


def _fp8(fields: Fields) -> StoredQuantization:
    """As AutoFP8 writes it, or transformers without blocks."""
    fields.only("weight_block_size", None)
    fields.only("fmt", None, "e4m3")
    fields.only("kv_cache_scheme", None)
    fields.only("activation_scheme", "dynamic", "static")
    is_static = fields.get("activation_scheme") == "static"
    ignored = (_HEAD, *fields.names("ignored_layers"), *fields.names("modules_to_not_convert"))
    return StoredQuantization("fp8", Fp8Layout(has_input_scale=is_static),
                              Inputs.rounded_otherwise if is_static else Inputs.rounded_by_row,
                              Modules(_ALL_MODULES, ignored, matches))


_READERS: Mapping[str, Callable[[Fields], StoredQuantization]] = {
    "awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": read_compressed_tensors}
