"""The kernels compiled for GPUs that are not there: they compile, fit, and spill no register where it counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from servekit.kernels import reference_kernels
from servekit.kernels.triton.resources import Resources
from servekit.kernels.triton.typical import Sizes, typical_calls

_COMPILE = """
import json, sys, torch
from dataclasses import asdict
from servekit.kernels import reference_kernels
from servekit.kernels.triton import Gpu, triton_kernels
from servekit.kernels.triton.resources import compile_for
from servekit.kernels.triton.typical import Sizes, typical_calls
capability = int(sys.argv[1])
kernels = triton_kernels(reference_kernels(), Gpu(132, has_fp8=capability >= 89))
calls = typical_calls(kernels, torch.device("cpu"), Sizes(rows=3, context_tokens=1024))
used = {call.name: compile_for(capability, call.run) for call in calls if call.is_hot}
print(json.dumps({name: [asdict(kernel) for kernel in kernels] for name, kernels in used.items()}))
"""
"""In a process of its own: in this one, Triton interprets."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_no_hot_kernel_spills(capability: int, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _COMPILE, str(capability)], check=False, text=True,
                          capture_output=True, env={"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    used = {name: [Resources(**kernel) for kernel in kernels] for name, kernels in json.loads(done.stdout).items()}
    assert {"decode 128 bf16", "prefill 128 bf16", "decode 128 fp8", "grouped_int4 bf16"} <= used.keys()
    assert ("fp8_dynamic bf16" in used) == (capability >= 89)
    for name, kernels in used.items():
        assert kernels, f"{name} launches nothing"
        for kernel in kernels:
            assert kernel.stack_bytes == 0, f"{name}: {kernel} spills registers"
            assert kernel.programs_per_processor >= 1, f"{name}: {kernel} does not fit"


def test_what_a_call_must_read_and_write() -> None:
    """Of three rows, each of a request with 1,024 tokens of context."""
    calls = typical_calls(reference_kernels(), torch.device("cpu"), Sizes(rows=3, context_tokens=1024))
    found = {call.name: call.num_bytes for call in calls}
    queries_and_result, token = 2 * 3 * 32 * 128 * 2, 2 * 8 * 128  # A token's keys and values, in numbers.
    assert found["silu_and_mul"] == 3 * 3 * 14336 * 2
    assert found["rope_and_cache"] - found["rope_and_cache fp8"] == 3 * token, "one byte less a number"
    assert found["decode 128 bf16"] == queries_and_result + 3 * 1024 * token * 2
    assert found["decode 128 fp8"] == queries_and_result + 3 * 1024 * token
    assert found["decode 128 bf16 window"] == queries_and_result + 3 * 512 * token * 2
    assert found["prefill 128 bf16"] == queries_and_result + 1024 * token * 2
    rows, weights = 2 * 3 * 4096 * 2, 4096 * 4096
    bits = {name: 8 * (found[f"{name} bf16"] - rows) / weights for name in ("int8 grouped", "int4", "grouped_int4",
                                                                            "mxfp4", "nvfp4")}
    assert bits == {"int8 grouped": 9, "int4": 5, "grouped_int4": 4 + 24 / 128, "mxfp4": 4.25, "nvfp4": 4.5}
    assert found["truncate"] == 2 * found["argmax"] == 2 * 3 * 128256 * 4


def test_how_many_programs_fit() -> None:
    def programs(**changed: int) -> int:
        usage = {"capability": 90, "warps": 4, "registers": 32, "stack_bytes": 0, "shared_bytes": 0} | changed
        return Resources("kernel", **usage).programs_per_processor

    assert programs() == 16, "64 warps"
    assert programs(warps=1) == 32, "32 programs"
    assert programs(registers=128) == 4, "65,536 registers"
    assert programs(registers=129) == 3, "registers are given in portions of 8 a thread"
    assert programs(shared_bytes=100 * 1024) == 2, "228 KiB of shared memory"
    assert programs(shared_bytes=228 * 1024) == 0, "of which each program takes one more"
    assert Resources("kernel", 90, 8, 64, 0, 0).occupancy == 0.5
