"""Budgets: every way to state one gives the same value, and wrong ones are refused with one error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from offramp.errors import OfframpError
from offramp.inference.budget import DEFAULT_LOSS, Budget, parse_latency


@pytest.mark.parametrize(
    ("arguments", "budget"),
    [
        ({}, Budget.default()),
        ({"budget": 0.5}, Budget.share(0.5)),
        ({"budget": 1}, Budget.share(1.0)),
        ({"budget": np.float32(0.5)}, Budget.share(0.5)),
        ({"budget": Budget.risk(0.02)}, Budget.risk(0.02)),
        ({"max_loss": 0.01}, Budget.loss(0.01)),
        ({"max_loss": 0}, Budget.loss(0.0)),
        ({"max_disagreement": 0.01}, Budget.disagreement(0.01)),
        ({"risk": 0.02}, Budget.risk(0.02)),
        ({"latency": 0.005}, Budget.latency("5ms")),
    ],
)
def test_parse_takes_one_argument_of_any_kind(arguments: dict[str, Any], budget: Budget) -> None:
    assert Budget.parse(**arguments) == budget


def test_default_budget_allows_half_a_point() -> None:
    assert Budget.default().value == DEFAULT_LOSS == 0.005


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("0.5", Budget.share(0.5)),
        ("default", Budget.default()),
        ("max-loss=0.01", Budget.loss(0.01)),
        ("max-disagreement=0.01", Budget.disagreement(0.01)),
        ("risk=0.01", Budget.risk(0.01)),
        ("latency=5ms", Budget.latency(0.005)),
    ],
)
def test_from_text_reads_what_users_write(text: str, budget: Budget) -> None:
    assert Budget.from_text(text) == budget


@pytest.mark.parametrize("text", ["", "half", "max-loss=little", "max-loss", "cost=3", "latency=5", "0", "1.5", "=0.5"])
def test_from_text_refuses_anything_else(text: str) -> None:
    with pytest.raises(OfframpError):
        Budget.from_text(text)


def test_parse_refuses_two_budgets_and_names_both() -> None:
    with pytest.raises(OfframpError, match=r"budget=0\.5 and latency=5ms"):
        Budget.parse(0.5, latency="5ms")


@pytest.mark.parametrize("name", ["budget", "max_loss", "max_disagreement", "risk", "latency"])
@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf"), "much", [0.5], {}, True, 1j, object()])
def test_parse_refuses_wrong_types_and_values_and_names_them(name: str, value: Any) -> None:
    with pytest.raises(OfframpError) as caught:
        Budget.parse(**{name: value})
    assert caught.value.given == f"{name}={value!r}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("budget", 0.0), ("budget", 1.0001), ("max_loss", 1.5), ("risk", 0.0), ("risk", 1.0), ("latency", 0.0)],
)
def test_parse_refuses_values_at_the_border(name: str, value: float) -> None:
    with pytest.raises(OfframpError, match=f"{name}="):
        Budget.parse(**{name: value})


@pytest.mark.parametrize(("text", "seconds"), [("5ms", 0.005), (" 0.2 s", 0.2), ("800us", 0.0008), (".5ms", 0.0005)])
def test_parse_latency_reads_units(text: str, seconds: float) -> None:
    assert parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "5 minutes", "ms", "-5ms", "0ms", "1e3ms", "nan ms"])
def test_parse_latency_refuses_anything_else(text: str) -> None:
    with pytest.raises(OfframpError, match=r"5ms, 0\.2s or 800us"):
        parse_latency(text)


@pytest.mark.parametrize(
    ("budget", "text"), [(Budget.share(0.5), "budget=0.5"), (Budget.latency("5ms"), "latency=5ms")]
)
def test_budget_is_shown_as_users_write_it(budget: Budget, text: str) -> None:
    assert str(budget) == text
