"""Cells of a comparison have names of their own, whatever folders their models lie in."""

from __future__ import annotations

from pathlib import Path

import pytest

from offramp.errors import OfframpError
from offramp.evaluation.comparison import ComparisonPlan, DataSet, names_of_models, write_rules
from offramp.evaluation.demo_data import MINILM

WORDS = DataSet("words", "words/train.jsonl", "words/test.jsonl", "classification")


def names(*models: str) -> list[str]:
    cells = ComparisonPlan([WORDS], models, [("full", {})], [42]).cells()
    return [cell.name.removeprefix("words-").removesuffix("-full-s42") for cell in cells]


def test_models_keep_their_names_where_no_other_has_them() -> None:
    assert names("/a/bert", "user/roberta", f"/packages/{MINILM}/model") == ["bert", "roberta", "model"]


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["/a/bert", "/b/bert", "/b/roberta"], ["a-bert", "b-bert", "roberta"]),
        (["/p/a/bert", "/q/a/bert"], ["p-a-bert", "q-a-bert"]),
        (["user/bert", "other/bert"], ["user-bert", "other-bert"]),
        ([f"/packages/{MINILM}/model", "/mine/model"], [MINILM, "mine"]),
        (["/x/bert/model", "/y/bert"], ["bert-model", "y-bert"]),  # results would call both "bert"
    ],
)
def test_models_with_the_same_name_are_named_with_their_folders(models: list[str], expected: list[str]) -> None:
    assert names(*models) == expected


def test_the_same_model_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "link").symlink_to("bert")
    for models in (["user/bert", "user/bert"], [str(tmp_path / "bert"), str(tmp_path / "link")]):
        with pytest.raises(OfframpError, match="twice"):
            names_of_models(models)


def test_cells_of_the_same_name_are_refused() -> None:
    with pytest.raises(OfframpError, match="words-bert-full-s42"):
        ComparisonPlan([WORDS, WORDS], ["bert"], [("full", {})], [42]).cells()


def test_rules_refuse_another_model_under_the_name_of_an_earlier_one(tmp_path: Path) -> None:
    def plan(*models: str) -> ComparisonPlan:
        return ComparisonPlan([WORDS], models, [("full", {})], [42])

    write_rules(plan("/a/bert"), tmp_path)
    write_rules(plan("/a/bert", "/a/roberta"), tmp_path)
    with pytest.raises(OfframpError, match="/a/bert"):
        write_rules(plan("/b/bert"), tmp_path)
    write_rules(plan(f"/packages/{MINILM}/model"), tmp_path)
    write_rules(plan(f"/elsewhere/{MINILM}/model"), tmp_path)  # another environment has it in another place
