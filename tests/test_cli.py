"""Every command by exit code and output; every kind of bad input by its message."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import offramp
from offramp import cli
from tests import runs

COMMANDS = cli.names()
NOISE = ["Traceback", "Loading weights", "Writing model shards", "Warning:", "it/s]"]


class Said(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Call = Callable[..., Said]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """`offramp WORDS` in a folder of its own, as the console script runs it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> Said:
        capsys.readouterr()
        arguments = [str(word) for word in words]
        monkeypatch.setattr(sys, "argv", ["offramp", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        said = capsys.readouterr()
        assert not [noise for noise in NOISE if noise in said.out + said.err], said
        return Said(int(stop.value.code or 0), said.out, said.err)

    return run


def rows(name: str, content: runs.Rows) -> str:
    return runs.jsonl(Path(name), content)


def training(base: str, **options: Any) -> list[str]:
    """A short `offramp train` command; underscores become dashes, True a bare flag."""
    if not Path("train.jsonl").exists():
        rows("train.jsonl", runs.rows("classification", 16))
    given = {"model": base, "train": "train.jsonl", "out": "run", "epochs": 1, "batch_size": 8, **options}
    words = [(f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])) for name, value in given.items()]
    return ["train", *(word for pair in words for word in pair)]


def test_help_lists_the_commands(call: Call) -> None:
    said = call("--help")
    assert said.code == 0 and all(command in said.out for command in COMMANDS)
    for command in COMMANDS:
        assert call(command, "--help").code == 0
    assert call().code == 2 and "Usage" in call().out + call().err


def test_help_is_quick_and_needs_no_torch() -> None:
    help_, heavy = "try: main(['--help'])", "finally: print('heavy:', 'torch' in sys.modules)"
    script = "\n".join(["import sys", "from offramp.cli import main", help_, heavy])
    quickest = 100.0
    for _ in range(2):
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        quickest = min(quickest, time.monotonic() - started)
        assert done.returncode == 0 and "heavy: False" in done.stdout, done.stderr
    assert quickest < 3.0


def test_version_and_environment(call: Call) -> None:
    assert call("version") == call("--version") == Said(0, f"{offramp.__version__}\n", "")
    said = call("info", "--env")
    assert said.code == 0 and all(word in said.out for word in ("torch", "transformers", "python", "hardware"))


def test_train_eval_predict_info(call: Call, base: str, tmp_path: Path) -> None:
    said = call(*training(base, method="branchynet", set="pool=mean"))
    assert said.code == 0 and "written to run" in said.out and "offramp eval run" in said.out
    assert "14 rows to train on, 2 to choose on" in said.err and "epoch 1" in said.err
    said = call("info", "run")
    assert said.code == 0 and "branchynet" in said.out and "'pool': 'mean'" in said.out and "share of MACs" in said.out
    assert call("eval", "run", "--data", "train.jsonl", "--budget", "1.0").code == 0
    assert call("predict", "run", "--input", "train.jsonl", "--output", "answers.jsonl").code == 0
    assert len(Path("answers.jsonl").read_text().splitlines()) == 16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "run", "train.jsonl"]


@pytest.mark.parametrize("how", [["--budget", "0.5"], ["--set", "threshold=0.3"], []])
def test_eval_writes_the_cell(call: Call, trained: Path, how: list[str]) -> None:
    data = trained.parent / "dev.jsonl"
    said = call("eval", trained, "--data", data, *how, "--limit", 10, "--batch-size", 4, "--json", "new/cell.json")
    assert said.code == 0 and "accuracy" in said.out and "share of full MACs" in said.out
    cell = json.loads(Path("new/cell.json").read_text())
    assert (cell["rows"], cell["batch_size"], cell["split"]) == (10, 4, "dev") and "/dev.jsonl" in cell["command"]
    assert cell["command"].startswith("offramp eval ") and str(trained.parent) not in json.dumps(cell)


def test_eval_writes_a_curve(call: Call, trained: Path) -> None:
    data = trained.parent / "dev.jsonl"
    said = call("eval", trained, "--data", data, "--curve", "--json", "curve.json")
    assert said.code == 0 and "max_loss 0.005" in said.out and "expected share" in said.out
    cells = json.loads(Path("curve.json").read_text())
    assert [cell["chosen"]["by"] for cell in cells] == ["full", *["max_loss"] * 3] and cells[0]["curve"]
    refused = call("eval", trained, "--data", data, "--curve", "--budget", 0.5)
    assert refused.code == 2 and "--curve" in refused.err


