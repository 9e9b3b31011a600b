"""The new method that CONTRIBUTING.md shows is written to a file and passes the conformance suite as it stands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offramp import engines, methods
from offramp.inference.predictor import Predictor
from tests import factories
from tests.conformance import checks
from tests.conformance.checks import Case

DOCUMENT = Path(__file__).parents[2] / "CONTRIBUTING.md"
MARK = "<!-- worked example: methods/margin.py -->\n```python\n"
CODE = DOCUMENT.read_text(encoding="utf-8").split(MARK)[1].split("```")[0]
BACKBONES = {"classification": ["bert", "modernbert"], "tagging": ["bert"]}


@pytest.fixture(scope="module", autouse=True)
def margin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Add a folder with the example to those in which methods are found."""
    folder = tmp_path_factory.mktemp("methods")
    (folder / "margin.py").write_text(CODE, encoding="utf-8")
    methods.__path__.append(str(folder))
    yield
    methods.__path__.remove(str(folder))
    sys.modules.pop("offramp.methods.margin", None)
    if hasattr(methods, "margin"):
        delattr(methods, "margin")


def test_example_has_at_most_40_lines() -> None:
    assert len(CODE.splitlines()) <= 40


def test_example_is_found_by_its_file() -> None:
    assert "margin" in methods.names() and "length_adaptive+margin" in methods.pairs()
    checks.check_declaration("margin")


def test_example_measures_one_minus_the_margin() -> None:
    measure = sys.modules[type(methods.get("margin")).__module__].one_minus_margin  # type: ignore[attr-defined]
    logits = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.5, 0.0]]).log()
    assert torch.allclose(measure(logits), torch.tensor([0.5, 1.0]))


@pytest.mark.parametrize("backbone,task", [(b, t) for t, listed in BACKBONES.items() for b in listed])
def test_example_passes_the_conformance_suite(backbone: str, task: str, tmp_path: Path) -> None:
    case = Case("margin", backbone, task)
    assert case in checks.cases_of("margin")
    checks.check_default_settings_give_the_full_model(case)
    checks.check_a_batch_never_changes_an_answer(case)
    checks.check_cost_rises_with_settings(case)
    checks.check_gradients_reach_the_declared_parameters(case, tmp_path)


@pytest.mark.parametrize("engine", [engine for engine in engines.installed() if engine != "torch"])
def test_example_runs_on_every_engine(engine: str) -> None:
    checks.check_engine_decides_like_torch(Case("margin", "bert", "classification"), engine)


def test_example_forms_pairs_with_length_methods(tmp_path: Path) -> None:
    case = Case("length_adaptive+margin", "bert", "classification")
    checks.check_a_batch_never_changes_an_answer(case)
    checks.check_exits_replay_under_dropped_tokens(case)
    checks.check_gradients_reach_the_declared_parameters(case, tmp_path)


def test_example_trains_calibrates_and_answers_within_a_budget(base: str, tmp_path: Path) -> None:
    run = factories.run_folder(base, tmp_path, "margin")
    texts = [row["text"] for row in factories.labelled_rows(count=12, seed=2)]
    predictor = Predictor.load(run)
    fast, full = predictor.predict(texts, budget=0.5), predictor.predict(texts, budget=1.0)
    assert sum(p["macs"] for p in fast) < sum(p["macs"] for p in full)
