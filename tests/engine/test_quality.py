"""Quantised weights keep the default model's quality: the limits of experiments/quantisation-quality, on less text."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

_SCRIPT = Path(__file__).parents[2] / "experiments" / "quantisation-quality" / "run.py"


@pytest.fixture(scope="module")
def experiment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quantisation_quality", _SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_int8_and_int4_stay_within_their_limits(experiment: ModuleType, default_model_path: Path) -> None:
    """Over one window of 512 tokens."""
    overrides = [f"model.source={default_model_path}"]
    prompts = experiment.windows(512, overrides)
    full = experiment.measure(experiment.Variant("auto", "none", "auto"), prompts, overrides)
    assert 10 < full.perplexity < 40, "the text is read as text"
    for quantization, most_ratio in (("int8", 1.015), ("int4", 1.04)):
        variant = experiment.Variant("auto", quantization, "auto", most_ratio)
        ratio = experiment.measure(variant, prompts, overrides).perplexity / full.perplexity
        assert 2 - most_ratio < ratio < most_ratio, f"{quantization}: {ratio}"


def test_the_text_is_english_prose(experiment: ModuleType) -> None:
    paragraphs = experiment.prose()
    assert len(paragraphs) > 200 and len(set(paragraphs)) == len(paragraphs)
    words = " ".join(paragraphs).split()
    assert sum(word in {"the", "a", "is", "of", "to", "in", "and"} for word in words) > 0.2 * len(words)
    assert not any(mark in " ".join(paragraphs) for mark in (">>>", "::=", "\n"))


def test_every_format_has_its_limit(experiment: ModuleType) -> None:
    limits = {(variant.quantization, variant.kv_dtype): variant.most_ratio for variant in experiment.VARIANTS}
    assert limits == {("none", "float32"): None, ("none", "bfloat16"): None, ("int8", "float32"): 1.015,
                      ("int8", "bfloat16"): 1.015, ("int4", "float32"): 1.04, ("int4", "bfloat16"): 1.04}
