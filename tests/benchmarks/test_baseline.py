"""benchmarks/baseline.py: a result cell without a Transformer, from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import baseline
from tests.factories import write_jsonl

TEXTS = {1: ["good film", "a good and fine film", "good good"], 0: ["bad film", "a bad and poor film", "bad bad"]}
ROWS = [{"text": text, "label": label} for label, texts in TEXTS.items() for text in texts * 3]


def test_script_writes_a_result_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_jsonl(tmp_path / "films.jsonl", ROWS), tmp_path / "cell.json"
    monkeypatch.setattr(sys, "argv", ["baseline.py", "--train", source, "--data", source, "--json", str(out)])
    baseline.main()
    assert "1.0000" in capsys.readouterr().out
    cell = json.loads(out.read_text())
    assert cell["split"] == "films" and cell["command"].startswith("python benchmarks/baseline.py")


def test_rows_with_two_texts_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [{"text_a": "a film", "text_b": row["text"], "label": row["label"]} for row in ROWS]
    source = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    baseline.main(["--train", source, "--data", source])
    assert "1.0000" in capsys.readouterr().out
