"""How a plan writes its numbers."""

from __future__ import annotations


def figure(number: float) -> str:
    """Four digits, or all that stand before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def gigabytes(num_bytes: float) -> str:
    """With its unit."""
    return f"{num_bytes / 1e9:,.1f} GB"


def milliseconds(seconds: float, digits: int = 1) -> str:
    """Without its unit."""
    return f"{seconds * 1e3:,.{digits}f}"


def count(number: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
