"""What every Triton kernel takes of a GPU. Usage: python run.py [out=result.json] [capabilities=80,90,100]

Compiled for GPUs that need not be there; a quarter of an hour for each capability. What is compiled stays in Triton's
cache, so that a run that was interrupted goes on where it was. Exit status 1 if a kernel that every layer runs spills
registers in its first configuration.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
    num_bytes: int
    """What the call must at least read and write."""
    is_hot: bool
    """Whether every layer of a step runs it, in the usual formats."""
    capability: int
    config: str
    is_first: bool
    """Whether it serves where nothing can be timed."""
    kernels: tuple[Resources, ...]

    @property
    def tightest(self) -> Resources:
        """The kernel of which the fewest warps fit on a processor."""
        return min(self.kernels, key=lambda kernel: kernel.occupancy)

    @property
    def spills(self) -> bool:
        return any(kernel.stack_bytes for kernel in self.kernels)


def main() -> int:
    options = dict(word.split("=", 1) for word in sys.argv[1:])
    capabilities = map(int, options.get("capabilities", "80,90,100").split(","))
    findings = []
    for capability in capabilities:
        kernels = triton_kernels(reference_kernels(), Gpu(PROCESSORS[capability], capability >= FIRST_WITH_FP8))
        for call in typical_calls(kernels, torch.device("cpu"), SIZES):
            found = list(examine(call, capability))
            findings += found
            print(f"sm_{capability} {call.name}: {describe(found)}", flush=True)
    records = ",\n".join(json.dumps(as_record(finding)) for finding in findings)
    Path(options.get("out", "result.json")).write_text(f"[\n{records}\n]\n")
    print("\n".join(table(findings)))
    spilling = [finding for finding in findings if finding.is_first and finding.spills]
    for finding in spilling:
        print(f"spills in its first configuration: sm_{finding.capability} {finding.call}")
    return 1 if any(finding.is_hot for finding in spilling) else 0


def examine(call: TypicalCall, capability: int) -> Iterator[Finding]:
    """A hot call in its kernel's configurations, another in the first or only one."""
    word = call.name.split()[0]
    tuned = TUNED.get(word) or TUNED.get(word.split("_")[0])
    configs = tuned.configs[:None if call.is_hot else 1] if tuned is not None else [None]
    for index, config in enumerate(configs):
        with nullcontext() if tuned is None or config is None else only(tuned, config):
            kernels = tuple(compile_for(capability, call.run))
        yield Finding(call.name, call.num_bytes, call.is_hot, capability, describe_config(config), index == 0, kernels)


def describe_config(config: triton.Config | None) -> str:
    """Tile sizes, warps, stages; empty for a kernel that has one configuration."""
    return ", ".join(f"{name}: {value}" for name, value in config.all_kwargs().items()) if config is not None else ""


@contextmanager
def only(tuned: Tuned, config: triton.Config) -> Iterator[None]:
    """Lets the kernel have this configuration alone."""
    configs, tuned.configs = tuned.configs, (config,)
    try:
        yield
    finally:
        tuned.configs = configs


def describe(found: list[Finding]) -> str:
    first, spilling = found[0].tightest, sum(finding.spills for finding in found)
    return (f"{found[0].num_bytes:,} B, {first.registers} registers, {first.shared_bytes} B shared, occupancy "
            f"{first.occupancy:.2f}; {spilling} of {len(found)} configurations spill")


def table(findings: list[Finding]) -> Iterator[str]:
    """The hot calls: bytes, and for each capability registers, occupancy and how many configurations spill."""
    capabilities = sorted({finding.capability for finding in findings})
    yield f"| call | bytes | {' | '.join(f'sm_{capability}' for capability in capabilities)} |"
    yield "| --- | --: |" + " --- |" * len(capabilities)
    for name, num_bytes in {finding.call: finding.num_bytes for finding in findings if finding.is_hot}.items():
        cells = [cell([finding for finding in findings if (finding.call, finding.capability) == (name, capability)])
                 for capability in capabilities]
        yield f"| {name} | {num_bytes:,} | {' | '.join(cells)} |"


def cell(found: list[Finding]) -> str:
    if not found:
        return "–"
    first, spilling = found[0].tightest, sum(finding.spills for finding in found)
    return f"{first.registers} registers, {100 * first.occupancy:.0f} %" + (
        f"; {spilling} of {len(found)} spill" if spilling else "")


def as_record(finding: Finding) -> dict[str, object]:
    kernels = [asdict(kernel) | {"occupancy": kernel.occupancy} for kernel in finding.kernels]
    return asdict(finding) | {"kernels": kernels}


if __name__ == "__main__":
    sys.exit(main())
