"""Session fixtures: a tiny pretrained model on disk, and one trained run that many tests only read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from offramp import engines
from offramp.training.schedule import Schedule
from tests import factories

settings.register_profile("offramp", deadline=None)  # a slow machine is no fault of the code
settings.load_profile("offramp")


def pytest_report_header() -> str | None:
    """Say which engine's tests are missing where a package is not installed."""
    if "native" in engines.installed():
        return None
    return "offramp-native is not installed: tests of the C++ engine are not collected; `make native` builds it"


@pytest.fixture(autouse=True)
def auto_is_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside tests/engines "auto" means torch, as if OpenVINO were missing: tiny models take longer to compile than
    to run. Tests that want the compiled engine name it."""
    if "engines" not in Path(request.node.path).parts:
        monkeypatch.setattr(engines, "find_spec", lambda name: None)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny pretrained BERT with its tokenizer: what a user gives as --model."""
    return str(factories.model_folder(tmp_path_factory.mktemp("base") / "tiny-bert"))


@pytest.fixture(scope="session")
def trained(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished `branchynet` run on classification. Read only; `dev.jsonl` and `train.jsonl` lie beside it."""
    return factories.run_folder(base, tmp_path_factory.mktemp("trained"), "branchynet")


@pytest.fixture(scope="session")
def every_task(base: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run for each kind of rows, with exits wherever they are possible. Read only."""
    methods = {kind: "full" if kind in ("regression", "masked_lm") else "branchynet" for kind in factories.KINDS}
    quick = Schedule(epochs=2, batch_size=8, lr=0.005)
    return {
        kind: factories.run_folder(base, tmp_path_factory.mktemp(kind), method, kind, schedule=quick)
        for kind, method in methods.items()
    }


@pytest.fixture(scope="session")
def translation_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished `depth_adaptive` run on a translation task that it has learned. Read only."""
    return factories.translation_run_folder(tmp_path_factory.mktemp("translation"))
