"""Who may import whom: the folders' promise, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("servekit/**/*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("tuner/**/*.py")])
STANDARD = sys.stdlib_module_names

ONLY_IN = {
    "hydra": ["servekit/config/compose.py", "tuner/grammar.py"],
    "omegaconf": ["servekit/config/compose.py"],
    "fastapi": ["servekit/server/"],
    "uvicorn": ["servekit/server/"],
    "optuna": ["tuner/"],
    "triton": ["kernels/"],
    "torch": ["kernels/", "servekit/model/", "servekit/runner/", "servekit/engine/build.py"],
}


def imports_of(path: Path, *, at_import_time: bool) -> set[str]:
    """Modules that a file imports; `at_import_time` leaves out those inside functions and TYPE_CHECKING."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in _import_time_nodes(tree) if at_import_time else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _import_time_nodes(node: ast.AST) -> list[ast.AST]:
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        found += [child, *_import_time_nodes(child)]
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def files_below(*folders: str) -> list[Path]:
    return [path for path in FILES if any(name_of(path).startswith(folder) for folder in folders)]


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 40 and any("core/scheduler.py" in name_of(path) for path in FILES)


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = [name_of(path) for path in FILES
             if any(module.split(".")[0] == library for module in imports_of(path, at_import_time=False))]
    assert [user for user in users if not any(user.startswith(home) for home in ONLY_IN[library])] == []


def test_the_core_is_pure_python() -> None:
    for path in files_below("servekit/core/"):
        foreign = {module for module in imports_of(path, at_import_time=False)
                   if module.split(".")[0] not in STANDARD
                   and not module.startswith(("servekit.core", "servekit.config"))}
        assert foreign == set(), f"{name_of(path)} imports {foreign}"
        assert not {"time", "socket", "random"} & imports_of(path, at_import_time=False), f"{name_of(path)} has a clock"


def test_kernels_import_torch_alone() -> None:
    for path in files_below("kernels/"):
        foreign = {module for module in imports_of(path, at_import_time=False)
                   if module.split(".")[0] not in STANDARD | {"torch", "triton"}
                   and not module.startswith("servekit.kernels")}
        assert foreign == set(), f"{name_of(path)} imports {foreign}"


def test_the_tuner_knows_the_engine_by_its_client_alone() -> None:
    """Requests and messages are what a client speaks, and the model's files must be there before an engine starts."""
    allowed = ("servekit.tuner", "servekit.config", "servekit.load", "servekit.sim", "servekit.engine.client",
               "servekit.engine.process_client", "servekit.engine.messages", "servekit.core.request",
               "servekit.garbage", "servekit.model.local",
                   "servekit.model.source")
    for path in files_below("tuner/"):
        wrong = {module for module in imports_of(path, at_import_time=False)
                 if module.startswith("servekit") and not module.startswith(allowed)}
        assert wrong <= {"servekit"}, f"{name_of(path)} imports {wrong}"


@pytest.mark.parametrize("folder, forbidden", [
    ("servekit/", ["servekit.tuner"]),
    ("servekit/runner/", ["servekit.core.scheduler", "servekit.engine", "servekit.server"]),
    ("servekit/model/", ["servekit.core", "servekit.engine", "servekit.runner", "servekit.server"]),
    ("servekit/engine/", ["servekit.server", "servekit.load"]),
    ("servekit/load/", ["servekit.core", "servekit.model", "servekit.runner", "servekit.server"]),
    ("servekit/sim/", ["servekit.runner", "servekit.server", "servekit.plan"]),
    ("servekit/plan/", ["servekit.core", "servekit.engine", "servekit.runner", "servekit.server", "servekit.load"]),
    ("servekit/config/", ["servekit.core", "servekit.engine", "servekit.model", "servekit.server", "servekit.load"]),
])
def test_folders_depend_downwards(folder: str, forbidden: list[str]) -> None:
    for path in files_below(folder):
        wrong = {module for module in imports_of(path, at_import_time=False) if module.startswith(tuple(forbidden))}
        assert wrong == set(), f"{name_of(path)} imports {wrong}"


def test_nothing_imports_tests_or_experiments() -> None:
    for path in FILES:
        assert not {module for module in imports_of(path, at_import_time=False)
                    if module.split(".")[0] in {"tests", "experiments"}}, name_of(path)


@pytest.mark.parametrize("module", [
    "servekit", "servekit.cli", "servekit.config.schema", "servekit.core.build", "servekit.engine.process_client",
    "servekit.engine.process", "servekit.load.bench", "servekit.model.tokenizer", "servekit.plan.command",
    "servekit.server.launch", "servekit.sim.step_time",
])
def test_torch_is_not_imported_where_people_wait(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_environment_variable_decides_behaviour_below_the_command_line() -> None:
    readers = {name_of(path) for path in FILES if "os.environ" in path.read_text() or "getenv(" in path.read_text()}
    # The model source only hands the environment on to pip.
    assert readers <= {"servekit/cli.py", "servekit/server/launch.py", "servekit/engine/llm.py",
                       "servekit/load/bench.py", "servekit/model/source.py", "tuner/own_engine.py"}
