"""Instruction sets of processors that the C++ operations have code of their own for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InstructionSet:
    """Some instructions, and what they are used for."""

    name: str
    flags: frozenset[str]
    """As Linux lists them in /proc/cpuinfo."""
    use: str


AVX2 = InstructionSet("AVX2", frozenset({"avx2", "f16c", "fma"}), "products with integers")
AVX512 = InstructionSet("AVX-512", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}), "vectors of 16 numbers")
VNNI = InstructionSet("AVX-512 VNNI", AVX512.flags | {"avx512_vnni"}, "products with integers")
BF16 = InstructionSet("AVX-512 BF16", frozenset({"avx512f", "avx512_bf16"}), "attention over a bfloat16 KV cache")
NEON = InstructionSet("NEON", frozenset({"asimd"}), "vectors of 4 numbers")

USED = (VNNI, AVX2, AVX512, BF16, NEON)
"""Of two for the same use, the better one first."""
FOR_INTEGERS = (VNNI, AVX2)
"""Without one of these, products with integers are plain C++, which is several times slower."""


def best_present(flags: frozenset[str]) -> tuple[InstructionSet, ...]:
    """What of `USED` a processor with these flags has: one for each use."""
    return tuple({one.use: one for one in reversed(USED) if one.flags <= flags}.values())
