"""Standard output that is closed, full or no longer read, and missing files: no traceback, and a quick answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import factories
from tests.cli.calls import Call
from tests.processes import start_command, wait_for_command


def fill_output() -> None:
    """Let standard output be a device that is full."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    sys.stdout = os.fdopen(1, "w")


def break_output() -> None:
    """Let standard output be a pipe that is read by no process."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    sys.stdout = os.fdopen(1, "w")


def close_output() -> None:
    """Close standard output, as `>&-` does before Python starts."""
    os.close(1)
    sys.stdout = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("prepare", "code"), [(fill_output, 2), (break_output, 1), (close_output, 0)], ids=["full", "broken", "closed"]
)
@pytest.mark.parametrize("words", [["predict", "--input", "ROWS"], ["eval", "--data", "ROWS"], ["info"]])
def test_an_unusable_standard_output_ends_cleanly(
    prepare: Callable[[], None], code: int, words: list[str], trained: Path, tmp_path: Path
) -> None:
    rows = factories.write_jsonl(tmp_path / "rows.jsonl", factories.labelled_rows("classification", 8))
    arguments = [words[0], str(trained), *(rows if word == "ROWS" else word for word in words[1:])]
    assert wait_for_command(start_command(arguments, tmp_path / "log", prepare)) == code
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log and "Exception ignored" not in log
    assert "No space left" in log or code != 2


MISSING = {
    "train": ["--model", "minilm", "--train", "gone.jsonl", "--out", "run"],
    "train, dev": ["--model", "minilm", "--train", "rows.jsonl", "--dev", "gone.jsonl", "--out", "run"],
    "train, init": ["--init", "gone", "--model", "minilm", "--train", "rows.jsonl", "--out", "run"],
    "attach": ["minilm", "--text", "gone.jsonl", "--out", "run"],
    "attach, model": ["./gone", "--text", "rows.jsonl", "--out", "run"],
    "serve": ["gone"],
    "serve, named": ["films=gone"],
    "compare": ["--data", "gone", "--out", "out"],
    "compare, model": ["--data", ".", "--models", "minilm,./gone", "--out", "out"],
    "calibrate": [".", "--data", "gone.jsonl"],
    "eval": [".", "--data", "gone.jsonl"],
    "eval, run": ["gone", "--data", "rows.jsonl"],
    "predict": [".", "--input", "gone.jsonl"],
    "bench": [".", "--data", "gone.jsonl"],
    "explain": ["gone", "a film"],
    "info": ["gone"],
    "info, path": ["/gone/run"],
}


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_file_is_answered_before_torch_is_imported(what: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    words = [what.split(",")[0], *MISSING[what]]
    script = f"import sys\nfrom offramp.cli import main\ntry: main({words})\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "gone" in done.stderr and "no such" in done.stderr, done.stderr
    assert done.stdout == "False\n"


def test_an_error_of_the_system_is_one_message(call: Call, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: str) -> None:
        raise PermissionError(13, "Permission denied", run)

    monkeypatch.setattr("offramp.commands.info.info", refuse)
    result = call("info", trained)
    assert result.code == 2 and "Permission denied" in result.err and str(trained) in result.err


def test_a_text_with_bytes_that_are_no_utf8_is_refused(call: Call, trained: Path) -> None:
    result = call("explain", trained, b"a \xff film".decode(errors="surrogateescape"))
    assert result.code == 2 and "udcff" in result.err
