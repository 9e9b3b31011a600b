"""`offramp attach`: exits for fine-tuned models of every task, in one pass, without labels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

import offramp
from offramp import engines
from offramp.commands import attach as command
from offramp.commands.attach import AttachRequest, run_attach
from offramp.engines import native
from offramp.errors import OfframpError
from offramp.inference.finetuned import find_model, task_of_model
from offramp.nn.batches import Data
from offramp.training import attach as training
from offramp.utils.progress import progress_listener
from tests import factories

KINDS = ["classification", "pairs", "multi_label", "regression", "tagging", "question_answering"]


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
    offramp.train(model=base, train=train, out=folder / "run", method="full", epochs=6, lr=0.003, batch_size=16)
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
    with pytest.raises(OfframpError, match="1495"):
        offramp.attach(trained, texts(tmp_path, "classification"), tmp_path / "run", risk=0.01)


def test_exits_are_chosen_by_expected_time(trained: Path, tmp_path: Path) -> None:
    run = offramp.attach(trained, texts(tmp_path, "classification"), tmp_path / "run")
    assert 1 <= len(run.summary["exits"]) <= 3 and "milliseconds" in run.summary["why"]


def test_exits_are_chosen_by_compute_where_none_saves_time(
    fine_tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure_parts", lambda network, held: (0.01, [9.0] * len(network.exit_heads)))
    with pytest.warns(UserWarning, match="no exits save time"):
        run = offramp.attach(fine_tuned, texts(tmp_path, "classification", 400), tmp_path / "run")
    assert run.points.disagreement_point_for(0.02).mac_share < 0.6


@pytest.mark.parametrize("kind", ["tagging", "question_answering"])
def test_answers_for_tokens_are_learned_and_cost_less(kind: str, base: str, tmp_path: Path) -> None:
    train = factories.write_jsonl(tmp_path / "train.jsonl", factories.labelled_rows(kind, 300))
    offramp.train(
        model=base, train=train, out=tmp_path / "first", method="full", task=kind, epochs=5, lr=0.003, batch_size=16
    )
    run = offramp.attach(tmp_path / "first", texts(tmp_path, kind, 500), tmp_path / "run")
    model, rows = offramp.load(run.folder), factories.labelled_rows(kind, 60, seed=99)
    full, cheap = model.predict(rows, budget=1.0), model.predict(rows, max_disagreement=0.02)
    assert np.mean(model.task.disagreement(cheap, full)) <= 0.02
    assert sum(one["macs"] for one in cheap) < 0.7 * sum(one["macs"] for one in full)


def test_points_of_a_tagger_are_found_on_the_words_that_predict_reads(
    every_task: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences = [f"Scotland's well-known {row['tokens'][0]}, didn't {' '.join(row['tokens'])} — São Paulo?"
                 for row in factories.labelled_rows("tagging", 120, seed=7)]  # fmt: skip
    path = factories.write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in sentences])
    recorded: list[Data] = []

    def record(network: Any, method: Any, data: Data, real: Any = command.record_unlabelled) -> Any:
        recorded.append(data)
        return real(network, method, data)

    monkeypatch.setattr(command, "record_unlabelled", record)
    run = offramp.attach(every_task["tagging"], path, tmp_path / "run", exits="1")
    model = offramp.load(run.folder)
    assert len(recorded) == 2
    for data in recorded:
        read = model.prepare([{"text": row["text"]} for row in data.rows])
        assert [(one.ids, one.words) for one in data.encoded] == [(one.ids, one.words) for one in read]
        words = [one["tokens"] for one in model.predict([row["text"] for row in data.rows], budget=1.0)]
        assert all(one[:2] == ["Scotland's", "well-known"] and "didn't" in one for one in words)


def test_exits_of_a_model_of_numbers_are_chosen(every_task: dict[str, Path], tmp_path: Path) -> None:
    run = offramp.attach(every_task["regression"], texts(tmp_path, "regression"), tmp_path / "run")
    assert 1 <= len(run.summary["exits"]) <= 4 and "value" in offramp.load(run.folder).predict(["a good film"])[0]
    shares = [point.mac_share for point in run.points.disagreements]
    assert shares == sorted(shares, reverse=True), "a stricter limit is never cheaper"


def test_an_interrupted_pass_continues_with_the_chunks_it_has(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CHUNK_ROWS", 40)
    request = AttachRequest(str(trained), texts(tmp_path, "classification"), str(tmp_path / "run"), exits="1")
    calls = []

    def counted_chunk(network: Any, encoded: Any, *done: int, real: Any = training.run_chunk) -> Any:
        calls.append(len(encoded))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(network, encoded, *done)

    monkeypatch.setattr(training, "run_chunk", counted_chunk)
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


@pytest.mark.parametrize(
    ("row", "pair", "message"),
    [
        ({"sentence": "a film"}, (), r"(?s)'text'.*columns sentence, id.*--column text=NAME.*--pair"),
        ({"s1": "a", "s2": "b"}, ("s1", "s3"), r"(?s)'s3'.*columns s1, s2, id.*--pair"),
    ],
)
def test_a_column_that_no_text_has_is_named(
    trained: Path, tmp_path: Path, row: dict[str, str], pair: tuple[str, ...], message: str
) -> None:
    path = factories.write_jsonl(tmp_path / "texts.jsonl", [{**row, "id": number} for number in range(80)])
    with pytest.raises(OfframpError, match=message):
        offramp.attach(trained, path, tmp_path / "run", pair=pair)


def test_words_may_be_raw_sentences_and_their_missing_column_is_named(
    every_task: dict[str, Path], tmp_path: Path
) -> None:
    path = factories.write_jsonl(tmp_path / "texts.jsonl", [{"words": ["a", "film"]}] * 80)
    with pytest.raises(OfframpError, match=r"(?s)'tokens'.*columns words.*--column tokens=NAME$"):
        offramp.attach(every_task["tagging"], path, tmp_path / "run")


def test_labels_that_share_a_name_are_refused_before_any_work(trained: Path, tmp_path: Path) -> None:
    plain = plain_folder(trained, tmp_path)
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "id2label": {"0": "x", "1": "x"}}))
    with pytest.raises(OfframpError, match="the label 'x' twice"):
        offramp.attach(plain, texts(tmp_path, "classification"), tmp_path / "run", exits="1")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [({"seed": -1}, "--seed -1"), ({"seed": "x"}, "--seed x"), ({"exits": 1}, "exits=1"), ({"exits": None}, "None")],
)
def test_values_of_the_wrong_kind_are_refused(
    trained: Path, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(OfframpError, match=message):
        offramp.attach(trained, texts(tmp_path, "classification"), tmp_path / "run", **given)


def test_labels_that_the_model_does_not_know_are_refused(trained: Path, tmp_path: Path) -> None:
    labels = factories.write_jsonl(tmp_path / "labels.jsonl", [{"text": "a", "label": "superb"}])
    with pytest.raises(OfframpError, match="superb"):
        offramp.attach(trained, texts(tmp_path, "classification"), tmp_path / "run", labels=labels, exits="1")


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_numbers_for_labels_are_taken_by_attach_and_by_every_command_on_its_run(
    base: str, tmp_path: Path, ending: str
) -> None:
    rows = factories.labelled_rows("classification", 120, seed=9)
    train = factories.write_jsonl(tmp_path / "train.jsonl", rows)
    offramp.train(model=base, train=train, out=tmp_path / "full", method="full", epochs=1)
    numbers = tmp_path / f"numbers.{ending}"
    if ending == "csv":
        lines = [f"{row['text']},{int(row['label'] == 'good')}\n" for row in rows]
        numbers.write_text("text,label\n" + "".join(lines))
    else:
        factories.write_jsonl(numbers, [{**row, "label": int(row["label"] == "good")} for row in rows])
    text, out = texts(tmp_path, "classification"), tmp_path / "run"
    run = offramp.attach(plain_folder(tmp_path / "full", tmp_path), text, out, labels=numbers, exits="1")
    full = offramp.evaluate(out, numbers, budget=1.0)["metrics"]
    assert full["accuracy"] == pytest.approx(run.summary["labelled"]["full"]["accuracy"])
    assert full == offramp.evaluate(out, train, budget=1.0)["metrics"]
    assert offramp.calibrate(out, numbers, force=True).metric == "accuracy"
    with pytest.raises(OfframpError, match="the label"):  # labels of a run that was trained are those of its rows
        offramp.evaluate(tmp_path / "full", numbers)


def test_the_column_of_labels_is_renamed_in_the_labelled_rows_only(trained: Path, tmp_path: Path) -> None:
    labels = factories.write_jsonl(tmp_path / "labels.jsonl", [{"text": "a", "sentiment": "superb"}])
    given: Any = {"labels": labels, "columns": {"label": "sentiment"}}  # texts have no such column
    with pytest.raises(OfframpError, match="superb"):
        offramp.attach(trained, texts(tmp_path, "classification"), tmp_path / "run", exits="1", **given)


def test_unknown_labels_are_refused_before_any_work(trained: Path, tmp_path: Path) -> None:
    labels = factories.write_jsonl(tmp_path / "labels.jsonl", [{"text": "a", "label": "superb"}])
    with pytest.raises(OfframpError):
        offramp.attach(trained, texts(tmp_path, "classification"), tmp_path / "run", labels=labels)
    assert not (tmp_path / "run.partial").exists()


def copy_model(run: Path, folder: Path, *left_out: str) -> Path:
    """Return a copy of a run's plain model without some of its files."""
    plain = plain_folder(run, folder)
    for name in left_out:
        for path in plain.glob(name):
            path.unlink()
    return plain


