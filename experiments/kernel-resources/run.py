"""What every Triton kernel takes of a GPU, in every configuration. Usage: python run.py [out=result.json]

Compiled for GPUs that need not be there; a quarter of an hour. Exit status 1 if a first configuration spills registers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

from servekit.kernels import reference_kernels
from servekit.kernels.triton import (
    Gpu,
    attention_decode,
    attention_prefill,
    eight_bit_linear,
    fp4_linear,
    int4_linear,
    triton_kernels,
)
from servekit.kernels.triton.launch import Tuned
from servekit.kernels.triton.resources import Resources, compile_for
from servekit.kernels.triton.typical import Sizes, TypicalCall, typical_calls

PROCESSORS = {80: 108, 90: 132, 100: 148}
FIRST_WITH_FP8 = 89
SIZES = Sizes(rows=3, context_tokens=1024)
TUNED = {"decode": attention_decode._PARTS, "prefill": attention_prefill._TILES, "int8": eight_bit_linear._PRODUCT,
         "fp8": eight_bit_linear._PRODUCT, "int4": int4_linear._PRODUCT, "grouped_int4": int4_linear._PRODUCT,
         "mxfp4": fp4_linear._PRODUCT, "nvfp4": fp4_linear._PRODUCT}
"""By the first word of a call's name, up to an underscore where the whole word is not here."""


@dataclass(frozen=True)
class Finding:
    """One call's kernels in one configuration."""

    call: str
    capability: int
    config: str
    is_first: bool
    """Whether it serves where nothing can be timed."""
    kernels: tuple[Resources, ...]

    @property
    def spills(self) -> bool:
        return any(kernel.stack_bytes for kernel in self.kernels)


def main() -> int:
    out = Path(dict(word.split("=", 1) for word in sys.argv[1:]).get("out", "result.json"))
    findings = []
    for capability, processors in PROCESSORS.items():
        kernels = triton_kernels(reference_kernels(), Gpu(processors, capability >= FIRST_WITH_FP8))
        for call in typical_calls(kernels, torch.device("cpu"), SIZES):
            found = list(examine(call, capability))
            findings += found
            print(f"sm_{capability} {call.name}: {describe(found)}", flush=True)
    out.write_text(json.dumps([as_record(finding) for finding in findings], indent=1) + "\n")
    wrong = [finding for finding in findings if finding.is_first and finding.spills]
    for finding in wrong:
        print(f"spills: sm_{finding.capability} {finding.call}")
    return 1 if wrong else 0


def examine(call: TypicalCall, capability: int) -> Iterator[Finding]:
    """The call in its kernel's configurations, or in the only one it has."""
    word = call.name.split()[0]
    tuned = TUNED.get(word) or TUNED.get(word.split("_")[0])
    if tuned is None:
        yield Finding(call.name, capability, "", True, tuple(compile_for(capability, call.run)))
        return
    for config in tuned.configs:
        is_first = config is tuned.configs[0]
        with only(tuned, config):
            kernels = tuple(compile_for(capability, call.run))
        yield Finding(call.name, capability, str(config), is_first, kernels)


@contextmanager
def only(tuned: Tuned, config: triton.Config) -> Iterator[None]:
    """Lets the kernel have this configuration alone."""
    configs, tuned.configs = tuned.configs, (config,)
    try:
        yield
    finally:
        tuned.configs = configs


def describe(found: list[Finding]) -> str:
    first, spilling = found[0].kernels[0], sum(finding.spills for finding in found)
    return (f"{first.registers} registers, {first.shared_bytes} B shared, occupancy {first.occupancy:.2f}; "
            f"{spilling} of {len(found)} configurations spill")


def as_record(finding: Finding) -> dict[str, object]:
    kernels = [asdict(kernel) | {"occupancy": kernel.occupancy} for kernel in finding.kernels]
    return asdict(finding) | {"kernels": kernels}


if __name__ == "__main__":
    sys.exit(main())
