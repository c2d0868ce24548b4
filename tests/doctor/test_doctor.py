"""`servekit doctor` on this machine, and on machines that are not here."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from servekit.cli import main
from servekit.config.compose import compose_serve
from servekit.config.errors import ConfigError
from servekit.config.schema import Config, Device, KernelSet, Quantization
from servekit.doctor import command, outlook
from servekit.doctor.examination import describe_model, describe_operations
from servekit.doctor.findings import Finding, Section, Status, can_serve
from servekit.doctor.gpus import Gpu, examine_gpus, parse_gpus
from servekit.doctor.machine import Machine, examine_machine, read_cpuinfo
from servekit.doctor.outlook import (
    built_library,
    examine_outlook,
    examine_quantizations,
    find_obstacle,
    find_outlook,
    find_own_operations,
    load_own_operations,
)
from servekit.doctor.packages import examine_packages, requirements
from servekit.doctor.report import write
from servekit.help import Style
from servekit.kernels import Kernels
from servekit.kernels.cpu import instruction_sets
from servekit.kernels.cpu.build import library_path
from servekit.model.shapes import SHAPES
from servekit.runner.device import DeviceFacts

GB = 10**9
HOST = DeviceFacts(Device.cpu, "cpu", cores=6, total_bytes=64 * GB, free_bytes=48 * GB, host_free_bytes=48 * GB)
SMI = "NVIDIA H200, 9.0, 570.86.15, 143771, 1024\n"
H200 = DeviceFacts(Device.cuda, "NVIDIA H200", 16, 141 * GB, 140 * GB, 100 * GB, (9, 0))
A100 = dataclasses.replace(H200, name="NVIDIA A100-SXM4-80GB", total_bytes=80 * GB, free_bytes=79 * GB,
                           compute_capability=(8, 0))
MACHINE = Machine("Linux", "A processor", frozenset({"avx2", "f16c", "fma"}), 8, HOST, (), "/usr/bin/c++",
                  "/usr/bin/gcc", True)
ALL_PRODUCTS = frozenset({"int8", "int8_dynamic", "int4", "grouped_int4", "fp8", "fp8_dynamic", "fp4"})


def configured(*overrides: str) -> Config:
    return compose_serve(["model.source=dummy:llama-3-8b", *overrides]).config


def by_subject(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def on(device: DeviceFacts, *overrides: str, machine: Machine = MACHINE) -> dict[str, Finding]:
    """What the engine for an 8B Llama would be."""
    config = configured(*overrides)
    available = KernelSet.reference if find_obstacle(config, machine, device) else None
    found = find_outlook(config, SHAPES["llama-3-8b"], device, available)
    return by_subject(examine_outlook(found, device, config.memory.block_size_tokens))


def quantizations_on(device: DeviceFacts, own: frozenset[str] | None) -> dict[str, Finding]:
    return by_subject(examine_quantizations(configured(), SHAPES["llama-3-8b"], device, None, own))


# --- the command ------------------------------------------------------------------------------------------------------


def test_this_machine_can_serve(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVEKIT_CACHE", str(tmp_path))
    assert main(["doctor", "model.source=dummy:tiny", "engine.device=cpu"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^  ok +torch +{re.escape(torch.__version__)}$", out, re.MULTILINE)
    assert re.search(r"^  ok +kernels +C\+\+$", out, re.MULTILINE)
    assert re.search(r"^  limited +operations +are not compiled .*\n.*\n? +-> servekit serve$", out, re.MULTILINE)
    assert out.endswith("\nthis machine can serve it\n") and list(tmp_path.iterdir()) == []


def test_what_cannot_be_served_is_status_3(capsys: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "model.source=dummy:tiny", "engine.device=cuda"]) == 3
    out = capsys.readouterr().out
    assert re.search(r"^  missing +engine\.device +cuda: torch finds no CUDA device", out, re.MULTILINE)
    assert "-> set engine.device=cpu" in out and out.endswith("this machine cannot serve it: engine.device\n")


def test_a_configuration_that_does_not_fit_the_memory_is_status_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "model.source=dummy:llama-3-70b", "engine.device=cpu", "memory.memory_fraction=0.01"]) == 3
    assert re.search(r"^  missing +model\.max_model_len +8192: ", capsys.readouterr().out, re.MULTILINE)


def test_a_wrong_setting_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "server.prot=1"]) == 2
    assert "did you mean server.port?" in capsys.readouterr().err


def test_torch_waits_until_it_is_asked_for() -> None:
    program = "import sys, servekit.doctor.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_torch_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open\nshared object file")

    monkeypatch.setattr(command, "import_module", fail)
    _, section = command.examine(configured(), tmp_path)
    assert section.findings[0].text == "cannot be imported: libcudart.so.13: cannot open shared object file"
    assert not can_serve([section])


def test_without_its_packages_nothing_else_is_examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "installed_version", lambda name: None)
    assert [section.title for section in command.examine(configured(), tmp_path)] == ["Python"]


# --- packages ---------------------------------------------------------------------------------------------------------


def test_packages() -> None:
    needed = [Requirement(text) for text in ("torch>=2.11,<2.14", "triton>=3.6", "numpy>=1.26", "uvicorn[standard]>=1")]
    versions = {"torch": "2.15.0+cu130", "numpy": "2.0"}
    found = by_subject(examine_packages(needed, versions.get).findings)
    assert found["torch"].status is Status.missing and found["torch"].remedy == 'pip install "torch<2.14,>=2.11"'
    assert "2.15.0+cu130 is installed" in found["torch"].text
    assert found["triton"].status is Status.limited and found["triton"].text == "is not installed"
    assert found["uvicorn"].remedy == 'pip install "uvicorn[standard]>=1"'
    assert found["other packages"].text.startswith("1 ")


def test_only_what_every_user_needs_is_required() -> None:
    names = {one.name for one in requirements()}
    assert {"torch", "numpy"} <= names and not {"pytest", "matplotlib"} & names


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_a_gpu_as_its_driver_describes_it() -> None:
    gpu, = parse_gpus(SMI)
    assert gpu == Gpu("NVIDIA H200", (9, 0), "570.86.15", 143771 * 2**20, 2**30)
    finding, = examine_gpus((gpu,), "2.13.0+cu130", True, "torch")
    assert finding.status is Status.ok
    assert finding.text == ("NVIDIA H200, compute capability 9.0, 149.68 GB of 150.75 GB free (1.07 GB held by other "
                            "processes and the driver), driver 570.86.15")


def test_an_old_gpu_is_limited() -> None:
    finding, = examine_gpus(tuple(parse_gpus("Tesla V100, 7.0, 550.1, 16384, 0")), "2.13.0", True, "torch")
    assert finding.status is Status.limited and finding.remedy == "set model.dtype=float16"


@pytest.mark.parametrize(("version", "text", "remedy"), [
    ("2.13.0+cpu", "built for processors alone", '--index-url https://pypi.org/simple "torch<2.14,>=2.11"'),
    ("2.13.0+cu130", "driver 570.86.15 is too old", "torch.cuda.init()")])
def test_a_gpu_that_torch_does_not_use(version: str, text: str, remedy: str) -> None:
    _, finding = examine_gpus(tuple(parse_gpus(SMI)), version, False, "torch<2.14,>=2.11")
    assert finding.status is Status.limited and text in finding.text and remedy in (finding.remedy or "")


def test_no_gpu_is_said() -> None:
    finding, = examine_gpus((), "2.13.0", False, "torch")
    assert (finding.status, finding.subject) == (Status.limited, "GPU")


# --- processor --------------------------------------------------------------------------------------------------------


def test_the_processor_and_its_instructions(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    flags = "avx2 f16c fma avx512f avx512bw avx512vl avx512dq avx512_vnni"
    info.write_text(f"processor\t: 0\nmodel name\t: One\nflags\t\t: {flags}\n\nprocessor\t: 1\nmodel name\t: Two\n")
    name, found = read_cpuinfo(info)
    assert name == "One" and found == frozenset(flags.split())
    finding = by_subject(examine_machine(dataclasses.replace(MACHINE, processor=name, flags=found)))["processor"]
    assert finding == Finding(Status.ok, "processor", "One; AVX-512 for vectors of 16 numbers; AVX-512 VNNI for "
                              "products with integers")


def test_a_processor_without_code_for_integers_is_limited() -> None:
    finding = by_subject(examine_machine(dataclasses.replace(MACHINE, flags=frozenset({"asimd"}))))["processor"]
    assert finding.status is Status.limited and "NEON" in finding.text


def test_every_instruction_set_that_the_sources_ask_for_is_known() -> None:
    """Linux writes __AVX512VNNI__ as avx512_vnni; __AVX__ is part of AVX2."""
    sources = Path(instruction_sets.__file__).parent.glob("*.h")
    asked = {name.lower() for source in sources for name in re.findall(r"__(AVX\w+?|F16C|FMA)__", source.read_text())}
    known = {flag.replace("_", "") for one in instruction_sets.USED for flag in one.flags}
    assert asked and asked <= known | {"avx"}


# --- the engine -------------------------------------------------------------------------------------------------------


def test_an_engine_on_a_gpu() -> None:
    found = on(H200)
    assert found["kernels"].text == "Triton" and found["numbers"].text == (
        "weights bfloat16, activations bfloat16, KV cache bfloat16")
    assert found["steps"].text == ("each planned while the one before it runs; CUDA graphs for up to 128 decodes")
    assert found["engine.kernels"].text == "auto -> triton"
    assert "16.06 GB weights" in found["memory"].text
    assert all(finding.status is Status.ok for finding in found.values())


def test_an_engine_on_a_processor() -> None:
    found = on(dataclasses.replace(HOST, total_bytes=200 * GB, free_bytes=200 * GB))
    assert found["kernels"].text == "C++" and found["steps"].text == "one after the other; no CUDA graphs"


def test_a_memory_that_others_hold_is_said() -> None:
    found = on(dataclasses.replace(H200, free_bytes=60 * GB))
    assert "others hold 81.00 GB of 141.00 GB" in found["usable memory"].text


@pytest.mark.parametrize(("device", "lacking", "subject", "remedy"), [
    (HOST, {"cpp_compiler": None}, "C++ compiler", "apt install g++"),
    (H200, {"c_compiler": None}, "C compiler", "apt install gcc"),
    (H200, {"has_python_headers": False}, "Python.h", "apt install python3-dev")])
def test_what_the_fast_operations_lack(device: DeviceFacts, lacking: dict[str, Any], subject: str, remedy: str,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "find_spec", lambda name: object())
    machine = dataclasses.replace(MACHINE, **lacking)
    assert find_obstacle(configured(), MACHINE, device) is None
    obstacle = find_obstacle(configured(), machine, device)
    assert obstacle is not None and (obstacle.status, obstacle.subject) == (Status.limited, subject)
    assert obstacle.remedy == remedy
    fast = "cpu" if device is HOST else "triton"
    wanted = find_obstacle(configured(f"engine.kernels={fast}"), machine, device)
    assert wanted is not None and wanted.status is Status.missing
    assert find_obstacle(configured("engine.kernels=reference"), machine, device) is None
    roomy = dataclasses.replace(device, total_bytes=200 * GB, free_bytes=200 * GB)
    assert on(roomy, machine=machine)["kernels"].status is Status.limited


def test_without_triton_a_gpu_has_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "find_spec", lambda name: None)
    obstacle = find_obstacle(configured(), MACHINE, H200)
    assert obstacle is not None and obstacle.remedy == "pip install triton"


def test_a_refusal_is_that_of_the_engine() -> None:
    with pytest.raises(ConfigError, match=r"model\.max_model_len"):
        find_outlook(configured(), SHAPES["llama-3-70b"], A100, None)


# --- quantisations ----------------------------------------------------------------------------------------------------


def test_a_new_gpu_runs_every_quantisation_by_itself() -> None:
    found = quantizations_on(H200, ALL_PRODUCTS)
    assert list(found) == [one.value for one in Quantization if one.value not in ("auto", "none")]
    assert all(finding.status is Status.ok for finding in found.values())


def test_an_older_gpu_says_what_it_runs_instead() -> None:
    found = quantizations_on(A100, ALL_PRODUCTS)
    assert [name for name, finding in found.items() if finding.status is not Status.ok] == ["fp8_dynamic"]
    assert "multiplies no eight-bit floats (compute capability 8.0" in found["fp8_dynamic"].text
    assert "int8_dynamic" in (found["fp8_dynamic"].remedy or "")


def test_the_reference_saves_no_time() -> None:
    found = quantizations_on(HOST, frozenset({"int8", "int4"}))
    assert {name for name, finding in found.items() if finding.status is Status.ok} == {"int8", "int4"}
    assert all("not built" in finding.text for finding in quantizations_on(HOST, None).values())


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton exists for Linux alone")
def test_operations_of_ones_own_are_those_that_were_replaced() -> None:
    from servekit.kernels.triton import Gpu as Processors
    from servekit.kernels.triton import triton_kernels

    own = find_own_operations(lambda reference: triton_kernels(reference, Processors(132, True)))
    assert own >= ALL_PRODUCTS and "dense" not in own and own < {one.name for one in dataclasses.fields(Kernels)}
    assert find_own_operations(lambda reference: reference) == frozenset()


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton exists for Linux alone")
def test_the_operations_of_an_engine_are_those_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from servekit.kernels import triton

    monkeypatch.setattr(triton, "find_gpu", lambda device: triton.Gpu(132, True))
    resolved = find_outlook(configured(), SHAPES["llama-3-8b"], H200, None).resolved
    assert (load_own_operations(resolved, H200, None) or frozenset()) >= ALL_PRODUCTS
    on_processor = dataclasses.replace(resolved, kernels=KernelSet.cpu)
    assert load_own_operations(on_processor, HOST, None) is None, "they are not built"
    assert load_own_operations(dataclasses.replace(resolved, kernels=KernelSet.reference), HOST, None) == frozenset()


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_model_that_is_still_to_be_fetched() -> None:
    finding = describe_model(compose_serve().config, None)
    assert finding.status is Status.limited and finding.remedy == "servekit serve"


def test_operations_are_found_once_they_are_built(tmp_path: Path) -> None:
    compiler = MACHINE.cpp_compiler
    assert compiler is not None and built_library(MACHINE, tmp_path) is None
    assert describe_operations(KernelSet.cpu, None)[0].status is Status.limited
    library = library_path(compiler, tmp_path / "kernels")
    library.parent.mkdir()
    library.touch()
    assert built_library(MACHINE, tmp_path) == library
    assert describe_operations(KernelSet.cpu, library) == (Finding(Status.ok, "operations", str(library)),)
    assert built_library(dataclasses.replace(MACHINE, cpp_compiler=None), tmp_path) is None


# --- the text ---------------------------------------------------------------------------------------------------------


def test_a_remedy_stands_below_what_it_is_for() -> None:
    sections = [Section("machine", (Finding(Status.ok, "cores", "2 of 8"),
                                    Finding(Status.missing, "compiler", "a " * 40 + "end", "apt install g++")))]
    assert write(sections, Style(60)).splitlines() == [
        "machine",
        "  ok       cores     2 of 8",
        "  missing  compiler  a a a a a a a a a a a a a a a a a a a a",
        "                     a a a a a a a a a a a a a a a a a a a a",
        "                     end",
        "                     -> apt install g++",
        "",
        "this machine cannot serve it: compiler"]
