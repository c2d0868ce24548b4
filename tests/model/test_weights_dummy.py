"""Random weights: the same for the same seed, and usable."""

from __future__ import annotations

import pytest
import torch

from paged_kv import PagedRun
from servekit.kernels import reference_kernels
from servekit.model.decoder import Decoder
from servekit.model.loader import load_decoder, load_spec
from servekit.model.local import LocalModel, SourceKind

ONES = torch.ones(1, load_spec(LocalModel(SourceKind.dummy, "", None, "tiny")).intermediate_size)


def load(seed: int) -> Decoder:
    local = LocalModel(SourceKind.dummy, "dummy:tiny", None, "tiny", seed)
    return load_decoder(local, load_spec(local), torch.float32, torch.device("cpu"), reference_kernels(), 64,
                        lambda done, total: None)


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = load(0), load(0), load(1)
    assert torch.equal(first.weights.embedding, again.weights.embedding)
    assert torch.equal(first.weights.layers[1].down(ONES), again.weights.layers[1].down(ONES))
    assert not torch.equal(first.weights.embedding, other.weights.embedding)
    assert not torch.equal(first.weights.layers[0].down(ONES), first.weights.layers[1].down(ONES))


def test_logits_tell_tokens_apart() -> None:
    logits = PagedRun(load(0), 16, 4).step({"a": list(range(40))})["a"]
    assert logits.shape == (40, 512) and logits.isfinite().all()
    assert len(set(logits.argmax(dim=-1).tolist())) > 10


def test_a_dummy_model_has_no_files() -> None:
    with pytest.raises(ValueError, match="dummy:tiny has no files"):
        _ = LocalModel(SourceKind.dummy, "dummy:tiny", None, "tiny").files
