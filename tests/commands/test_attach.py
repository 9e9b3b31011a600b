"""`offramp attach`: exits for fine-tuned models of every task, in one pass, without labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import offramp
from offramp.commands import attach as command
from offramp.commands.attach import AttachRequest, run_attach
from offramp.errors import OfframpError
from offramp.inference.finetuned import find_model, task_of_model
from offramp.training import attach as training
from tests import factories

KINDS = ["classification", "pairs", "regression", "tagging", "question_answering"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EPOCHS", 12)


def texts(folder: Path, kind: str, count: int = 240) -> str:
    """Write unlabelled rows."""
    rows = factories.labelled_rows(kind, count, seed=7)
    inputs = [{k: v for k, v in row.items() if k not in ("label", "tags", "answers", "labels")} for row in rows]
    return factories.write_jsonl(folder / "texts.jsonl", inputs)


def plain_folder(run: Path, folder: Path) -> Path:
    """Return a run's model without anything of Offramp's: what plain transformers wrote."""
    source = find_model(str(run))
    source.copy_to(folder / "plain")
    return folder / "plain"


@pytest.fixture(scope="module")
def fine_tuned(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learned its rows, so that its answers can be learned from it."""
    folder = tmp_path_factory.mktemp("fine_tuned")
    train = factories.write_jsonl(folder / "train.jsonl", factories.labelled_rows("classification", 400))
    offramp.train(model=base, train=train, out=folder / "run", epochs=6, lr=0.003, batch_size=16)
    return plain_folder(folder / "run", folder)