def test_a_missing_tokenizer_is_refused(trained: Path, tmp_path: Path) -> None:
    plain = copy_model(trained, tmp_path, "tokenizer*", "vocab*", "special*")
    with pytest.raises(OfframpError, match="tokenizer"):
        offramp.attach(plain, texts(tmp_path, "classification"), tmp_path / "run")


def test_weights_without_a_head_are_refused(trained: Path, tmp_path: Path) -> None:
    plain = copy_model(trained, tmp_path)
    weights = {name: t for name, t in load_file(plain / "model.safetensors").items() if "classifier" not in name}
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OfframpError, match=r"classifier\.(weight|bias)"):
        offramp.attach(plain, texts(tmp_path, "classification"), tmp_path / "run")


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "generative"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "generative"),
        ({"architectures": ["XLNetForSequenceClassification"], "model_type": "xlnet"}, "deberta-v2"),
        ({"model_type": "own", "auto_map": {"AutoModel": "code.Own"}}, "auto_map"),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_attach(
    trained: Path, tmp_path: Path, entries: dict[str, Any], named: str
) -> None:
    plain = copy_model(trained, tmp_path)
    stored = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    (plain / "config.json").write_text(json.dumps({**stored, **entries}), encoding="utf-8")
    with pytest.raises(OfframpError, match=named):
        offramp.attach(plain, texts(tmp_path, "classification"), tmp_path / "run")
    assert not (tmp_path / "run").exists() and not (tmp_path / "run.partial").exists()


