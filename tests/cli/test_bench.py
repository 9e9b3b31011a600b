"""`offramp bench` and `offramp calibrate --latency`, by exit code and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import factories
from tests.cli.calls import Call, write_rows


def test_bench_prints_draws_and_writes(call: Call, trained: Path) -> None:
    data = write_rows("test.jsonl", factories.labelled_rows("classification", 10, 6))
    engines = ("--budgets", "0.5,default", "--engines", "torch", "--against", "hf", "--precisions", "fp32")
    how = ("--batch-sizes", "1,4", "--rounds", 1, "--no-memory", "--threads", 1, "--rows", 8)
    result = call("bench", trained, "--data", data, *engines, *how, "--json", "b.json", "--png", "b.png")
    assert result.code == 0 and "offramp torch" in result.out and "hf-sdpa" in result.out and "realised" in result.out
    file = json.loads(Path("b.json").read_text())
    assert file["row_count"] == 8 and file["command"].startswith("offramp bench") and file["threads"] == 1
    assert {entry["budget"] for entry in file["rows"]} == {1.0, 0.5, "default", None}  # the full model is always there
    assert Path("b.png").read_bytes().startswith(b"\x89PNG")


BAD = {
    "an unknown peer": (["--against", "tensorflow"], "use some of: ctranslate2, hf"),
    "an unknown engine": (["--engines", "abacus"], "'abacus'"),
    "no batch size": (["--batch-sizes", "many"], "--batch-sizes 1,8,32"),
    "no such budget": (["--budgets", "cheap"], "max-loss=0.01"),
    "an order": (["--orders", "random"], "given, sorted"),
}


@pytest.mark.parametrize("what", BAD)
def test_bench_refuses_bad_input(call: Call, trained: Path, what: str) -> None:
    words, part = BAD[what]
    data = write_rows("test.jsonl", factories.labelled_rows("classification", 4, 6))
    result = call("bench", trained, "--data", data, *words, "--json", "b.json")
    assert result.code == 2 and part in result.err and not Path("b.json").exists()


def test_calibrate_finds_a_latency_that_eval_and_predict_use(call: Call, own: Path) -> None:
    data = write_rows("new.jsonl", factories.labelled_rows("classification", 20, 7))
    torch = ("--engine", "torch")
    result = call("calibrate", own, "--data", data, "--latency", "10s", "--percentile", 90, *torch)
    assert result.code == 0 and "90 % of single answers within 10000ms on torch fp32" in result.out
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
        (["--threads", "1"], "without --latency"),
    ],
)
def test_calibrate_refuses_latencies_that_cannot_be_met(call: Call, own: Path, words: list[str], part: str) -> None:
    data = write_rows("new.jsonl", factories.labelled_rows("classification", 12, 7))
    before = (own / "points.json").read_text()
    result = call("calibrate", own, "--data", data, *words)
    assert result.code == 2 and part in result.err and (own / "points.json").read_text() == before