@pytest.fixture(scope="module")
def attached(fine_tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("attached")
    labels = factories.write_jsonl(folder / "labels.jsonl", factories.labelled_rows("classification", 40, seed=9))
    return offramp.attach(
        fine_tuned, texts(folder, "classification", 600), folder / "run", labels=labels, exits="0,1,2"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_attach_serves_every_task_and_keeps_the_full_models_answers(
    kind: str, every_task: dict[str, Path], tmp_path: Path
) -> None:
    plain, pair = plain_folder(every_task[kind], tmp_path), ("text_a", "text_b") if kind == "pairs" else ()
    run = offramp.attach(plain, texts(tmp_path, kind), tmp_path / "run", pair=pair, exits="1,2")
    model, before = offramp.load(run.folder), offramp.load(every_task[kind])
    rows = factories.labelled_rows(kind, 12, seed=3)
    ours, theirs = (one.predict(rows, budget=1.0) for one in (model, before))
    for a, b in zip(ours, theirs, strict=True):
        names = set(a) - {"exit_layer", "tokens_kept", "macs", "scores"}
        assert all(str(a[name]) == str(b[name]) or a[name] == pytest.approx(b[name]) for name in names)
    assert sorted(model.network.exit_heads) == [1, 2]


def test_the_folder_opens_in_plain_transformers_as_the_model_that_went_in(attached: Any, fine_tuned: Path) -> None:
    auto = transformers.AutoModelForSequenceClassification
    ours, theirs = (auto.from_pretrained(folder).state_dict() for folder in (attached.folder, fine_tuned))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (attached.folder / name).read_bytes() == (fine_tuned / name).read_bytes()


def test_points_allow_more_disagreement_for_less_compute(attached: Any) -> None:
    points = attached.points.disagreements
    assert [point.limit for point in points] == sorted(point.limit for point in points)
    shares = [point.mac_share for point in points]
    assert shares == sorted(shares, reverse=True) and shares[-1] < 1.0
    assert all(point.found <= point.limit or point.mac_share >= 0.99 for point in points)


def test_predict_takes_a_disagreement_and_the_default_is_one_per_cent(attached: Any) -> None:
    model = offramp.load(attached.folder)
    rows = [row["text"] for row in factories.labelled_rows("classification", 30, seed=11)]
    assert model.predict(rows) == model.predict(rows, max_disagreement=0.01)
    full, loose = model.predict(rows, budget=1.0), model.predict(rows, max_disagreement=0.05)
    assert sum(a["macs"] for a in loose) < sum(a["macs"] for a in full)
    assert np.mean([a["label"] != b["label"] for a, b in zip(full, loose, strict=True)]) < 0.2


def test_labelled_rows_add_scores_to_the_summary(attached: Any) -> None:
    scores = attached.summary["labelled"]
    assert scores["rows"] == 40 and 0.0 <= scores["disagreement"] <= 0.2
    assert abs(scores["full"]["accuracy"] - scores["default"]["accuracy"]) <= 0.2


def test_the_recipe_and_the_description_hold_no_paths(attached: Any) -> None:
    for name in ("offramp.json", "recipe.yaml", "README.md", "points.json"):
        assert str(attached.folder.parent) not in (attached.folder / name).read_text(encoding="utf-8")


def test_a_risk_becomes_the_default(fine_tuned: Path, tmp_path: Path) -> None:
    run = offramp.attach(fine_tuned, texts(tmp_path, "classification", 700), tmp_path / "run", risk=0.05, exits="0,1,2")
    assert run.points.default == {"kind": "risk", "value": 0.05}
    model, rows = offramp.load(run.folder), [row["text"] for row in factories.labelled_rows("classification", 9)]
    assert model.predict(rows) == model.predict(rows, risk=0.05)


def test_too_few_texts_for_a_risk_say_how_many_are_needed(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="2990"):
        offramp.attach(trained, texts(tmp_path, "classification"), tmp_path / "run", risk=0.01)


def test_exits_are_chosen_by_expected_time(trained: Path, tmp_path: Path) -> None:
    run = offramp.attach(trained, texts(tmp_path, "classification"), tmp_path / "run")
    assert 1 <= len(run.summary["exits"]) <= 3 and "milliseconds" in run.summary["why"]


def test_an_interrupted_pass_continues_with_the_chunks_it_has(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CHUNK_ROWS", 40)
    request = AttachRequest(str(trained), texts(tmp_path, "classification"), str(tmp_path / "run"), exits="1")
    calls = []

    def run_chunk(network: Any, encoded: Any, real: Any = training._chunk) -> Any:
        calls.append(len(encoded))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(network, encoded)

    monkeypatch.setattr(training, "_chunk", run_chunk)
    with pytest.raises(KeyboardInterrupt):
        run_attach(request)
    run_attach(request)
    assert sum(calls) == 192 + 40, "only the chunk that was interrupted runs again"


def test_multi_label_models_keep_their_labels(base: str, tmp_path: Path) -> None:
    hf = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=3, problem_type="multi_label_classification", id2label={0: "b", 1: "a", 2: "c"}
    )
    hf.save_pretrained(tmp_path / "plain")
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "plain")
    run = offramp.attach(tmp_path / "plain", texts(tmp_path, "classification"), tmp_path / "run", exits="1,2")
    prediction = offramp.load(run.folder).predict(["a good film"])[0]
    assert list(prediction["scores"]) == ["b", "a", "c"] and set(prediction["labels"]) <= {"a", "b", "c"}


def config(**entries: Any) -> dict[str, Any]:
    return {"architectures": ["BertForSequenceClassification"], **entries}


def test_labels_keep_the_models_own_order() -> None:
    task = task_of_model(config(id2label={"1": "alpha", "0": "zeta", "10": "last", "2": "mid"}), "model")
    assert task.to_json()["labels"] == ["zeta", "alpha", "mid", "last"]


@pytest.mark.parametrize(
    ("architecture", "entries", "name"),
    [
        ("BertForSequenceClassification", {"id2label": {"0": "a", "1": "b"}}, "classification"),
        ("BertForSequenceClassification", {"id2label": {"0": "LABEL_0"}}, "regression"),
        ("BertForSequenceClassification", {"problem_type": "multi_label_classification"}, "multi_label"),
        ("BertForTokenClassification", {"id2label": {"0": "O", "1": "B-X"}}, "tagging"),
        ("BertForQuestionAnswering", {}, "question_answering"),
    ],
)
def test_the_task_is_read_from_the_model(architecture: str, entries: dict[str, Any], name: str) -> None:
    assert task_of_model({"architectures": [architecture], **entries}, "model").name == name


@pytest.mark.parametrize(
    "architecture", ["BertModel", "BertForMaskedLM", "GPT2LMHeadModel", "BartForConditionalGeneration"]
)
def test_a_model_without_a_fitting_head_is_refused(architecture: str) -> None:
    with pytest.raises(OfframpError, match=architecture):
        task_of_model({"architectures": [architecture]}, "model")


def test_pickled_weights_are_refused(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((trained / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(OfframpError, match="safetensors"):
        find_model(str(tmp_path))


def test_a_model_with_its_own_code_is_refused(trained: Path, tmp_path: Path) -> None:
    stored = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    content = {**stored, "auto_map": {"AutoModel": "x.Y"}, "model_type": "strange"}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(OfframpError, match="auto_map"):
        find_model(str(tmp_path))


def test_too_few_or_empty_texts_are_refused(trained: Path, tmp_path: Path) -> None:
    path = factories.write_jsonl(tmp_path / "few.jsonl", [{"text": "a film"}] * 20 + [{"text": ""}] * 200)
    with pytest.raises(OfframpError, match="20 usable rows"):
        offramp.attach(trained, path, tmp_path / "run")


def test_labels_that_the_model_does_not_know_are_refused(trained: Path, tmp_path: Path) -> None:
    labels = factories.write_jsonl(tmp_path / "labels.jsonl", [{"text": "a", "label": "superb"}])
    with pytest.raises(OfframpError, match="superb"):
        offramp.attach(trained, texts(tmp_path, "classification"), tmp_path / "run", labels=labels, exits="1")


def test_two_defaults_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="only one"):
        offramp.attach(trained, texts(tmp_path, "classification"), tmp_path / "run", risk=0.05, budget=0.5)


def test_measured_parts_are_times_of_a_layer_and_of_every_exit(trained: Path) -> None:
    from offramp.nn.batches import Data

    model = offramp.load(trained)
    rows = factories.labelled_rows("classification", 5)
    layer, exits = command.measure_parts(model.network, Data(rows, model.prepare(rows)), rounds=2)
    assert layer > 0.0 and len(exits) == len(model.network.exit_heads) and min(exits) > 0.0
