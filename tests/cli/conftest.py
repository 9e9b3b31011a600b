"""Fixtures of command tests: commands run as the console script runs them, in a folder of their own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from offramp import cli
from tests.cli.calls import Call, CommandResult

LIBRARY_OUTPUT = ["Traceback", "Loading weights", "Writing model shards", "Warning:", "it/s]"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """A function that runs `offramp WORDS` in an empty folder; libraries may print nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> CommandResult:
        capsys.readouterr()
        arguments = [str(word) for word in words]
        monkeypatch.setattr(sys, "argv", ["offramp", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        assert not [noise for noise in LIBRARY_OUTPUT if noise in printed.out + printed.err], printed
        return CommandResult(int(stop.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture
def own(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "own"))
