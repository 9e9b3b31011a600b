"""Every method × backbone, discovered: a file in methods/ or backbones/ is tested because it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from offramp import engines, methods
from tests.conformance import checks
from tests.conformance.checks import Case

CASES = [case for name in methods.names() for case in checks.cases_of(name)]
all_cases = pytest.mark.parametrize("case", CASES, ids=["-".join(case) for case in CASES])


@pytest.mark.parametrize("name", methods.names())
def test_method_declares_its_parts(name: str) -> None:
    checks.check_declaration(name)


@all_cases
def test_default_settings_give_the_full_model(case: Case) -> None:
    checks.check_default_settings_give_the_full_model(case)


@all_cases
def test_a_batch_never_changes_an_answer(case: Case) -> None:
    checks.check_a_batch_never_changes_an_answer(case)


@all_cases
def test_cost_rises_with_settings(case: Case) -> None:
    checks.check_cost_rises_with_settings(case)


@all_cases
def test_gradients_reach_the_declared_parameters(case: Case, tmp_path: Path) -> None:
    checks.check_gradients_reach_the_declared_parameters(case, tmp_path)


# graphs take seconds to compile: every method on one backbone here; every backbone × moment in tests/engines
@pytest.mark.parametrize("engine", [engine for engine in engines.installed() if engine != "torch"])
@pytest.mark.parametrize("name", methods.names())
def test_every_engine_decides_like_torch(name: str, engine: str) -> None:
    case = next(case for case in CASES if case.method == name and case.backbone == "bert")
    checks.check_engine_decides_like_torch(case, engine)
