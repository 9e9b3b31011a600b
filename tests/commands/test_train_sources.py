"""What training takes from its sources: a model's own labels, columns, the task; and what it writes of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import offramp
from offramp.commands.predict import predict
from offramp.errors import OfframpError
from offramp.inference.run_folder import quiet_transformers, read_recipe
from tests import factories


def fine_tuned(folder: Path, labels: list[str], auto_class: str = "AutoModelForSequenceClassification") -> Path:
    """Write a model with a head for these labels and its tokenizer."""
    tokenizer, named = factories.wordpiece_tokenizer(), dict(enumerate(labels))
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "num_labels": len(labels)}
    names = {"id2label": named, "label2id": {label: place for place, label in named.items()}}
    with quiet_transformers():
        factories.hf_model("bert", auto_class, **shape, **names).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def head_weights(folder: Path) -> torch.Tensor:
    """Return the weights of the head in a model folder."""
    with quiet_transformers():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    return model.classifier.weight.detach()


def train(folder: Path, model: Path | None, rows: list[dict[str, Any]], **options: Any) -> Path:
    """Train so little that a head keeps its weights, and return the run folder."""
    source = factories.write_jsonl(folder / "train.jsonl", rows)
    given = {"method": "full", "epochs": 1, "lr": 1e-12, "precision": "fp32", **options}
    return offramp.train(model=model, train=source, out=folder / "run", **given).folder


@pytest.mark.parametrize("names", [["good", "bad"], ["GOOD", "BAD"]])
def test_a_fine_tuned_model_keeps_the_order_of_its_labels_and_its_answers(tmp_path: Path, names: list[str]) -> None:
    model, rows = fine_tuned(tmp_path / "model", names), factories.labelled_rows("classification", 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train(tmp_path, model, rows)
    assert not [one for one in caught if "head" in str(one.message)]
    assert json.loads((run / "offramp.json").read_text())["task"]["labels"] == ["good", "bad"]
    assert torch.allclose(head_weights(run), head_weights(model), atol=0.002)
    pipeline = transformers.pipeline("text-classification", str(model))
    expected = [answer["label"].lower() for answer in pipeline([row["text"] for row in rows])]
    assert [answer["label"] for answer in offramp.load(run).predict(rows, budget=1.0)] == expected


def test_labels_that_are_numbers_are_the_numbers_of_the_outputs(tmp_path: Path) -> None:
    model = fine_tuned(tmp_path / "model", ["LABEL_0", "LABEL_1"])
    rows = [{"text": row["text"], "label": int(row["label"] == "good")} for row in factories.labelled_rows(count=16)]
    run = train(tmp_path, model, rows)
    assert torch.allclose(head_weights(run), head_weights(model), atol=0.002)


@pytest.mark.parametrize(
    ("labels", "auto_class"),
    [
        (["LABEL_0", "LABEL_1"], "AutoModelForSequenceClassification"),
        (["good", "bad", "ugly"], "AutoModelForSequenceClassification"),
        (["bad", "good"], "AutoModelForTokenClassification"),
    ],
)
def test_a_head_that_does_not_fit_is_new_and_a_message_says_so(
    tmp_path: Path, labels: list[str], auto_class: str
) -> None:
    model = fine_tuned(tmp_path / "model", labels, auto_class)
    with pytest.warns(UserWarning, match="head of .*model.*offramp attach"):
        run = train(tmp_path, model, factories.labelled_rows("classification", 16))
    if len(labels) == 2:
        assert not torch.allclose(head_weights(run), head_weights(model), atol=0.01)


def test_a_tagging_model_keeps_the_order_of_its_tags(tmp_path: Path) -> None:
    model = fine_tuned(tmp_path / "model", ["B-ORG", "O"], "AutoModelForTokenClassification")
    run = train(tmp_path, model, factories.labelled_rows("tagging", 16), task="tagging")
    assert json.loads((run / "offramp.json").read_text())["task"]["tags"] == ["B-ORG", "O"]


def test_init_keeps_the_order_of_labels_and_needs_no_model_and_no_task(tmp_path: Path) -> None:
    first = train(tmp_path, fine_tuned(tmp_path / "model", ["good", "bad"]), factories.labelled_rows(count=16))
    (tmp_path / "second").mkdir()
    run = train(tmp_path / "second", None, factories.labelled_rows(count=16), init=first, method="branchynet")
    about = json.loads((run / "offramp.json").read_text())
    assert about["task"]["labels"] == ["good", "bad"]
    assert about["base_model"] == json.loads((first / "offramp.json").read_text())["base_model"]


@pytest.mark.parametrize("names", [["1", "0"], ["True", "False"]])
def test_labels_of_rows_are_compared_by_their_text(tmp_path: Path, names: list[str]) -> None:
    texts = factories.labelled_rows(count=64)
    attached = offramp.attach(
        fine_tuned(tmp_path / "model", names),
        factories.write_jsonl(tmp_path / "texts.jsonl", [{"text": row["text"]} for row in texts]),
        tmp_path / "attached",
    ).folder
    kind = bool if "True" in names else int
    rows = [{"text": row["text"], "label": kind(row["label"] == "good")} for row in texts]
    (tmp_path / "second").mkdir()
    run = train(tmp_path / "second", None, rows, init=attached, method="branchynet")
    assert json.loads((run / "offramp.json").read_text())["task"]["labels"] == [kind(1), kind(0)]
    data = tmp_path / "second" / "train.jsonl"
    written = factories.write_jsonl(tmp_path / "written.jsonl", [{**row, "label": str(row["label"])} for row in rows])
    assert offramp.evaluate(attached, data)["metrics"] == offramp.evaluate(attached, written)["metrics"]
    offramp.calibrate(attached, data)


def test_init_with_other_labels_is_refused(tmp_path: Path) -> None:
    first = train(tmp_path, fine_tuned(tmp_path / "model", ["good", "bad"]), factories.labelled_rows(count=16))
    rows = [{"text": row["text"], "label": int(row["label"] == "good")} for row in factories.labelled_rows(count=16)]
    (tmp_path / "second").mkdir()
    with pytest.raises(OfframpError, match="other answers"):
        train(tmp_path / "second", None, rows, init=first)


def test_without_model_and_init_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="--init"):
        train(tmp_path, None, factories.labelled_rows(count=16))


@pytest.mark.parametrize("kind", ["tagging", "question_answering", "classification", "pairs", "regression"])
def test_the_task_is_guessed_from_the_columns(base: str, tmp_path: Path, kind: str) -> None:
    run = train(tmp_path, Path(base), factories.labelled_rows(kind, 16))
    assert json.loads((run / "offramp.json").read_text())["task"]["name"] == factories.KINDS[kind]


def test_scores_in_a_table_are_numbers_to_learn(base: str, tmp_path: Path) -> None:
    labels = [f"{number / 4:.3f}" for number in range(16)]  # the first is 0.000
    table = tmp_path / "train.csv"
    table.write_text("text,label\n" + "".join(f"a film {label},{label}\n" for label in labels))
    run = offramp.train(model=base, train=table, out=tmp_path / "run", method="full", epochs=1)
    assert json.loads((run.folder / "offramp.json").read_text())["task"]["name"] == "regression"


def test_columns_are_remembered_by_the_run(base: str, tmp_path: Path) -> None:
    rows = [{"sentence": row["text"], "class": row["label"]} for row in factories.labelled_rows(count=24)]
    run = train(tmp_path, Path(base), rows, columns={"text": "sentence", "label": "class"})
    data = tmp_path / "train.jsonl"
    assert offramp.evaluate(run, data)["rows"] == 24
    offramp.calibrate(run, data)
    assert predict(run, data, tmp_path / "answers.jsonl").bad_rows == 0
    plain = factories.write_jsonl(tmp_path / "plain.jsonl", factories.labelled_rows(count=4))
    assert offramp.evaluate(run, plain)["rows"] == 4, "rows that have our own names need no others"


def test_a_csv_label_is_stripped_and_an_empty_one_is_missing(base: str, tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("text,label\n" + "a good film, good\na bad film,bad \n" * 8)
    run = offramp.train(model=base, train=data, out=tmp_path / "run", method="full", epochs=1)
    assert run.model.network.task.labels == ("bad", "good")  # type: ignore[attr-defined]
    data.write_text("text,label\na good film,good\na bad film,bad\na film,  \n")
    with pytest.raises(OfframpError, match="row 3, where 'label' is null or empty"):
        offramp.train(model=base, train=data, out=tmp_path / "other", method="full", epochs=1)


def test_a_run_folder_names_no_folder_of_this_machine(base: str, tmp_path: Path) -> None:
    dev = factories.write_jsonl(tmp_path / "dev.jsonl", factories.labelled_rows(count=8, seed=1))
    first = train(tmp_path, Path(base), factories.labelled_rows(count=16), dev=dev)
    (tmp_path / "second").mkdir()
    second = train(tmp_path / "second", Path(base), factories.labelled_rows(count=16), init=first, method="deebert")
    offramp.calibrate(second, dev)
    home = str(tmp_path.parent.parent)
    for run in (first, second):
        files = [path for path in run.rglob("*") if path.suffix in (".json", ".yaml", ".md", ".txt")]
        assert [path.name for path in files if home in path.read_text()] == []
        assert not [v for v in read_recipe(run).values() if isinstance(v, str) and v.startswith("/")]
