"""Session fixtures: a tiny pretrained model on disk, and one trained run that many tests only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import runs


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny pretrained BERT with its tokenizer: what a user gives as --model."""
    return str(runs.model_folder(tmp_path_factory.mktemp("base") / "tiny-bert"))


@pytest.fixture(scope="session")
def trained(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished `branchynet` run on classification. Read only; `dev.jsonl` and `train.jsonl` lie beside it."""
    return runs.train(base, tmp_path_factory.mktemp("trained"), "branchynet")