def test_predict_to_standard_output_and_from_standard_input(
    call: Call, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows("in.jsonl", [{"sentence": "a good film"}, {"sentence": "bad"}])
    from_file = call("predict", trained, "--input", "in.jsonl", "--column", "text=sentence", "--budget", "1.0")
    assert from_file.code == 0 and "rows answered: 2" in from_file.err
    answers = [json.loads(line) for line in from_file.out.splitlines()]
    assert [answer["exit_layer"] for answer in answers] == [3, 3]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a good film\nbad\n")))
    from_pipe = call("predict", trained, "--input", "-", "--budget", "1.0")
    assert (from_pipe.code, from_pipe.out) == (0, from_file.out)
    cheap = call("predict", trained, "--input", "in.jsonl", "--column", "text=sentence", "--budget", "1e-6")
    assert cheap.code == 0 and "no point within budget 1e-06: using the cheapest" in cheap.err


def test_files_of_every_kind(call: Call, base: str) -> None:
    lines = [f"{row['text']},{row['label']}" for row in runs.rows("classification", 12)]
    Path("rows.csv").write_text("\n".join(["sentence,label", *lines]))
    Path("rows.tsv.gz").write_bytes(gzip.compress("\n".join(["text,label", *lines]).replace(",", "\t").encode()))
    given = training(base, train="rows.csv", dev="rows.tsv.gz", column="text=sentence")
    assert call(*given).code == 2  # the renaming holds for both files
    Path("rows.tsv.gz").write_bytes(gzip.compress("\n".join(["sentence,label", *lines]).replace(",", "\t").encode()))
    assert call(*given).code == 0
    assert call("eval", "run", "--data", "rows.csv", "--column", "text=sentence").code == 0


def test_texts_that_are_too_long_are_cut_and_counted(call: Call, base: str, trained: Path) -> None:
    long = {"text": "a good film " * 40, "label": "good"}
    rows("long.jsonl", [*runs.rows("classification", 8), long])
    rows("dev.jsonl", [*runs.rows("classification", 4), long])
    said = call(*training(base, train="long.jsonl", dev="dev.jsonl"))
    assert said.code == 0 and "2 truncated to 64 tokens" in said.err
    said = call(*training(base, train="long.jsonl", dev="dev.jsonl", max_length=9, out="short"))
    assert "truncated to 9 tokens" in said.err
    assert "1 truncated to 64 tokens" in call("predict", trained, "--input", "long.jsonl").err
    assert "truncated rows" in call("eval", trained, "--data", "long.jsonl").out


def test_an_existing_run_needs_force(call: Call, base: str) -> None:
    assert call(*training(base)).code == 0
    before = runs.files(Path("run"))
    said = call(*training(base, method="branchynet"))
    assert said.code == 2 and "a finished run there" in said.err and "--force" in said.err
    assert runs.files(Path("run")) == before
    assert call(*training(base, method="branchynet", force=True)).code == 0
    assert json.loads(Path("run/offramp.json").read_text())["method"] == "branchynet"


# what is wrong → options of `train` (a string is the content of the training file), and what the message must say
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
    "unknown task": ({"task": "chess"}, ["'chess'", "classification", "span"]),
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
    "a folder that cannot be made": ({"out": "train.jsonl/run"}, ["train.jsonl/run"]),
}


@pytest.mark.parametrize("what", BAD_TRAINING)
def test_bad_training_input(call: Call, base: str, what: str) -> None:
    options, expected = BAD_TRAINING[what]
    Path("gpt").mkdir()
    Path("gpt/config.json").write_text('{"model_type": "gpt2"}')
    Path("rows.xyz").write_text("?")
    if isinstance(options, bytes):
        Path("rows.jsonl").write_bytes(options)
        options = {"train": "rows.jsonl"}
    said = call(*training(base, **options))
    assert said.code == 2 and said.out == ""
    assert all(word in said.err for word in expected), said.err
    assert said.err.count("offramp: ") <= 1 and said.err.count("\n") <= 6, "one message"
    assert not Path("run").exists() and not Path("run.partial").exists()


def test_a_label_in_dev_that_train_lacks(call: Call, base: str) -> None:
    rows("dev.jsonl", [{"text": "a film", "label": "good"}, {"text": "a film", "label": "ugly"}])
    said = call(*training(base, dev="dev.jsonl"))
    assert said.code == 2 and all(word in said.err for word in ("dev.jsonl", "row 2", "'ugly'", "'bad', 'good'"))


def test_a_method_that_does_not_fit_the_task_names_those_that_do(call: Call, base: str) -> None:
    rows("numbers.jsonl", runs.rows("regression", 8))
    for method in ("branchynet", "deebert", "fastbert", "shallow_deep"):
        said = call(*training(base, task="regression", method=method, train="numbers.jsonl"))
        assert said.code == 2 and all(word in said.err for word in (f"'{method}'", "'regression'", "full"))
        offered = said.err.split("use one of: ")[1]
        assert "berxit" in offered and "pabee" in offered and method not in offered


BAD_EVALUATION: dict[str, tuple[list[str], list[str]]] = {
    "no run": (["nowhere", "--data", "rows.jsonl"], ["nowhere", "no such folder", "offramp train --out"]),
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
def test_bad_evaluation_input(call: Call, trained: Path, what: str) -> None:
    words, expected = BAD_EVALUATION[what]
    Path("gpt").mkdir()
    rows("rows.jsonl", runs.rows("classification", 4))
    rows("plain.jsonl", [{"text": "a film"}])
    rows("ugly.jsonl", [{"text": "a film", "label": "ugly"}])
    said = call("eval", *(str(trained) if word == "RUN" else word for word in words))
    assert said.code == 2 and all(word in said.err for word in expected), said.err


def test_bad_prediction_and_info_input(call: Call, trained: Path) -> None:
    rows("empty-text.jsonl", [{"text": "fine"}, {"text": ""}])
    said = call("predict", trained, "--input", "empty-text.jsonl", "--output", "answers.jsonl")
    assert said.code == 2 and "row 2: 'text' is empty" in said.err and not Path("answers.jsonl").exists()
    assert call("predict", trained, "--input", "empty-text.jsonl", "--budget", "2").code == 2
    assert call("predict", "nowhere", "--input", "empty-text.jsonl").code == 2
    assert "offramp info RUN" in call("info").err
    assert call("info", "nowhere").code == 2
    assert call("frobnicate").code == 2


def test_a_bug_of_ours_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.study.console.show_environment", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["info", "--env"])


def test_ctrl_c_anywhere_is_130(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("offramp.study.console.show_environment", stop)
    said = call("info", "--env")
    assert said.code == 130 and "stopped" in said.err and "a search or a comparison with --resume" in said.err
