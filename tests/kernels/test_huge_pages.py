"""Tensors in large pages are tensors like others."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from servekit.kernels.cpu import huge_pages
from servekit.kernels.cpu.huge_pages import HugePages


@given(shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=20),
       dtype=st.sampled_from([torch.uint8, torch.int8, torch.float32, torch.bfloat16]), seed=st.integers(0, 1000))
def test_placed_tensors_keep_their_content_and_lie_at_whole_lines(shapes: list[list[int]], dtype: torch.dtype,
                                                                  seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    originals = [torch.randint(0, 100, tuple(shape), generator=generator).to(dtype) for shape in shapes]
    pages = HugePages()
    placed = [pages.place(original) for original in originals]
    del pages
    for tensor, original in zip(placed, originals, strict=True):
        assert tensor.dtype is dtype and torch.equal(tensor, original) and tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or tensor.numel() == 0


def test_a_transposed_tensor_is_placed_in_order() -> None:
    original = torch.arange(12).view(3, 4).T
    placed = HugePages().place(original)
    assert placed.is_contiguous() and torch.equal(placed, original)


@pytest.mark.parametrize("megabytes", [31, 32, 33])
def test_tensors_around_the_size_of_a_slab(megabytes: int) -> None:
    pages = HugePages()
    placed = [pages.place(torch.full((megabytes * 2 ** 20,), value, dtype=torch.uint8)) for value in (1, 2, 3)]
    assert [tensor.unique().tolist() for tensor in placed] == [[1], [2], [3]]


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3, 5), (3, 2 ** 20)])
def test_an_empty_tensor_has_its_shape_and_can_be_written(shape: tuple[int, ...]) -> None:
    tensor = huge_pages.empty(shape, torch.bfloat16)
    assert tensor.shape == shape and tensor.dtype is torch.bfloat16 and tensor.is_contiguous()
    tensor.fill_(1.5)
    assert (tensor == 1.5).all()


def test_a_system_without_large_pages_gets_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(HugePages().place(torch.arange(5)), torch.arange(5))
    assert huge_pages.empty((2, 2), torch.float32).shape == (2, 2)
