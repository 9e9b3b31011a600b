"""`auto`: a method for every task, chosen from the rows alone, with options that the method has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import offramp
from offramp import methods, tasks
from offramp.methods import choose_method
from offramp.methods._auto import mean_words
from tests import factories

SHORT = [{"text": "a fine film", "label": 0}, {"text": "not good", "label": 1}]
LONG = [{"text": "word " * 240, "label": number % 2} for number in range(4)]
PAIRS = [{"text_a": "it rains", "text_b": "rain falls", "label": number % 2} for number in range(4)]


def chosen(rows: list[dict[str, Any]], **more: Any) -> str:
    return choose_method(tasks.get("classification").from_rows(rows, "rows"), rows, **more).method


def test_classification_goes_by_length_and_number_of_texts() -> None:
    assert chosen(SHORT) == "fastbert"
    assert chosen(PAIRS) == "deebert"
    assert chosen(LONG) == "fastbert"
    assert chosen(LONG, labelled=False) == "fastbert"  # its exits learn without labels


def test_bags_of_words_are_fitted_for_long_rows() -> None:
    def fitted(rows: list[dict[str, Any]], **more: Any) -> bool:
        task = tasks.get("classification").from_rows(rows, "rows")
        return choose_method(task, rows, **more).options.get("bag_of_words_training") == "fitted"

    assert fitted(LONG) and not fitted(SHORT) and not fitted(PAIRS)
    assert not fitted(LONG, max_length=64)  # rows are cut before they are long
    assert not fitted(LONG, labelled=False)  # there is nothing to fit them to


def test_words_are_counted_in_all_texts_of_a_row() -> None:
    assert mean_words(tasks.get("classification").from_rows(PAIRS, "rows"), PAIRS) == 4.0
    tagged = factories.labelled_rows("tagging", 4)
    task = tasks.get("tagging").from_rows(tagged, "rows")
    assert mean_words(task, tagged) == sum(len(row["tokens"]) for row in tagged) / 4


@pytest.mark.parametrize("name", tasks.names())
def test_every_task_gets_a_method_that_serves_it(name: str) -> None:
    special = {"translation": factories.translation_rows(4), "multi_label": [{"text": "a", "labels": ["x"]}] * 2}
    rows = special.get(name) or factories.labelled_rows(name, 4)
    task = tasks.get(name).from_rows(rows, "rows")
    found = choose_method(task, rows)
    method = methods.get(found.method)
    assert method.serves(task) and found.reason
    methods.configure(method.options, dict(found.options), method.name)  # refuses options that it lacks


@pytest.mark.parametrize("rows", [LONG, PAIRS, SHORT], ids=["long", "pairs", "short"])
def test_options_exist(rows: list[dict[str, Any]]) -> None:
    found = choose_method(tasks.get("classification").from_rows(rows, "rows"), rows)
    method = methods.get(found.method)
    options = methods.configure(method.options, dict(found.options), method.name)
    assert options.bag_of_words_depth == 3


def test_training_chooses_by_default_and_the_folder_names_the_choice(base: str, tmp_path: Path) -> None:
    train = factories.write_jsonl(tmp_path / "train.jsonl", factories.labelled_rows("classification", 24))
    given: dict[str, Any] = {"epochs": 1, "batch_size": 8, "options": {"bag_of_words_depth": 1}}
    news: list[dict[str, Any]] = []
    offramp.train(model=base, train=train, out=tmp_path / "run", listener=lambda **one: news.append(one), **given)
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert recipe["method"] == "fastbert" and recipe["options"] == {"bag_of_words_depth": 1} and recipe["auto"]
    assert {"chosen_method": "fastbert", "reason": recipe["auto"]} in news
    assert offramp.load(tmp_path / "run").model.method.name == "fastbert"
