"""Compiles the C++ operations, once for each version of the sources, the compiler, torch and the processor."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

_SOURCES = Path(__file__).parent
_MAIN = "library.cpp"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-fPIC", "-shared")


class NoCompilerError(RuntimeError):
    """There is no C++ compiler on this machine."""


class CompilationError(RuntimeError):
    """The compiler refused the sources; the message ends with what it said first."""


def build_library(cache_dir: Path, on_compile: Callable[[], None]) -> Path:
    """The compiled operations, from `cache_dir` or newly made there.

    Two processes that compile at once do so each for itself; the last one's file stays, complete either way.
    """
    compiler = find_compiler()
    library = library_path(compiler, cache_dir)
    if not library.exists():
        on_compile()
        cache_dir.mkdir(parents=True, exist_ok=True)
        _compile(compiler, library)
    return library


def library_path(compiler: str, cache_dir: Path) -> Path:
    """Where the operations are kept that this compiler makes for this machine, whether they are there or not."""
    return cache_dir / f"cpu-operations-{_fingerprint(compiler)}.so"


def find_compiler() -> str:
    """Path of the first C++ compiler there is. Raises NoCompilerError."""
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        raise NoCompilerError(f"no C++ compiler ({', '.join(_COMPILERS)}) on the PATH; install one, for example with "
                              "`apt install g++`")
    return found


def _fingerprint(compiler: str) -> str:
    """Changes with anything that the compiled code depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\0".join([version, torch.__version__, platform.machine(), _processor(), *_FLAGS]).encode())
    for source in sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The processor's instruction sets, as Linux lists them; elsewhere its name."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, library: Path) -> None:
    torch_dir = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *_FLAGS, f"-I{torch_dir / 'include'}", str(_SOURCES / _MAIN), "-o", str(made),
                   f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise CompilationError(f"{compiler} cannot compile {_MAIN}: {errors[0] if errors else 'no message'}")
        made.replace(library)