@pytest.mark.parametrize("missing", ["no/such/folder", "./nowhere"])
def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path, missing: str) -> None:
    with pytest.raises(OfframpError, match="no folder"):
        offramp.attach(missing, texts(tmp_path, "classification"), tmp_path / "run")


def test_blank_texts_are_left_out(trained: Path, tmp_path: Path) -> None:
    rows = [{"text": row["text"]} for row in factories.labelled_rows("classification", 100)]
    path = factories.write_jsonl(tmp_path / "some.jsonl", [{"text": "  "}, *rows, {"text": ""}])
    run = offramp.attach(trained, path, tmp_path / "run", exits="1")
    assert run.summary["texts"] + run.summary["held_out"] == 100


def test_texts_that_the_tokenizer_cannot_read_are_refused(trained: Path, tmp_path: Path) -> None:
    path = factories.write_jsonl(tmp_path / "other.jsonl", [{"text": "☃ ☂ ☀"}] * 100)
    with pytest.raises(OfframpError, match=r"other\.jsonl"):
        offramp.attach(trained, path, tmp_path / "run", exits="1")


def test_very_short_texts_are_warned_about(trained: Path, tmp_path: Path) -> None:
    path = factories.write_jsonl(tmp_path / "short.jsonl", [{"text": w} for w in ("good", "bad", "film") * 40])
    with pytest.warns(UserWarning, match="at most 1 tokens"):
        offramp.attach(trained, path, tmp_path / "run", exits="1")


