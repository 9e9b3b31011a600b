"""Tests of engines keep packed weights out of the user's cache, and need the packages of the engines they test."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

# Without the compiled package these files are not collected (tests/conftest.py prints a line about it): building it
# needs a C++ compiler, and everything else must work without one.
collect_ignore_glob = ["test_native*.py"] if find_spec("offramp_native") is None else []


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
