"""The schema describes itself: every field has a docstring, and its name says its unit."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from servekit.config import bench, plan, roofline, schema
from servekit.config.describe import Root, allowed_values, nearest, type_words
from servekit.config.roots import bench_root, plan_root, serve_root


def fields_with_docstrings(module: Any) -> list[tuple[str, str, str | None]]:
    """Class, field and docstring of every dataclass field in a module, from its source."""
    found = []
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            for statement, following in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
                if isinstance(statement, ast.AnnAssign):
                    is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                    found.append((node.name, ast.unparse(statement.target),
                                  following.value.value if is_text else None))  # type: ignore[union-attr]
    return found


FIELDS = [field for module in (schema, bench, plan, roofline) for field in fields_with_docstrings(module)]


def test_the_source_was_read() -> None:
    assert ("ModelConfig", "seed", "Seed of the random weights of a `dummy:` source.") in FIELDS


@pytest.mark.parametrize(("owner", "name", "doc"), FIELDS)
def test_every_field_has_a_docstring_and_its_unit_in_its_name(owner: str, name: str, doc: str | None) -> None:
    assert doc and doc.strip().endswith((".", ")")), f"{owner}.{name} needs a docstring of whole sentences"
    assert not name.endswith(("_ms", "_sec", "_secs", "_seconds", "_mb", "_gb")), "units are s and bytes"
    is_duration = "in seconds" in doc.lower() or doc.startswith("Seconds")
    measures_time = name.removesuffix("_s").endswith(("timeout", "interval", "window", "duration"))
    assert not (is_duration or measures_time) or name.endswith("_s"), f"{owner}.{name} is a time: name it {name}_s"


@pytest.mark.parametrize("root", [serve_root(), bench_root(), plan_root()], ids=lambda root: root.name)
def test_every_key_is_described(root: Root[Any]) -> None:
    assert [key.name for key in root.keys.values() if not key.doc] == []


def test_types_in_words() -> None:
    keys = serve_root().keys
    assert type_words(keys["engine.threads"].annotation) == "a whole number or null"
    assert type_words(keys["engine.device"].annotation) == "one of auto, cpu, cuda"
    assert allowed_values(keys["server.dev_endpoints"].annotation) == ("true", "false")
    assert allowed_values(keys["server.port"].annotation) == ()


def test_options_of_some_components_name_them() -> None:
    assert bench_root().keys["workload.num_prefixes"].kinds == ("shared_prefix",)
    assert set(bench_root().keys["workload.length_scale"].kinds) == set(bench.WorkloadKind.__members__)


@pytest.mark.parametrize(("word", "expected"), [
    ("scheduler.max_num_seq", "scheduler.max_num_seqs"), ("max_num_seqs", "scheduler.max_num_seqs"),
    ("server.prot", "server.port"), ("qqq", None)])
def test_nearest(word: str, expected: str | None) -> None:
    assert nearest(word, serve_root().keys) == expected
