"""The table of format 1 names: every kind of stored name is mapped, and names of format 2 stay."""

from __future__ import annotations

import torch

from offramp.inference import format1


def test_tensors_are_renamed_by_their_first_part() -> None:
    stored = {name: torch.zeros(1) for name in ("ramps.0.weight", "doubt.bias", "lengths.last", "halt")}
    assert list(format1.tensors(stored)) == ["exit_heads.0.weight", "exit_unit.bias", "lengths.last", "halting_unit"]


def test_description_renames_options_and_task() -> None:
    stored = {"format": 1, "options": {"lexical": True, "pool": "first"}, "task": {"name": "span", "stride": 9}}
    renamed = format1.description(stored)
    assert renamed["format"] == 2
    assert renamed["options"] == {"bag_of_words": True, "pool": "first"}
    assert renamed["task"] == {"name": "question_answering", "stride": 9}


def test_description_leaves_damaged_fields_to_the_check_on_load() -> None:
    assert format1.description({"format": 1, "options": 3, "task": "span"}) == {
        "format": 2,
        "options": 3,
        "task": "span",
    }


def test_recipe_renames_options_and_task() -> None:
    assert format1.recipe({"task": "span", "options": {"ramp0": False}, "seed": 1}) == {
        "task": "question_answering",
        "options": {"exit0": False},
        "seed": 1,
    }


def test_time_model_renames_event_kinds() -> None:
    stored = {"ms": {"doubt": 1.0, "doubt.token": 2.0, "extra": 3.0, "head": 4.0}, "place": {}}
    assert format1.time_model(stored)["ms"] == {
        "exit_unit": 1.0,
        "exit_unit.token": 2.0,
        "predictor": 3.0,
        "head": 4.0,
    }
