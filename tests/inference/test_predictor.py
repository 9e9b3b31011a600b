"""The predictor: every task, every form of input, predictions in input order, settings for every kind of budget."""

from __future__ import annotations

import gc
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import offramp
from offramp.engines import EngineOptions
from offramp.errors import OfframpError
from offramp.inference.budget import Budget
from offramp.inference.operating_points import (
    DisagreementPoint,
    LatencyPoint,
    LossBounds,
    OperatingPoint,
    RiskGuarantee,
)
from offramp.inference.predictor import CHUNK, Predictor
from offramp.utils.hardware import hardware
from tests import factories

ANSWER_FIELDS = {"classification": "label", "pairs": "label", "multi_label": "labels",
           "regression": "value", "tagging": "tags", "question_answering": "answer", "masked_lm": "text"}  # fmt: skip
COST_FIELDS = {"exit_layer", "tokens_kept", "macs"}


def inputs(kind: str, count: int) -> list[Any]:
    """Return inputs without labels, each in the shortest form."""
    if kind == "masked_lm":
        return [f"{row['text']} [MASK] film" for row in factories.labelled_rows(kind, count, 7)]
    columns = {"pairs": ("text_a", "text_b"), "tagging": ("tokens",), "question_answering": ("question", "context")}
    names = columns.get(kind, ("text",))
    rows = [tuple(row[name] for name in names) for row in factories.labelled_rows(kind, count, 7)]
    return [row[0] if len(names) == 1 else row for row in rows]


@pytest.mark.parametrize("kind", factories.KINDS)
def test_predict_returns_every_task_in_input_order(every_task: dict[str, Path], kind: str) -> None:
    model = offramp.load(every_task[kind])
    texts = inputs(kind, 11)
    for budget in (None, 1.0):
        together = model.predict(texts, budget=budget, batch_size=4)
        alone = [model.predict([one], budget=budget)[0] for one in texts]
        assert len(together) == 11
        for a, b in zip(together, alone, strict=True):
            assert a.keys() >= {ANSWER_FIELDS[kind], *COST_FIELDS}
            assert {key: a[key] for key in COST_FIELDS} == {key: b[key] for key in COST_FIELDS}
            same = a[ANSWER_FIELDS[kind]] == b[ANSWER_FIELDS[kind]]
            assert same or a[ANSWER_FIELDS[kind]] == pytest.approx(b[ANSWER_FIELDS[kind]], abs=1e-5)
    assert len({str(prediction) for prediction in together}) > 1, (
        "all predictions are alike: their order was not tested"
    )
    assert all(prediction["exit_layer"] == 3 for prediction in together), "budget 1.0 is the full setting"


def test_classification_returns_probabilities_of_all_labels(trained: Path) -> None:
    for prediction in offramp.load(trained).predict(inputs("classification", 5)):
        assert prediction["scores"].keys() == {"good", "bad"} and sum(prediction["scores"].values()) == pytest.approx(1)
        assert prediction["label"] == max(prediction["scores"], key=prediction["scores"].__getitem__)
        assert isinstance(prediction["exit_layer"], int) and isinstance(prediction["macs"], int)


def test_tagging_returns_one_tag_per_word(every_task: dict[str, Path]) -> None:
    words = ["unplayable", "film", "in", "paris"]
    (prediction,) = offramp.load(every_task["tagging"]).predict([words])
    assert len(prediction["tags"]) == len(words)


def test_question_answering_adds_up_the_windows_of_a_long_context(every_task: dict[str, Path]) -> None:
    context = "the man lives in paris . " * 30
    model = offramp.load(every_task["question_answering"])
    long, short = model.predict([("who lives in paris ?", context), ("who lives in paris ?", "the man in paris")])
    assert long["answer"] == context[long["start"] : long["end"]] and long["answer"]
    assert long["tokens_kept"] > 64 > short["tokens_kept"]


