"""Command lines: without the folders of one machine, and key=value values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offramp.errors import OfframpError
from offramp.utils.command_line import command_line, key_values, model_name, model_name_of, python_call, short_path


def test_command_line_leaves_out_the_folders_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["offramp", "eval", "/home/me/runs/a", "--json=/home/me/out/b.json", "--set", "k=1", "~/x/y/z", "c/d"]
    monkeypatch.setattr(sys, "argv", typed)
    assert command_line() == "offramp eval runs/a --json=out/b.json --set k=1 y/z c/d"
    assert command_line("python x.py").startswith("python x.py eval")


def test_python_call_leaves_out_none_and_shortens_paths() -> None:
    call = python_call("evaluate", Path("/home/me/runs/a"), data="d.jsonl", budget=0.5, risk=None)
    assert call == "offramp.evaluate('runs/a', data='d.jsonl', budget=0.5)"


@pytest.mark.parametrize(
    ("source", "name", "stored"),
    [
        ("user/tiny", "tiny", "user/tiny"),
        ("runs/tiny/model", "tiny", "runs/tiny/model"),
        ("/work/tiny/model", "tiny", "tiny"),
        ("/work/tiny", "tiny", "tiny"),
        ("~/model", "model", "model"),
        ("/model", "model", "model"),
        ("model", "model", "model"),
    ],
)
def test_models_are_named_without_the_folders_of_a_machine(source: str, name: str, stored: str) -> None:
    assert (model_name(source), model_name_of(source)) == (name, stored)


def test_short_path_keeps_relative_paths() -> None:
    assert short_path("a/b/c") == "a/b/c" and short_path("/a/b/c") == "b/c"


def test_key_values_splits_at_the_first_equals_sign() -> None:
    assert key_values(["a=1", "b=x=y", "c="], "--set") == {"a": "1", "b": "x=y", "c": ""} and key_values(None, "") == {}


@pytest.mark.parametrize("item", ["a", "=1", ""])
def test_key_values_refuses_items_without_a_key_and_an_equals_sign(item: str) -> None:
    with pytest.raises(OfframpError, match="--set name=value"):
        key_values([item], "--set")
