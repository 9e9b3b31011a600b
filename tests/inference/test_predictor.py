"""Text in, predictions out: every task, every way to give an input, in input order, within a budget."""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import offramp
from offramp.errors import OfframpError
from offramp.inference.predictor import CHUNK, Predictor
from tests import runs

ANSWERS = {"classification": "label", "pairs": "label", "regression": "value", "tagging": "tags",
           "question_answering": "answer", "masked_lm": "text"}  # fmt: skip
SPENT = {"exit_layer", "tokens_kept", "macs"}


def inputs(kind: str, count: int) -> list[Any]:
    """Inputs without labels, each in the shortest form."""
    if kind == "masked_lm":
        return [f"{row['text']} [MASK] film" for row in runs.rows(kind, count, 7)]
    columns = {"pairs": ("text_a", "text_b"), "tagging": ("tokens",), "question_answering": ("question", "context")}
    names = columns.get(kind, ("text",))
    rows = [tuple(row[name] for name in names) for row in runs.rows(kind, count, 7)]
    return [row[0] if len(names) == 1 else row for row in rows]


@pytest.mark.parametrize("kind", runs.TASKS)
def test_every_task_answers_in_input_order(every_task: dict[str, Path], kind: str) -> None:
    model = offramp.load(every_task[kind])
    given = inputs(kind, 11)
    for budget in (None, 1.0):
        together = model.predict(given, budget=budget, batch_size=4)
        alone = [model.predict([one], budget=budget)[0] for one in given]
        assert len(together) == 11
        for a, b in zip(together, alone, strict=True):
            assert a.keys() >= {ANSWERS[kind], *SPENT}
            assert {key: a[key] for key in SPENT} == {key: b[key] for key in SPENT}
            same = a[ANSWERS[kind]] == b[ANSWERS[kind]]
            assert same or a[ANSWERS[kind]] == pytest.approx(b[ANSWERS[kind]], abs=1e-5)
    assert len({str(answer) for answer in together}) > 1, "all answers alike: their order was not tested"
    assert all(answer["exit_layer"] == 3 for answer in together), "budget 1.0 is the loosest setting"


def test_a_label_comes_with_its_probabilities(trained: Path) -> None:
    for answer in offramp.load(trained).predict(inputs("classification", 5)):
        assert answer["scores"].keys() == {"good", "bad"} and sum(answer["scores"].values()) == pytest.approx(1)
        assert answer["label"] == max(answer["scores"], key=answer["scores"].__getitem__)
        assert isinstance(answer["exit_layer"], int) and isinstance(answer["macs"], int)


def test_tags_stand_for_words(every_task: dict[str, Path]) -> None:
    words = ["unplayable", "film", "in", "paris"]
    (answer,) = offramp.load(every_task["tagging"]).predict([words])
    assert len(answer["tags"]) == len(words)


def test_a_long_context_is_read_in_windows(every_task: dict[str, Path]) -> None:
    context = "the man lives in paris . " * 30
    model = offramp.load(every_task["question_answering"])
    long, short = model.predict([("who lives in paris ?", context), ("who lives in paris ?", "the man in paris")])
    assert long["answer"] == context[long["start"] : long["end"]] and long["answer"]
    assert long["tokens_kept"] > 64 > short["tokens_kept"]  # windows of one row add up


def test_mask_tokens_are_filled(every_task: dict[str, Path]) -> None:
    (answer,) = offramp.load(every_task["masked_lm"]).predict(["the [MASK] is good"])
    assert "[MASK]" not in answer["text"] and answer["text"].startswith("the ") and answer["text"].endswith(" is good")


@pytest.mark.parametrize("kind", ["pairs", "question_answering"])
def test_pairs_as_tuple_list_or_dict(every_task: dict[str, Path], kind: str) -> None:
    model, (pair,) = offramp.load(every_task[kind]), inputs(kind, 1)
    named = dict(zip(model.task.input_columns, pair, strict=True))
    tuples, lists, dicts = (model.predict([form]) for form in (pair, list(pair), {**named, "id": 7}))
    assert tuples == lists == dicts