def test_a_model_that_is_too_shallow_is_warned_about(tmp_path: Path) -> None:
    folder = factories.model_folder(tmp_path / "base", num_hidden_layers=2)
    hf = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    hf.save_pretrained(tmp_path / "plain")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "plain")
    with pytest.warns(UserWarning, match="2 layers"):
        offramp.attach(tmp_path / "plain", texts(tmp_path, "classification"), tmp_path / "run", exits="1")


def test_a_run_keeps_the_types_of_its_labels(base: str, tmp_path: Path) -> None:
    rows = [{**row, "label": int(row["label"] == "good")} for row in factories.labelled_rows("classification", 60)]
    train = factories.write_jsonl(tmp_path / "train.jsonl", rows)
    first = offramp.train(model=base, train=train, out=tmp_path / "first", method="full", epochs=1)
    run = offramp.attach(first.folder, texts(tmp_path, "classification"), tmp_path / "run", exits="1")
    assert offramp.load(run.folder).predict(["a good film"])[0]["label"] in (0, 1)
    assert run.model.network.task == first.model.network.task


def test_a_run_whose_full_model_was_never_trained_is_refused(trained: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(trained, tmp_path / "own"))
    content = json.loads((own / "offramp.json").read_text(encoding="utf-8"))
    (own / "offramp.json").write_text(json.dumps({**content, "method": "truncate"}), encoding="utf-8")
    with pytest.raises(OfframpError, match="truncate"):
        find_model(str(own))


