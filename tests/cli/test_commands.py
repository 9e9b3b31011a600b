"""Every command by exit code and output."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offramp
from offramp import cli
from offramp.inference.predictor import CHUNK, Predictor
from tests import factories
from tests.cli.calls import Call, CommandResult, train_words, write_rows

COMMANDS = cli.names()


def test_help_lists_every_command_and_each_has_its_own(call: Call) -> None:
    result = call("--help")
    assert result.code == 0 and all(command in result.out for command in COMMANDS)
    for command in COMMANDS:
        assert call(command, "--help").code == 0
    assert call().code == 2 and "Usage" in call().out + call().err


def test_help_needs_no_torch() -> None:
    help_, heavy = "try: main(['--help'])", "finally: print('heavy:', 'torch' in sys.modules)"
    script = "\n".join(["import sys", "from offramp.cli import main", help_, heavy])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "heavy: False" in done.stdout, done.stderr


@pytest.mark.parametrize("name", cli.MOVED)
def test_old_command_names_answer_with_where_the_command_went(call: Call, name: str) -> None:
    for words in ([name], [name, "--help"], [name, "run", "--data", "x.jsonl"]):
        result = call(*words)
        assert result.code == 2 and result.out == "" and cli.MOVED[name] in result.err
    assert name not in cli.names()


def test_moved_scripts_exist() -> None:
    root = Path(__file__).parents[2]
    scripts = [place.split()[1] for place in cli.MOVED.values() if place.startswith("python ")]
    assert [script for script in scripts if not (root / script).is_file()] == []


def test_only_the_command_that_runs_is_imported() -> None:
    script = "import sys, offramp.cli as c\ntry: c.main(['info', '--help'])\nfinally: print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "offramp.cli.info" in loaded and "offramp.cli.train" not in loaded and "torch" not in loaded


def test_version_and_info_env(call: Call) -> None:
    assert call("--version") == CommandResult(0, f"{offramp.__version__}\n", "")
    result = call("info", "--env")
    assert result.code == 0 and all(word in result.out for word in ("torch", "transformers", "python", "hardware"))


def test_train_eval_predict_info(call: Call, base: str, tmp_path: Path) -> None:
    result = call(*train_words(base, method="branchynet", set="pool=mean"))
    assert result.code == 0 and "written to run" in result.out and "offramp eval run" in result.out
    assert all(part in result.err for part in ("14 rows", "2 to choose on")) and "epoch 1" in result.err
    result = call("info", "run")
    assert result.code == 0 and all(part in result.out for part in ("branchynet", "'pool': 'mean'", "share of MACs"))
    assert call("eval", "run", "--data", "train.jsonl", "--budget", "1.0").code == 0
    assert call("predict", "run", "--input", "train.jsonl", "--output", "answers.jsonl").code == 0
    assert len(Path("answers.jsonl").read_text().splitlines()) == 16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "run", "train.jsonl"]


@pytest.mark.parametrize("how", [["--budget", "0.5"], ["--set", "threshold=0.3"], []])
def test_eval_writes_the_result_cell(call: Call, trained: Path, how: list[str]) -> None:
    data = trained.parent / "dev.jsonl"
    result = call("eval", trained, "--data", data, *how, "--limit", 10, "--batch-size", 4, "--json", "new/cell.json")
    assert result.code == 0 and "accuracy" in result.out and "share of full MACs" in result.out
    cell = json.loads(Path("new/cell.json").read_text())
    assert (cell["rows"], cell["batch_size"], cell["split"]) == (10, 4, "dev") and "/dev.jsonl" in cell["command"]
    assert cell["command"].startswith("offramp eval ") and str(trained.parent) not in json.dumps(cell)


def test_eval_writes_json_alone_to_standard_output(call: Call, trained: Path) -> None:
    write_rows("dev.jsonl", factories.labelled_rows("classification", 8))
    result = call("eval", trained, "--data", "dev.jsonl", "--json", "-")
    assert json.loads(result.out)["rows"] == 8
    assert len(json.loads(call("eval", trained, "--data", "dev.jsonl", "--curve", "--json", "-").out)) > 0


def test_eval_curve_writes_a_cell_for_each_chosen_point(call: Call, trained: Path) -> None:
    data = trained.parent / "dev.jsonl"
    result = call("eval", trained, "--data", data, "--curve", "--json", "curve.json")
    assert result.code == 0 and "max_loss 0.005" in result.out and "expected share" in result.out
    cells = json.loads(Path("curve.json").read_text())
    assert [cell["chosen"]["by"] for cell in cells] == ["full", *["max_loss"] * 3] and cells[0]["curve"]
    refused = call("eval", trained, "--data", data, "--curve", "--budget", 0.5)
    assert refused.code == 2 and "--curve" in refused.err


def test_predict_writes_to_standard_output_and_reads_standard_input(
    call: Call, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows("in.jsonl", [{"sentence": "a good film"}, {"sentence": "bad"}])
    from_file = call("predict", trained, "--input", "in.jsonl", "--column", "text=sentence", "--budget", "1.0")
    assert from_file.code == 0 and "rows answered: 2" in from_file.err
    answers = [json.loads(line) for line in from_file.out.splitlines()]
    assert [answer["exit_layer"] for answer in answers] == [3, 3]
    none = call("predict", trained, "--input", "in.jsonl")
    assert none.code == 1 and none.out.count('"error"') == 2 and "bad rows, answered with an error: 2" in none.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a good film\nbad\n")))
    from_pipe = call("predict", trained, "--input", "-", "--budget", "1.0")
    assert (from_pipe.code, from_pipe.out) == (0, from_file.out)
    cheap = call("predict", trained, "--input", "in.jsonl", "--column", "text=sentence", "--budget", "1e-6")
    assert cheap.code == 0 and "budget 1e-06" in cheap.err


def test_train_and_eval_read_csv_and_compressed_tsv(call: Call, base: str) -> None:
    lines = [f"{row['text']},{row['label']}" for row in factories.labelled_rows("classification", 12)]
    Path("rows.csv").write_text("\n".join(["sentence,label", *lines]))
    Path("rows.tsv.gz").write_bytes(gzip.compress("\n".join(["text,label", *lines]).replace(",", "\t").encode()))
    given = train_words(base, train="rows.csv", dev="rows.tsv.gz", column="text=sentence")
    assert call(*given).code == 2  # the renaming holds for both files
    Path("rows.tsv.gz").write_bytes(gzip.compress("\n".join(["sentence,label", *lines]).replace(",", "\t").encode()))
    assert call(*given).code == 0
    assert call("eval", "run", "--data", "rows.csv", "--column", "text=sentence").code == 0


def test_texts_that_are_too_long_are_truncated_and_counted(call: Call, base: str, trained: Path) -> None:
    long = {"text": "a good film " * 40, "label": "good"}
    write_rows("long.jsonl", [*factories.labelled_rows("classification", 8), long])
    write_rows("dev.jsonl", [*factories.labelled_rows("classification", 4), long])
    result = call(*train_words(base, train="long.jsonl", dev="dev.jsonl"))
    assert result.code == 0 and "2 truncated to 64 tokens" in result.err
    result = call(*train_words(base, train="long.jsonl", dev="dev.jsonl", max_length=9, out="short"))
    assert "truncated to 9 tokens" in result.err
    assert "1 truncated to 64 tokens" in call("predict", trained, "--input", "long.jsonl").err
    assert "truncated rows" in call("eval", trained, "--data", "long.jsonl").out


def test_train_replaces_a_finished_run_only_with_force(call: Call, base: str) -> None:
    assert call(*train_words(base)).code == 0
    before = factories.read_files(Path("run"))
    result = call(*train_words(base, method="branchynet"))
    assert result.code == 2 and "a finished run there" in result.err and "--force" in result.err
    assert factories.read_files(Path("run")) == before
    assert call(*train_words(base, method="branchynet", force=True)).code == 0
    assert json.loads(Path("run/offramp.json").read_text())["method"] == "branchynet"


def test_main_lets_unexpected_exceptions_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.commands.info.environment", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["info", "--env"])


def test_main_exits_with_130_after_ctrl_c(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("offramp.commands.info.environment", stop)
    result = call("info", "--env")
    assert result.code == 130 and "stopped" in result.err and "--resume" in result.err


def test_predict_names_the_file_of_its_answers_after_ctrl_c(
    call: Call, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = factories.labelled_rows("classification", 2 * CHUNK)
    source, run = factories.write_jsonl(Path("in.jsonl"), rows), Predictor.run

    def stop_at_the_second(model: Predictor, *given: Any) -> Any:
        monkeypatch.setattr(Predictor, "run", stop)
        return run(model, *given)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Predictor, "run", stop_at_the_second)
    result = call("predict", trained, "--input", source, "--output", "out.jsonl", "--batch-size", 1)
    assert result.code == 130 and "out.jsonl.partial" in result.err and "stopped" in result.err
    assert Path("out.jsonl.partial").read_text().count("\n") == CHUNK and not Path("out.jsonl").exists()
