"""Bad input of every kind: one message that names it, exit code 2, and nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offramp.inference.predictor import Predictor
from tests import factories
from tests.cli.calls import Call, train_words, write_rows

# case → options of `train` (bytes are the content of the training file), and what the message must name
BAD_TRAINING: dict[str, tuple[dict[str, Any] | bytes, list[str]]] = {
    "missing file": ({"train": "trian.jsonl"}, ["trian.jsonl", "no such file", "did you mean train.jsonl?"]),
    "missing dev file": ({"dev": "folder/dev.jsonl"}, ["no folder folder"]),
    "empty file": (b"", ["rows.jsonl", "no rows"]),
    "missing column": (b'{"sentence": "a", "label": 1}', ["'text'", "sentence, label", "--column text="]),
    "missing label": (b'{"text": "a", "lable": 1}', ["'label'", "text, lable", "--column label=lable"]),
    "renamed column": ({"column": "text=sentence"}, ["'sentence'", "columns found: text, label"]),
    "mixed labels": (b'{"text": "a", "label": 1}\n{"text": "b", "label": "x"}', ["mixed", "row 2 has 'x' (str)"]),
    "one label": (b'{"text": "a", "label": 1}\n{"text": "b", "label": 1}', ["one label only", "two classes"]),
    "invalid UTF-8": (b'{"text": "a", "label": 1}\n{"text": "\xff", "label": 0}', ["line 2", "UTF-8", "0xff"]),
    "invalid JSON": (b'{"text": "a", "label": 1}\n{"text": "b", "label"}', ["line 2", "JSON", "column 22"]),
    "empty text": (b'{"text": "a", "label": 1}\n{"text": " ", "label": 0}', ["row 2", "'text' is empty"]),
    "unknown ending": ({"train": "rows.xyz"}, ["rows.xyz", ".jsonl"]),
    "unknown method": ({"method": "magic"}, ["'magic'", "branchynet", "deebert", "full"]),
    "unknown task": ({"task": "chess"}, ["'chess'", "classification", "question_answering"]),
    "unknown backbone": ({"model": "gpt"}, ["'gpt2'", "modernbert", "roberta"]),
    "missing model": ({"model": "./nowhere"}, ["./nowhere", "no such folder", "config.json"]),
    "unknown setting": ({"method": "deebert", "set": "pol=mean"}, ["pol=mean", "pool"]),
    "bad choice": ({"method": "deebert", "set": "pool=median"}, ["'median'", "meanmax"]),
    "another bad choice": ({"method": "branchynet", "set": "weights=heavy"}, ["'heavy'", "uniform"]),
    "bad number": ({"method": "deebert", "set": "head_lr=fast"}, ["head_lr", "'fast'"]),
    "no setting": ({"method": "deebert", "set": "pool"}, ["'pool'", "--set name=value"]),
    "bad dev share": ({"dev_split": 1.5}, ["--dev-split 1.5"]),
    "bad rate": ({"lr": -1}, ["--lr -1"]),
    "bad precision": ({"precision": "fp8"}, ["--precision fp8", "bf16"]),
    "no epochs": ({"epochs": 0}, ["--epochs"]),
    "too short rows": ({"max_length": 2}, ["special tokens"]),
    "no run to start from": ({"init": "nowhere"}, ["nowhere", "no such folder"]),
    "no folder to write": ({"out": "train.jsonl"}, ["something else there"]),
    "the current folder": ({"out": "."}, ["--out ."]),
    "no name to write to": ({"out": ""}, ["--out"]),
    "the root": ({"out": "/"}, ["--out /"]),
    "the folder above": ({"out": "gpt/.."}, ["--out gpt/.."]),
    "a name that is too long": ({"out": 250 * "a"}, ["250 bytes", "aaa…"]),
    "a name that is far too long": ({"out": 5000 * "a"}, ["5000 bytes", "aaa…"]),
    "a link to nothing": ({"out": "dangling"}, ["dangling", "elsewhere"]),
    "a huge seed": ({"seed": 2**80}, [f"--seed {2**80}"]),
    "a negative seed": ({"seed": -1}, ["--seed -1"]),
    "the folder of the rows": ({"train": "gpt/rows.jsonl", "out": "gpt", "force": True}, ["gpt"]),
    "a folder that cannot be created": ({"out": "train.jsonl/run"}, ["train.jsonl/run"]),
}


@pytest.mark.parametrize("what", BAD_TRAINING)
def test_train_refuses_bad_input(call: Call, base: str, what: str) -> None:
    options, expected = BAD_TRAINING[what]
    Path("gpt").mkdir()
    Path("gpt/config.json").write_text('{"model_type": "gpt2"}')
    Path("rows.xyz").write_text("?")
    Path("gpt/rows.jsonl").write_text('{"text": "a", "label": 1}')
    Path("dangling").symlink_to("elsewhere")
    if isinstance(options, bytes):
        Path("rows.jsonl").write_bytes(options)
        options = {"train": "rows.jsonl"}
    result = call(*train_words(base, **options))
    assert result.code == 2 and result.out == ""
    assert all(word in result.err for word in expected), result.err
    assert result.err.count("offramp: ") <= 1 and result.err.count("\n") <= 6, "one message"
    assert not Path("run").exists() and not Path("run.partial").exists()


def test_train_refuses_a_label_that_only_dev_has(call: Call, base: str) -> None:
    write_rows("dev.jsonl", [{"text": "a film", "label": "good"}, {"text": "a film", "label": "ugly"}])
    result = call(*train_words(base, dev="dev.jsonl"))
    assert result.code == 2 and all(word in result.err for word in ("dev.jsonl", "row 2", "'ugly'", "'bad', 'good'"))


def test_train_refuses_a_method_that_does_not_serve_the_task(call: Call, base: str) -> None:
    write_rows("numbers.jsonl", factories.labelled_rows("regression", 8))
    for method in ("branchynet", "deebert", "fastbert", "shallow_deep"):
        result = call(*train_words(base, task="regression", method=method, train="numbers.jsonl"))
        assert result.code == 2 and all(word in result.err for word in (f"'{method}'", "'regression'", "full"))
        offered = result.err.split("use one of: ")[1]
        assert "berxit" in offered and "pabee" in offered and method not in offered


BAD_EVALUATION: dict[str, tuple[list[str], list[str]]] = {
    "no run": (["nowhere", "--data", "rows.jsonl"], ["nowhere", "no such folder", "--out of `offramp train`"]),
    "another folder": (["gpt", "--data", "rows.jsonl"], ["gpt", "without offramp.json"]),
    "no rows": (["RUN", "--data", "nothing.jsonl"], ["nothing.jsonl", "no such file"]),
    "no labels": (["RUN", "--data", "plain.jsonl"], ["'label'", "plain.jsonl", "columns found: text"]),
    "unknown label": (["RUN", "--data", "ugly.jsonl"], ["'ugly'", "ugly.jsonl"]),
    "budget above 1": (["RUN", "--data", "rows.jsonl", "--budget", "1.5"], ["budget=1.5", "above 0 and at most 1"]),
    "budget 0": (["RUN", "--data", "rows.jsonl", "--budget", "0"], ["budget=0", "above 0 and at most 1"]),
    "unknown engine": (["RUN", "--data", "rows.jsonl", "--engine", "abacus"], ["'abacus'", "torch"]),
    "unknown setting": (["RUN", "--data", "rows.jsonl", "--set", "patience=3"], ["patience=3", "threshold"]),
    "wrong unit": (["RUN", "--data", "rows.jsonl", "--set", "threshold=50"], ["nats", "threshold=50"]),
    "too many nats": (["RUN", "--data", "rows.jsonl", "--set", "threshold=0.9"], ["2 labels have at most 0.693"]),
    "bad setting": (["RUN", "--data", "rows.jsonl", "--set", "threshold=-1"], ["threshold=-1.0"]),
    "two knobs": (["RUN", "--data", "rows.jsonl", "--set", "threshold=1", "--budget", "1"], ["only one of them"]),
    "no data": (["RUN"], ["--data"]),
    "unwritable": (["RUN", "--data", "rows.jsonl", "--json", "rows.jsonl/cell.json"], ["rows.jsonl/cell.json"]),
}


@pytest.mark.parametrize("what", BAD_EVALUATION)
def test_eval_refuses_bad_input(call: Call, trained: Path, what: str) -> None:
    words, expected = BAD_EVALUATION[what]
    Path("gpt").mkdir()
    write_rows("rows.jsonl", factories.labelled_rows("classification", 4))
    write_rows("plain.jsonl", [{"text": "a film"}])
    write_rows("ugly.jsonl", [{"text": "a film", "label": "ugly"}])
    result = call("eval", *(str(trained) if word == "RUN" else word for word in words))
    assert result.code == 2 and all(word in result.err for word in expected), result.err


BAD_OUTPUT: dict[str, list[str]] = {
    "predict": ["--input", "rows.jsonl", "--output"],
    "eval": ["--data", "rows.jsonl", "--json"],
    "eval, curve": ["--data", "rows.jsonl", "--curve", "--json"],
    "bench": ["--data", "rows.jsonl", "--json"],
    "bench, png": ["--data", "rows.jsonl", "--png"],
    "explain": ["a film", "--html"],
    "report": ["--markdown"],
}


@pytest.mark.parametrize("name", ["folder", "", "rows.jsonl/below.jsonl"])
@pytest.mark.parametrize("what", BAD_OUTPUT)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    call: Call, trained: Path, monkeypatch: pytest.MonkeyPatch, what: str, name: str
) -> None:
    monkeypatch.setattr(Predictor, "load", lambda *_: pytest.fail("nothing may be loaded"))
    write_rows("rows.jsonl", factories.labelled_rows("classification", 4))
    Path("folder").mkdir()
    result = call(what.split(",")[0], trained, *BAD_OUTPUT[what], name)
    assert result.code == 2 and "a file to write" in result.err and (name or "no name") in result.err
    assert result.err.count("\n") <= 4 and not list(Path("folder").iterdir())


@pytest.mark.parametrize("more", [[], ["--long", "truncate"], ["--cluster", "local", "--output", "out"]])
def test_a_way_to_join_windows_needs_windows(call: Call, trained: Path, more: list[str]) -> None:
    write_rows("rows.jsonl", [{"text": "a film"}])
    result = call("predict", trained, "--input", "rows.jsonl", "--window-pool", "max", *more)
    assert result.code == 2 and "--window-pool max with --long truncate" in result.err
    result = call("predict", trained, "--input", "rows.jsonl", "--cluster", "local", "--output", "")
    assert result.code == 2 and "a folder for the answers" in result.err


def test_predict_and_info_refuse_bad_input(call: Call, trained: Path) -> None:
    write_rows("empty-text.jsonl", [{"text": "a film"}, {"text": ""}])
    result = call("predict", trained, "--input", "empty-text.jsonl", "--output", "answers.jsonl", "--strict")
    assert result.code == 2 and "line 2: 'text' is empty" in result.err and not Path("answers.jsonl").exists()
    result = call("predict", trained, "--input", "empty-text.jsonl")
    assert result.code == 0 and result.out.count("\n") == 2 and "line 2: 'text' is empty" in result.err
    assert call("predict", trained, "--input", "empty-text.jsonl", "--budget", "2").code == 2
    assert call("predict", "nowhere", "--input", "empty-text.jsonl").code == 2
    assert "offramp info RUN" in call("info").err
    assert call("info", "nowhere").code == 2
    assert call("frobnicate").code == 2
