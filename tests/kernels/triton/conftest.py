"""Triton exists for Linux alone: elsewhere there is nothing to test here."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