def test_masked_lm_fills_mask_tokens(every_task: dict[str, Path]) -> None:
    (prediction,) = offramp.load(every_task["masked_lm"]).predict(["the [MASK] is good"])
    assert (
        "[MASK]" not in prediction["text"]
        and prediction["text"].startswith("the ")
        and prediction["text"].endswith(" is good")
    )


@pytest.mark.parametrize("kind", ["pairs", "question_answering"])
def test_predict_takes_pairs_as_tuple_list_or_dict(every_task: dict[str, Path], kind: str) -> None:
    model, (pair,) = offramp.load(every_task[kind]), inputs(kind, 1)
    named = dict(zip(model.task.input_columns, pair, strict=True))
    tuples, lists, dicts = (model.predict([form]) for form in (pair, list(pair), {**named, "id": 7}))
    assert tuples == lists == dicts


def test_predict_takes_texts_as_strings_or_dicts_in_any_sequence(trained: Path) -> None:
    model, texts = offramp.load(trained), inputs("classification", 3)
    assert model.predict(texts) == model.predict(tuple(texts)) == model.predict([{"text": text} for text in texts])
    assert model.predict([]) == []


@pytest.mark.parametrize(
    "bad",
    [0, None, b"a film", "a film", {"text": "a film"}, [["a", "film"]], [7], [None], [""], [" \n"], [{"txt": "a"}]],
)
def test_predict_refuses_what_is_no_list_of_texts(trained: Path, bad: Any) -> None:
    with pytest.raises(OfframpError):
        offramp.load(trained).predict(bad)


def test_predict_refuses_a_table_whose_columns_would_be_taken_for_texts(trained: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"text": ["a film"], "id": [7]})
    with pytest.raises(OfframpError, match="DataFrame"):
        offramp.load(trained).predict(table)
    assert len(offramp.load(trained).predict(table["text"])) == len(
        offramp.load(trained).predict(table.to_dict("records"))
    )


@pytest.mark.parametrize("bad", [["a film"], [("one",)], [("one", "two", "three")], [("one", "")], [{"text_a": "one"}]])
def test_predict_refuses_what_is_no_list_of_pairs(every_task: dict[str, Path], bad: Any) -> None:
    with pytest.raises(OfframpError, match="text_b"):
        offramp.load(every_task["pairs"]).predict(bad)


def test_predictions_do_not_depend_on_the_batch_size(trained: Path) -> None:
    model, texts = offramp.load(trained), inputs("classification", 2 * CHUNK + 1)
    few, many = (model.predict(texts, batch_size=size) for size in (1, 200))
    assert [prediction["label"] for prediction in few] == [prediction["label"] for prediction in many]
    assert [prediction["macs"] for prediction in few] == [prediction["macs"] for prediction in many]


def test_predict_leaves_the_garbage_collector_alone(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = offramp.load(trained), gc.get_threshold()
    for name in ("freeze", "unfreeze", "get_freeze_count", "collect", "disable"):
        monkeypatch.setattr(gc, name, lambda *_: pytest.fail("the collector belongs to the whole process"))
    assert len(model.predict(["a", "b"])) == 2
    assert gc.get_threshold() == before and gc.isenabled()


def test_threads_that_share_a_predictor_get_the_same_answers(trained: Path) -> None:
    model, texts = offramp.load(trained), inputs("classification", 24)
    expected = [model.predict([text])[0] for text in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: model.predict([text])[0], texts)) == expected


def test_a_predictor_is_pickled_by_its_folder(trained: Path) -> None:
    model = offramp.load(trained, engine="torch", threads=1)
    stored = pickle.dumps(model)
    copy = pickle.loads(stored)
    assert len(stored) < 2000, "no weights"
    assert copy.predict(["a good film"], 0.5) == model.predict(["a good film"], 0.5)
    assert (copy.engine_name, copy.how) == (model.engine_name, model.how)


