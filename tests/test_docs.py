"""What the documents say of files, settings and commands is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from servekit.config.compose import compose_bench, compose_serve
from servekit.config.resolve import flatten

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("experiments/*/README.md")]


def code_of(document: Path) -> list[str]:
    """Everything in backticks, and every indented or fenced line."""
    text = document.read_text()
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    return [*re.findall(r"`([^`\n]+)`", text), *(line for block in fenced for line in block.splitlines()),
            *(line[4:] for line in text.splitlines() if line.startswith("    "))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_exist(document: Path) -> None:
    words = {word for code in code_of(document) for word in re.findall(r"(?<![\w./:-])[\w.-]+/[\w./-]*", code)}
    folders = {"conf", "servekit", "kernels", "tests", "experiments", ".ci", "docs"}
    paths = {word for word in words if word.split("/")[0] in folders and "NAME" not in word}
    missing = {path for path in paths if not (ROOT / path.rstrip("/.")).exists()}
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_compose(document: Path) -> None:
    """Every `servekit serve|config|bench ...` line is a configuration that can be composed."""
    for line in code_of(document):
        found = re.match(r"(?:\.venv/bin/)?servekit (\w+) ?([^#|]*)", line.strip())
        if not found or "..." in line or "…" in line or "NAME" in line:
            continue
        command, words = found[1], found[2].split()
        assert command in {"serve", "bench", "config", "completion", "help"}, line
        overrides = [word for word in words if "=" in word]
        if command in {"serve", "config"}:
            compose_serve(overrides)
        elif command == "bench":
            compose_bench(overrides)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_exist(document: Path) -> None:
    known = {*flatten(compose_serve().config), *flatten(compose_bench().config)}
    sections = {key.rsplit(".", 1)[0] for key in known} | {key.split(".")[0] for key in known if "." in key}
    heads = {"scheduler", "server", "engine", "memory", "model", "arrival", "slo"}
    for code in code_of(document):
        for key in re.findall(r"(?<![\w./-])([a-z]+(?:\.[a-z_0-9]+)+)(?=[=\s`,;]|$)", code):
            if key.split(".")[0] in heads and not key.endswith((".py", ".yaml", ".md")):
                assert key in known | sections, f"{document.name}: {key}"
