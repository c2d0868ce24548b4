"""Compiling once, again when something changed, and saying what is wrong; with compilers made for the purpose."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from servekit.kernels.cpu import build
from servekit.kernels.cpu.build import CompilationError, NoCompilerError, build_library, find_compiler

_COMPILER = """\
#!{python}
# Writes the sources that it was given into its output, and a line into `{log}`.
import pathlib, sys, time
if "--version" in sys.argv:
    print("{version}")
    sys.exit()
with open("{log}", "a") as log:
    log.write("compiled\\n")
deadline = time.monotonic() + 60
while len(open("{log}").readlines()) < {compilers} and time.monotonic() < deadline:
    time.sleep(0.01)
source = next(word for word in sys.argv if word.endswith(".cpp"))
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text(pathlib.Path(source).read_text() + "{version}")
print({message!r}, file=sys.stderr)
sys.exit({status})
"""


@dataclass
class Workshop:
    """A PATH with one compiler on it, sources, and a cache."""

    tools: Path
    sources: Path
    cache: Path
    log: Path

    def install_compiler(self, name: str = "c++", *, status: int = 0, message: str = "", version: str = "c++ 1.0",
                         compilers: int = 1) -> None:
        """One that ends with `status`; `compilers`: how many have to have begun before it goes on."""
        path = self.tools / name
        path.write_text(_COMPILER.format(python=sys.executable, log=self.log, version=version, compilers=compilers,
                                         message=message, status=status))
        path.chmod(0o755)

    @property
    def num_compilations(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    @property
    def cached(self) -> list[str]:
        return sorted(path.name for path in self.cache.rglob("*")) if self.cache.exists() else []


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    made = Workshop(*(tmp_path / name for name in ("tools", "sources", "cache", "log")))
    made.tools.mkdir()
    made.sources.mkdir()
    for source in [*build._SOURCES.glob("*.h"), *build._SOURCES.glob("*.cpp")]:
        (made.sources / source.name).write_bytes(source.read_bytes())
    monkeypatch.setenv("PATH", str(made.tools))
    monkeypatch.setattr(build, "_SOURCES", made.sources)
    return made


def nothing() -> None:
    """Nobody waits."""


def test_no_compiler_is_said_with_the_remedy(workshop: Workshop) -> None:
    with pytest.raises(NoCompilerError, match=r"no C\+\+ compiler .* on the PATH; install one, .*apt install g\+\+"):
        build_library(workshop.cache, nothing)
    assert workshop.cached == []


@pytest.mark.parametrize("name", ["c++", "g++", "clang++"])
def test_any_usual_compiler_is_found(name: str, workshop: Workshop) -> None:
    workshop.install_compiler(name)
    assert find_compiler() == str(workshop.tools / name)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(workshop: Workshop) -> None:
    workshop.install_compiler(status=1, message="In file included\nlibrary.cpp:7:1: error: no such thing\nmore")
    with pytest.raises(CompilationError) as caught:
        build_library(workshop.cache, nothing)
    assert str(caught.value).endswith("c++ cannot compile library.cpp: library.cpp:7:1: error: no such thing")
    assert "\n" not in str(caught.value) and workshop.cached == []
    workshop.install_compiler(status=0)
    assert build_library(workshop.cache, nothing).exists()


@pytest.mark.parametrize("message, said", [("collect2: ld returned 1", "collect2: ld returned 1"), ("", "")])
def test_a_compiler_that_fails_without_an_error_line_is_quoted_too(message: str, said: str,
                                                                   workshop: Workshop) -> None:
    workshop.install_compiler(status=3, message=message)
    with pytest.raises(CompilationError, match=f"cannot compile library.cpp: {said}"):
        build_library(workshop.cache, nothing)


def test_the_second_call_does_not_compile(workshop: Workshop) -> None:
    workshop.install_compiler()
    announced: list[str] = []
    first = build_library(workshop.cache, lambda: announced.append("once"))
    assert build_library(workshop.cache, lambda: announced.append("twice")) == first
    assert workshop.num_compilations == 1 and announced == ["once"]
    assert workshop.cached == [first.name]


def _change_header(workshop: Workshop) -> None:
    header = next(workshop.sources.glob("*.h"))
    header.write_text(header.read_text() + "\n")


def _add_header(workshop: Workshop) -> None:
    (workshop.sources / "new.h").write_text("// new\n")


def _change_main(workshop: Workshop) -> None:
    main = workshop.sources / "library.cpp"
    main.write_text(main.read_text() + "\n")


def _update_compiler(workshop: Workshop) -> None:
    workshop.install_compiler(version="c++ 1.1")


@pytest.mark.parametrize("change", [_change_header, _add_header, _change_main, _update_compiler])
def test_what_the_code_depends_on_compiles_anew_when_it_changes(change: Callable[[Workshop], None],
                                                                workshop: Workshop) -> None:
    workshop.install_compiler()
    before = build_library(workshop.cache, nothing)
    change(workshop)
    after = build_library(workshop.cache, nothing)
    assert after != before and workshop.num_compilations == 2
    assert before.exists() and after.exists()


@pytest.mark.parametrize("fact", ["_FLAGS", "_processor"])
def test_other_flags_or_another_processor_compile_anew(fact: str, workshop: Workshop,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.install_compiler()
    before = build_library(workshop.cache, nothing)
    monkeypatch.setattr(build, fact, ("-O0",) if fact == "_FLAGS" else lambda: "flags: fewer")
    assert build_library(workshop.cache, nothing) != before


def test_two_processes_that_compile_at_once_both_get_a_complete_library(workshop: Workshop) -> None:
    workshop.install_compiler(compilers=2)
    code = ("import sys; from pathlib import Path; from servekit.kernels.cpu.build import build_library; "
            "print(build_library(Path(sys.argv[1]), lambda: None).read_text()[-40:].strip())")
    processes = [subprocess.Popen([sys.executable, "-c", code, str(workshop.cache)], stdout=subprocess.PIPE, text=True)
                 for _ in range(2)]
    assert all(process.communicate()[0].endswith("c++ 1.0\n") for process in processes)
    assert workshop.num_compilations == 2, "each for itself"
    assert len(workshop.cached) == 1 and all(process.returncode == 0 for process in processes)
