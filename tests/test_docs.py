"""What the documents say of files, settings and commands is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from servekit.config.compose import compose, compose_bench, compose_plan, compose_serve
from servekit.config.roots import ROOTS
from servekit.tuner.settings import find_file, read_settings

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("experiments/*/README.md")]


def code_of(document: Path) -> list[str]:
    """Everything in backticks, and every indented or fenced line; lines that go on after a backslash as one."""
    text = document.read_text().replace("\\\n", " ")
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    return [*re.findall(r"`([^`\n]+)`", text), *(line for block in fenced for line in block.splitlines()),
            *(line[4:] for line in text.splitlines() if line.startswith("    "))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_exist(document: Path) -> None:
    words = {word for code in code_of(document) for word in re.findall(r"(?<![\w./:-])[\w.-]+/[\w./-]*", code)}
    folders = {"conf", "servekit", "kernels", "tuner", "tests", "experiments", ".ci", "docs"}
    paths = {word for word in words if word.split("/")[0] in folders and "NAME" not in word}
    missing = {path for path in paths if not (ROOT / path.rstrip("/.")).exists()}
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_compose(document: Path) -> None:
    """Every `servekit serve|config|bench|simulate|plan ...` line is a configuration that can be composed."""
    for line in code_of(document):
        found = re.match(r"(?:\.venv/bin/)?servekit (\w+) ?([^#|]*)", line.strip())
        if not found or "..." in line or "…" in line or "NAME" in line:
            continue
        command, words = found[1], shlex.split(found[2], comments=True)
        assert command in {"serve", "bench", "tune", "verify", "simulate", "plan", "config", "doctor", "completion",
                           "help"}, line
        overrides = [word for word in words if "=" in word]
        if command in {"serve", "config", "doctor"}:
            compose_serve(overrides)
        elif command == "bench":
            compose_bench(overrides)
        elif command == "simulate":
            compose(ROOTS["simulate"](), overrides)
        elif command == "plan" and overrides:
            compose_plan(overrides)
        elif command == "tune" and not words[0].startswith("--"):
            read_settings(find_file(words[0]), words[1:])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_exist(document: Path) -> None:
    roots = [make() for make in ROOTS.values()]
    sections = {section for root in roots for section in root.sections}
    heads = {"scheduler", "server", "engine", "memory", "model", "arrival", "slo", "claim", "efficiency"}
    for code in code_of(document):
        for key in re.findall(r"(?<![\w./-])([a-z]+(?:\.[a-z_0-9]+)+)(?=[=\s`,;]|$)", code):
            if key.split(".")[0] in heads and not key.endswith((".py", ".yaml", ".md")):
                assert key in sections or any(root.find(key) for root in roots), f"{document.name}: {key}"
