"""Runs whose lengths can be searched, without and with exits, each trained once for all files of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from offramp.calibration import calibrate
from offramp.calibration import length_search as search
from offramp.training.schedule import Schedule
from tests import factories

QUICK = Schedule(epochs=1, batch_size=24, lr=0.005, later_lr=0.005)  # one rate: few steps must suffice


@pytest.fixture(scope="session")
def run(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished `length_adaptive` run. Read only."""
    return factories.run_folder(base, tmp_path_factory.mktemp("run"), "length_adaptive", schedule=QUICK)


@pytest.fixture(scope="session")
def pair(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with exits. Read only."""
    return factories.run_folder(base, tmp_path_factory.mktemp("pair"), "length_adaptive+branchynet", schedule=QUICK)


@pytest.fixture(params=["run", "pair"])
def run_or_pair(request: pytest.FixtureRequest) -> Path:
    """The run, then the pair. Read only."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.fixture
def small_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first population small and the settings of exits few."""
    monkeypatch.setattr(search, "FIRST_POPULATION", 4)
    monkeypatch.setattr(calibrate, "PAIR_POINTS", 6)
