"""benchmarks/papers/translation_peers.py: CTranslate2 with converted weights translates as the full model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.papers import translation_peers

from tests.factories import translation_rows, write_jsonl

pytest.importorskip("ctranslate2", reason="a benchmark peer that is not a dependency")


def test_a_converted_run_translates_as_ours(translation_run: Path, tmp_path: Path) -> None:
    data, kept = write_jsonl(tmp_path / "test.jsonl", translation_rows(12, seed=4)), tmp_path / "peers.json"
    common = ["--data", data, "--rounds", "1", "--threads", "1", "--json", str(kept)]
    translation_peers.main([str(translation_run), *common, "--sizes", "1,6"])
    rows = json.loads(kept.read_text())["rows"]
    fp32 = [row for row in rows if row["contender"] == "ctranslate2 fp32"]
    assert [row["batch_size"] for row in fp32] == [1, 6] and all(row["agreement"] == 1.0 for row in fp32)
    assert all(row["tokens_per_second"] > 0 for row in rows) and len({row["contender"] for row in rows}) >= 3
