"""Fixtures of command-function tests: a folder of two small data sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import factories


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the data sets `words` (classification) and `numbers` (regression)."""
    for name, kind in (("words", "classification"), ("numbers", "regression")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for split, count, seed in (("train", 24, 0), ("test", 8, 1)):
            path = tmp_path / "data" / name / f"{split}.jsonl"
            factories.write_jsonl(path, factories.labelled_rows(kind, count, seed))
    return tmp_path / "data"