def test_objects_frozen_by_the_user_stay_frozen(trained: Path) -> None:
    model = offramp.load(trained)
    gc.freeze()  # as servers do before they fork
    try:
        count = gc.get_freeze_count()
        model.predict(["a", "b"])
        assert gc.get_freeze_count() > 0.9 * count > 0  # some may have been freed
    finally:
        gc.unfreeze()


def test_budget_is_kept_on_the_calibration_rows(trained: Path) -> None:
    model = Predictor.load(trained)
    assert model.points is not None
    rows = factories.labelled_rows("classification", 24, 1)  # the rows it was calibrated on
    full = model.full_macs(model.prepare(rows))
    for point in model.points.points:
        spent = sum(prediction["macs"] for prediction in model.predict(rows, budget=max(point.mac_share, 1e-3)))
        assert spent / full <= max(point.mac_share, model.points.points[0].mac_share) * (1 + 1e-6) + 1e-3
    with pytest.raises(OfframpError, match="above 0"):
        model.predict(["a film"], budget=0.0)


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"batch_size": 2.5}, {"batch_size": "8"}, {"budget": "0.5"},
                                   {"latency": "fast"}, {"max_loss": "0.01"}, {"risk": True}])  # fmt: skip
def test_predict_refuses_wrong_types_and_names_them(trained: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(OfframpError, match=next(iter(wrong))):
        Predictor.load(trained).predict(["a film"], **wrong)


@pytest.mark.parametrize("name", ["budget", "max_loss", "risk", "max_disagreement", "latency"])
@pytest.mark.parametrize("value", ["half", [0.5], {"a": 1}, True, 10**400, float("nan"), 1j, b"0.5", object()])
def test_predict_refuses_budgets_of_any_wrong_type(trained: Path, name: str, value: Any) -> None:
    with pytest.raises(OfframpError, match=name):
        offramp.load(trained, engine="torch").predict(["a"], **{name: value})


def test_predict_refuses_a_lone_surrogate_by_its_row(trained: Path, every_task: dict[str, Path]) -> None:
    with pytest.raises(OfframpError, match=r"row 2.*ud800"):
        offramp.load(trained).predict(["a", "b \ud800"])
    with pytest.raises(OfframpError, match=r"row 1.*ud800"):
        offramp.load(every_task["tagging"]).predict([["b", "\ud800"]])


def test_settings_checks_given_values(trained: Path) -> None:
    model = Predictor.load(trained)
    assert model.settings(given={"threshold": "0.25"}).threshold == 0.25
    assert model.settings(1.0).threshold == 0.0
    for bad in ({"threshold": "much"}, {"threshold": "-1"}, {"patience": "3"}):
        with pytest.raises(OfframpError, match=next(iter(bad))):
            model.settings(given=bad)


def test_model_without_points_has_only_the_full_setting(trained: Path) -> None:
    model = Predictor(Predictor.load(trained).model, None)
    assert model.settings().threshold == model.settings(1.0).threshold == 0.0
    with pytest.raises(OfframpError, match="without operating points"):
        model.predict(["a film"], budget=0.5)


def test_load_refuses_an_unknown_engine_and_names_the_known_ones(trained: Path) -> None:
    with pytest.raises(OfframpError, match="torch"):
        offramp.load(trained, engine="abacus")


def test_predictor_is_callable(trained: Path) -> None:
    model = offramp.load(trained)
    assert model(["a good film"], budget=0.5) == model.predict(["a good film"], budget=0.5)


def test_predict_takes_a_budget_value(trained: Path) -> None:
    model = offramp.load(trained)
    assert model.predict(["a film"], Budget.share(0.5)) == model.predict(["a film"], budget=0.5)
    assert model.settings(Budget.loss(0.02)) == model.settings(max_loss=0.02)


def test_settings_refuses_two_budgets(trained: Path) -> None:
    model = Predictor.load(trained)
    with pytest.raises(OfframpError, match=r"budget=0\.5 and latency=0\.005"):
        model.settings(0.5, latency=0.005)
    with pytest.raises(OfframpError, match=r"threshold(.|\n)*only one"):
        model.settings(0.5, given={"threshold": 0.1})


def with_points(trained: Path, **stored: Any) -> Predictor:
    """Return a predictor whose operating points hold these guarantees, latencies or disagreements."""
    model = Predictor.load(trained, "torch")
    assert model.points is not None
    model.points = replace(model.points, **stored)
    return model


def test_settings_for_a_risk_are_those_of_its_guarantee(trained: Path) -> None:
    proven = RiskGuarantee(0.02, 0.95, {"threshold": 0.25}, 300, 0.0, 0.5, "torch", "fp32")
    model = with_points(trained, guarantees=(proven,))
    assert model.settings(risk=0.02).threshold == model.settings(Budget.risk(0.05)).threshold == 0.25
    model.how = EngineOptions("bf16")
    with pytest.raises(OfframpError, match=r"bf16(.|\n)*proven in fp32"):
        model.settings(risk=0.02)


def test_settings_for_a_disagreement_need_points_for_it(trained: Path) -> None:
    with pytest.raises(OfframpError, match=r"0\.01(.|\n)*none"):
        Predictor.load(trained).settings(max_disagreement=0.01)
    stored = DisagreementPoint(0.01, {"threshold": 0.25}, 0.4, 0.004, 500)
    model = with_points(trained, disagreements=(stored,))
    assert model.settings(max_disagreement=0.01).threshold == 0.25
    assert model.predict(["a film"], max_disagreement=0.01)


def test_a_loss_proven_in_another_precision_is_warned_about(trained: Path) -> None:
    points = (
        OperatingPoint({"threshold": 0.25}, 0.4, 0.9, 1.0, loss_upper=0.004),
        OperatingPoint({"threshold": 0.0}, 1.0, 0.9, 2.0, loss_upper=0.0),
    )
    model = with_points(trained, points=points, bounds=LossBounds(0.9, 1000), trusted=True, precision="fp32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.settings(max_loss=0.01).threshold == 0.25
    model.how = EngineOptions("bf16")
    with pytest.warns(UserWarning, match=r"max_loss=0\.01 was tested on torch fp32(.|\n)*--precision bf16"):
        assert model.settings(max_loss=0.01).threshold == 0.25


LATENCY = LatencyPoint(5.0, 95.0, {"threshold": 0.25}, 4.0, 4.5, 0.9, 0.5, "torch", "fp32", None, hardware())


def test_settings_for_a_latency_are_those_of_its_point(trained: Path) -> None:
    model = with_points(trained, latencies=(LATENCY,))
    assert model.settings(latency=0.005).threshold == model.settings(latency="20ms").threshold == 0.25
    assert model.predict(["a good film"], latency=0.005)[0]["label"] in ("good", "bad")
    with pytest.raises(OfframpError, match=r"4ms(.|\n)*5ms on torch fp32(.|\n)*--latency 4ms"):
        model.settings(latency=0.004)
    with pytest.raises(OfframpError, match="latency=-1"):
        model.settings(latency=-1)
    model.points = replace(model.points, latencies=(replace(LATENCY, engine="other"),))  # type: ignore[type-var]
    with pytest.raises(OfframpError, match="5ms on other fp32"):
        model.settings(latency=0.005)


@pytest.mark.parametrize(
    ("stored", "threads", "warning"),
    [
        (replace(LATENCY, hardware="an abacus"), None, "an abacus"),
        (replace(LATENCY, threads=3), None, "3 threads; this runs on all cores"),
        (replace(LATENCY, threads=3), 1, "3 threads; this runs on 1 thread$"),
    ],
)
def test_settings_for_a_latency_warn_on_other_hardware(
    trained: Path, stored: LatencyPoint, threads: int | None, warning: str
) -> None:
    model = with_points(trained, latencies=(stored,))
    model.how = EngineOptions(threads=threads)
    with pytest.warns(UserWarning, match=warning):
        model.settings(latency=0.005)


def test_settings_for_a_latency_do_not_warn_on_the_same_threads(trained: Path) -> None:
    model = with_points(trained, latencies=(replace(LATENCY, threads=3),))
    model.how = EngineOptions(threads=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.settings(latency=0.005).threshold == 0.25


def test_tagging_takes_raw_sentences(every_task: dict[str, Path]) -> None:
    model = offramp.load(every_task["tagging"])
    raw, split = model.predict(["a good film , saw it", ["a", "good", "film", ",", "saw", "it"]], budget=1.0)
    assert raw["tags"] == split["tags"] and raw["tokens"] == ["a", "good", "film", ",", "saw", "it"]
    assert raw["entities"] == split["entities"]
    for entity in raw["entities"]:
        assert "a good film , saw it"[entity["start"] : entity["end"]] == entity["text"] and 0 < entity["score"] <= 1


def test_question_answering_returns_characters_and_a_score(every_task: dict[str, Path]) -> None:
    row = factories.labelled_rows("question_answering", 1, 5)[0]
    (answer,) = offramp.load(every_task["question_answering"]).predict([row])
    assert row["context"][answer["start"] : answer["end"]] == answer["answer"] and 0 < answer["score"] <= 1


LONG_TEXT = " ".join(["the film is very good and it is what it is"] * 30)


def test_truncation_is_reported_in_python(trained: Path) -> None:
    model = offramp.load(trained)
    with pytest.warns(UserWarning, match="1 of 2 inputs were truncated to 64 tokens"):
        short, long = model.predict(["a film", LONG_TEXT])
    assert "truncated" not in short and long["truncated"] == 330 + 2 - 64


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_long_texts_are_read_in_windows(trained: Path, pool: Any) -> None:
    model, texts = offramp.load(trained), ["a good film", LONG_TEXT + " bad", "a bad film"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, long, last = model.predict(texts, budget=1.0, long="window", window_pool=pool)
    for alone, beside in zip(model.predict([texts[0], texts[2]], budget=1.0), (first, last), strict=True):
        assert alone["scores"] == pytest.approx(beside["scores"]), "windows of other rows change nothing"
    encoded = model.prepare([{"text": texts[1]}], long="window")
    assert len(encoded) > 6 and all(len(one.ids) <= 64 and one.cut == 0 for one in encoded)
    covered = [place for one in encoded for place in one.ids[1:-1]]
    assert len(covered) >= 331 and long["tokens_kept"] > 331
    windows = [model.task.predictions([{}], [one], [logits])[0]["scores"] for one, logits in zip(
        encoded, model.run(encoded, model.settings(1.0)).logits, strict=True)]  # fmt: skip
    pooled = {label: (max if pool == "max" else lambda v: sum(v) / len(v))([w[label] for w in windows])
              for label in windows[0]}  # fmt: skip
    total = sum(pooled.values())
    assert long["scores"] == pytest.approx({label: value / total for label, value in pooled.items()}, rel=1e-5)


def test_windows_are_refused_where_they_are_not_possible(every_task: dict[str, Path], trained: Path) -> None:
    for kind in ("pairs", "tagging"):
        with pytest.raises(OfframpError, match="windows"):
            offramp.load(every_task[kind]).predict(inputs(kind, 1), long="window")
    for wrong in ({"long": "fold"}, {"window_pool": "median"}):
        with pytest.raises(OfframpError, match=next(iter(wrong.values()))):
            offramp.load(trained).predict(["a"], **wrong)  # type: ignore[arg-type]
    offramp.load(every_task["question_answering"]).predict(inputs("question_answering", 1), long="window")
    offramp.load(every_task["regression"]).predict([LONG_TEXT], long="window")