def test_texts_as_strings_or_dicts_in_any_sequence(trained: Path) -> None:
    model, texts = offramp.load(trained), inputs("classification", 3)
    assert model.predict(texts) == model.predict(tuple(texts)) == model.predict([{"text": text} for text in texts])
    assert model.predict([]) == []


@pytest.mark.parametrize(
    "bad", ["a film", {"text": "a film"}, [["a", "film"]], [7], [None], [""], [" \n"], [{"txt": "a"}]]
)
def test_what_is_no_list_of_texts(trained: Path, bad: Any) -> None:
    with pytest.raises(OfframpError):
        offramp.load(trained).predict(bad)


@pytest.mark.parametrize("bad", [["a film"], [("one",)], [("one", "two", "three")], [("one", "")], [{"text_a": "one"}]])
def test_what_is_no_list_of_pairs(every_task: dict[str, Path], bad: Any) -> None:
    with pytest.raises(OfframpError, match="text_b"):
        offramp.load(every_task["pairs"]).predict(bad)


def test_more_rows_than_are_sorted_together(trained: Path) -> None:
    model, texts = offramp.load(trained), inputs("classification", 2 * CHUNK + 1)
    few, many = (model.predict(texts, batch_size=size) for size in (1, 200))
    assert [answer["label"] for answer in few] == [answer["label"] for answer in many]
    assert [answer["macs"] for answer in few] == [answer["macs"] for answer in many]


def test_the_collector_leaves_the_model_alone_while_rows_are_answered(trained: Path) -> None:
    model = offramp.load(trained)
    before = gc.get_freeze_count()
    chunks = model.chunks(iter([{"text": "a"}] * 100), 1)
    next(chunks)
    assert gc.get_freeze_count() > before + 1000
    assert isinstance(chunks, Generator)
    chunks.close()  # as an error on the way does
    assert gc.get_freeze_count() == 0
    model.predict(["a", "b"])
    assert gc.get_freeze_count() == 0


def test_objects_that_the_user_froze_stay_frozen(trained: Path) -> None:
    model = offramp.load(trained)
    gc.freeze()  # as servers do before they fork
    try:
        count = gc.get_freeze_count()
        model.predict(["a", "b"])
        assert gc.get_freeze_count() > 0.9 * count > 0  # some may have been let go
    finally:
        gc.unfreeze()


def test_a_budget_is_kept_on_average(trained: Path) -> None:
    model = Predictor.load(trained)
    assert model.points is not None
    rows = runs.rows("classification", 24, 1)  # the rows it was calibrated on
    full = model.full_macs(model.prepare(rows))
    for point in model.points.points:
        spent = sum(answer["macs"] for answer in model.predict(rows, budget=max(point.mac_share, 1e-3)))
        assert spent / full <= max(point.mac_share, model.points.points[0].mac_share) * (1 + 1e-6) + 1e-3
    with pytest.raises(OfframpError, match="above 0"):
        model.predict(["a film"], budget=0.0)


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"batch_size": 2.5}, {"batch_size": "8"}, {"budget": "0.5"},
                                   {"latency": "fast"}])  # fmt: skip
def test_what_is_no_number_is_refused(trained: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(OfframpError, match=next(iter(wrong))):
        Predictor.load(trained).predict(["a film"], **wrong)


def test_settings_given_win_and_are_checked(trained: Path) -> None:
    model = Predictor.load(trained)
    assert model.settings(given={"threshold": "0.25"}).threshold == 0.25
    assert model.settings(1.0).threshold == 0.0
    for bad in ({"threshold": "much"}, {"threshold": "-1"}, {"patience": "3"}):
        with pytest.raises(OfframpError, match=next(iter(bad))):
            model.settings(given=bad)


def test_without_points_there_is_only_the_full_model(trained: Path) -> None:
    model = Predictor(Predictor.load(trained).model, None)
    assert model.settings().threshold == model.settings(1.0).threshold == 0.0
    with pytest.raises(OfframpError, match="without operating points"):
        model.predict(["a film"], budget=0.5)


def test_unknown_engine_names_the_known_ones(trained: Path) -> None:
    with pytest.raises(OfframpError, match="torch"):
        offramp.load(trained, engine="abacus")
