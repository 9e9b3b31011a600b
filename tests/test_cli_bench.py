"""`offramp bench` and `--latency`, by exit code and output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import runs
from tests.test_cli import Call, call, rows

__all__ = ["call"]  # the fixture of the other commands' tests


@pytest.fixture
def own(trained: Path, tmp_path: Path) -> Path:
    """A run that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "own"))


def test_bench_prints_draws_and_writes(call: Call, trained: Path) -> None:
    data = rows("test.jsonl", runs.rows("classification", 10, 6))
    who = ("--budgets", "0.5,default", "--engines", "torch", "--against", "hf", "--precisions", "fp32")
    how = ("--batch-sizes", "1,4", "--rounds", 1, "--no-memory", "--threads", 1, "--rows", 8)
    said = call("bench", trained, "--data", data, *who, *how, "--json", "b.json", "--png", "b.png")
    assert said.code == 0 and "offramp torch" in said.out and "hf-sdpa" in said.out and "realised" in said.out
    made = json.loads(Path("b.json").read_text())
    assert made["row_count"] == 8 and made["command"].startswith("offramp bench") and made["threads"] == 1
    assert {entry["budget"] for entry in made["rows"]} == {1.0, 0.5, "default", None}  # the full model is always there
    assert Path("b.png").read_bytes().startswith(b"\x89PNG")


BAD = {
    "an unknown peer": (["--against", "tensorflow"], "use some of: hf"),
    "an unknown engine": (["--engines", "abacus"], "engines of ours"),
    "no batch size": (["--batch-sizes", "many"], "--batch-sizes 1,8,32"),
    "no such budget": (["--budgets", "cheap"], "max-loss=0.01"),
    "an order": (["--orders", "random"], "given, sorted"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused(call: Call, trained: Path, what: str) -> None:
    words, part = BAD[what]
    data = rows("test.jsonl", runs.rows("classification", 4, 6))
    said = call("bench", trained, "--data", data, *words, "--json", "b.json")
    assert said.code == 2 and part in said.err and not Path("b.json").exists()


def test_a_latency_is_found_kept_and_used(call: Call, own: Path) -> None:
    data = rows("new.jsonl", runs.rows("classification", 20, 7))
    torch = ("--engine", "torch")
    said = call("calibrate", own, "--data", data, "--latency", "10s", "--percentile", 90, *torch)
    assert said.code == 0 and "90 % of single answers within 10000ms on torch fp32" in said.out
    (timed,) = json.loads((own / "points.json").read_text())["latencies"]
    assert timed["percentile"] == 90 and 0 < timed["measured"] <= 10000 and (own / "latency.json").is_file()
    assert call("eval", own, "--data", data, "--latency", "10s", *torch).code == 0
    assert call("predict", own, "--input", data, "--output", "out.jsonl", "--latency", "20s", *torch).code == 0
    refused = call("predict", own, "--input", data, "--latency", "1us", *torch)
    assert refused.code == 2 and "10000ms on torch" in refused.err
    assert call("calibrate", own, "--data", data).code == 0  # new points: what was shown of the old ones is gone
    assert json.loads((own / "points.json").read_text())["latencies"] == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--latency", "5"], "5ms, 0.2s or 800us"),
        (["--latency", "5ms", "--percentile", "0"], "percentile"),
        (["--latency", "5ms", "--engine", "abacus"], "engine"),
        (["--latency", "1us", "--engine", "torch"], "fastest point takes"),
        (["--risk", "0.2", "--precision", "bf16"], "without --latency"),
    ],
)
def test_latencies_that_cannot_be(call: Call, own: Path, words: list[str], part: str) -> None:
    data, before = rows("new.jsonl", runs.rows("classification", 12, 7)), (own / "points.json").read_text()
    said = call("calibrate", own, "--data", data, *words)
    assert said.code == 2 and part in said.err and (own / "points.json").read_text() == before