def test_another_model_in_the_same_folder_does_not_continue_an_interrupted_pass(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = copy_model(trained, tmp_path), []
    request = AttachRequest(str(plain), texts(tmp_path, "classification"), str(tmp_path / "run"), exits="1")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def counted_chunk(network: Any, encoded: Any, *done: int, real: Any = training.run_chunk) -> Any:
        calls.append(len(encoded))
        return real(network, encoded, *done)

    monkeypatch.setattr(training, "run_chunk", counted_chunk)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(command, "fit_exit_heads", interrupt)
        run_attach(request)
    weights = {name: 1.01 * t for name, t in load_file(plain / "model.safetensors").items()}
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    run_attach(request)
    assert calls == [192, 192]


def test_files_and_training_steps_are_bounded(attached: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = offramp.load(attached.folder)
    encoded = model.prepare(factories.labelled_rows("classification", 50))
    monkeypatch.setattr(training, "CHUNK_BYTES", 4096)
    stored = training.collect_states(model.network, encoded, tmp_path)
    assert len(stored.chunks) == 8 and sorted(i for chunk in stored.chunks for i in chunk) == list(range(50))
    assert all(stored.load(n)["features"].nbytes <= 4096 for n in range(len(stored.chunks)))
    monkeypatch.setattr(training, "IN_MEMORY", 0)
    training.fit_exit_heads(model.network, stored, encoded)


def test_the_pass_reports_its_progress(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reports = offramp.load(trained), []
    encoded = model.prepare(factories.labelled_rows("classification", 50))
    monkeypatch.setattr(training, "BATCH_TOKENS", 64)
    with progress_listener(lambda done, total: reports.append((done, total))):
        training.collect_states(model.network, encoded, tmp_path)
    assert len(reports) > 5 and reports[-1] == (50, 50) and reports == sorted(reports)


def test_two_defaults_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="only one"):
        offramp.attach(trained, texts(tmp_path, "classification"), tmp_path / "run", risk=0.05, budget=0.5)


def test_measured_parts_are_times_of_a_layer_and_of_every_exit(trained: Path) -> None:
    model = offramp.load(trained)
    rows = factories.labelled_rows("classification", 5)
    layer, exits = command.measure_parts(model.network, Data(rows, model.prepare(rows)), rounds=2)
    assert layer > 0.0 and len(exits) == len(model.network.exit_heads) and min(exits) > 0.0


def test_train_may_end_in_attach(base: str, tmp_path: Path) -> None:
    train = factories.write_jsonl(tmp_path / "train.jsonl", factories.labelled_rows("classification", 120))
    wanted: dict[str, Any] = {"model": base, "train": train, "out": tmp_path / "run", "epochs": 1, "attach": train}
    run, reports = offramp.train(**wanted), []
    assert offramp.load(run.folder).model.method.name == "attached" and run.points.disagreements
    assert (run.folder / "model.safetensors").read_bytes() == (tmp_path / "run-full" / "model.safetensors").read_bytes()
    again = offramp.train(**wanted, force=True, listener=lambda **news: reports.append(news))
    assert again.log == run.log and reports == [{"attaching": train}], (
        "the plain run that is there is not trained again"
    )
    with pytest.raises(OfframpError, match="--method deebert"):
        offramp.train(**{**wanted, "out": tmp_path / "other"}, method="deebert")
    inside = texts(run.folder, "classification")
    with pytest.raises(OfframpError, match=r"run, where .*texts\.jsonl lies"):
        offramp.train(**{**wanted, "attach": inside, "epochs": 2}, force=True)
    kept = yaml.safe_load((tmp_path / "run-full" / "recipe.yaml").read_text(encoding="utf-8"))
    assert kept["schedule"]["epochs"] == 1, "refused before any training"


def test_heads_with_a_hidden_layer_describe_themselves_to_engines(attached: Any) -> None:
    model = offramp.load(attached.folder, engine="torch")
    rows = factories.labelled_rows("classification", 20, seed=5)
    assert 0 < model.model.options.hidden < command.HIDDEN and model.model.options.pool == "meanmaxfirst"
    expected = [(one["label"], one["exit_layer"]) for one in model.predict(rows, max_disagreement=0.05)]
    for engine in engines.installed():
        found = offramp.load(attached.folder, engine=engine).predict(rows, max_disagreement=0.05)
        assert [(one["label"], one["exit_layer"]) for one in found] == expected


def test_points_may_come_from_texts_of_their_own(fine_tuned: Path, tmp_path: Path) -> None:
    text = texts(tmp_path, "classification", 200)
    rows = factories.labelled_rows("classification", 90, seed=21)
    fresh = factories.write_jsonl(tmp_path / "fresh.jsonl", [{"text": row["text"]} for row in rows])
    run = offramp.attach(fine_tuned, text, tmp_path / "run", held_out=fresh, exits="1,2")
    assert (run.summary["texts"], run.summary["held_out"]) == (200, 60)
    assert "fresh.jsonl" in run.points.data["name"] and str(tmp_path) not in run.points.data["name"]
    with pytest.raises(OfframpError, match=r"450 texts there.*|.*fresh\.jsonl"):
        offramp.attach(fine_tuned, text, tmp_path / "other", held_out=fresh, risk=0.01)


def test_labelled_rows_that_break_the_promise_are_warned_about(
    fine_tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = factories.labelled_rows("classification", 40, seed=9)
    labels = factories.write_jsonl(tmp_path / "labels.jsonl", rows)
    found = {"rows": 40, "full": {"accuracy": 1.0}, "default": {"accuracy": 0.5}, "disagreement": 0.5, "mac_share": 0.2}
    monkeypatch.setattr(command, "_score_labelled", lambda *_: found)
    with pytest.warns(UserWarning, match="--held-out"):
        offramp.attach(fine_tuned, texts(tmp_path, "classification"), tmp_path / "run", labels=labels, exits="1,2")


def test_a_latency_becomes_the_default_and_labelled_rows_are_scored_at_it(fine_tuned: Path, tmp_path: Path) -> None:
    labels = factories.write_jsonl(tmp_path / "labels.jsonl", factories.labelled_rows("classification", 40, seed=9))
    text = texts(tmp_path, "classification", 400)
    run = offramp.attach(fine_tuned, text, tmp_path / "run", latency="20s", labels=labels, exits="1,2")
    assert run.points.default == {"kind": "latency", "value": 20.0} and len(run.points.latencies) == 1
    model, rows = offramp.load(run.folder), [row["text"] for row in factories.labelled_rows("classification", 9)]
    assert model.points.default == run.points.default
    assert model.predict(rows) == model.predict(rows, latency="20s")
    stored = yaml.safe_load((run.folder / "recipe.yaml").read_text(encoding="utf-8"))["summary"]
    assert stored["labelled"] == run.summary["labelled"] and run.summary["labelled"]["rows"] == 40


def test_a_latency_that_is_refused_leaves_a_folder_that_answers(
    fine_tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OfframpError("5ms", "a model that takes 6ms", "give 7ms or more")

    monkeypatch.setattr(command, "find_latency_point", refuse)
    with pytest.raises(OfframpError, match=r"give 7ms or more(.|\n)*run"):
        offramp.attach(fine_tuned, texts(tmp_path, "classification", 400), tmp_path / "run", latency="5ms", exits="1,2")
    model = offramp.load(tmp_path / "run")
    assert model.predict(["a good film"]) == model.predict(["a good film"], max_disagreement=0.01)


@pytest.mark.parametrize("backbone", ["modernbert"])
def test_parts_are_measured_of_models_that_the_native_engine_does_not_serve(
    backbone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "import_native", lambda: None)
    monkeypatch.setattr(engines, "find_spec", lambda name: name if name == "offramp_native" else None)
    layer, exits = command.measure_parts(factories.exit_network(backbone=backbone), factories.data(), rounds=1)
    assert layer > 0.0 and exits


@pytest.mark.parametrize("read", ["text", "labels", "held_out", "model"])
def test_a_folder_that_is_read_is_never_replaced(trained: Path, tmp_path: Path, read: str) -> None:
    own = Path(shutil.copytree(trained, tmp_path / "own"))
    inside = texts(own, "classification")
    before, outside = factories.read_files(own), texts(tmp_path, "classification")
    sources = {"model": str(trained), "text": outside, read: str(own) if read == "model" else inside}
    with pytest.raises(OfframpError, match=r"which is read|lies"):
        offramp.attach(sources.pop("model"), sources.pop("text"), own, force=True, exits="1", **sources)  # type: ignore[arg-type]
    assert factories.read_files(own) == before


def test_held_out_texts_that_are_among_the_texts_are_left_out(trained: Path, tmp_path: Path) -> None:
    source = texts(tmp_path, "classification", 200)
    with pytest.raises(OfframpError, match=r"0 rows of(.|\n)*not among those of --text"):
        offramp.attach(trained, source, tmp_path / "all", held_out=source, exits="1,2")
    rows = [
        {"text": f"{row['text']} {i}"} for i, row in enumerate(factories.labelled_rows("classification", 90, seed=3))
    ]
    known = [json.loads(line) for line in Path(source).read_text().splitlines()[:40]]
    mixed = factories.write_jsonl(tmp_path / "mixed.jsonl", [*known, *rows])
    with pytest.warns(UserWarning, match=r"40 of 130 rows(.|\n)*left out"):
        run = offramp.attach(trained, source, tmp_path / "run", held_out=mixed, exits="1,2")
    assert run.summary["held_out"] == 60


@pytest.mark.filterwarnings("ignore")
def test_the_texts_of_attach_prove_nothing_again(trained: Path, tmp_path: Path) -> None:
    """Four fifths of them trained exits or found settings: calibrate leaves those out."""
    numbered = [{"text": f"{row['text']} {i}"} for i, row in enumerate(factories.labelled_rows("classification", 400))]
    source = factories.write_jsonl(tmp_path / "texts.jsonl", numbered)
    run = offramp.attach(trained, source, tmp_path / "run", exits="1,2")
    again = offramp.calibrate(run.folder, source, force=True)
    assert {one.rows for one in again.disagreements} == {80 - 80 // 3}
