"""Every command by exit code and output."""

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
from offramp.utils.command_line import command_line
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


def test_commands_are_told_without_the_folders_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["offramp", "eval", "/home/me/runs/a", "--json=/home/me/out/b.json", "--set", "k=1", "~/x/y/z", "c/d"]
    monkeypatch.setattr(sys, "argv", typed)
    assert command_line() == "offramp eval runs/a --json=out/b.json --set k=1 y/z c/d"


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


def test_a_bug_of_ours_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.commands.info.environment", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["info", "--env"])


def test_ctrl_c_anywhere_is_130(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("offramp.commands.info.environment", stop)
    said = call("info", "--env")
    assert said.code == 130 and "stopped" in said.err and "a search or a comparison with --resume" in said.err
