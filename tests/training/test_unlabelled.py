"""Training without labels is allowed where every stage learns from the model itself, and refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offramp.commands.train import TrainRequest, run_training
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.training.schedule import Schedule
from tests.factories import labelled_rows, write_jsonl

QUICK = Schedule(epochs=1, batch_size=8, lr=0.005)


def unlabelled_rows(kind: str, target: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != target} for row in labelled_rows(kind, 30, 7)]


@pytest.mark.parametrize(("kind", "target"), [("classification", "label"), ("tagging", "tags")])
def test_fastbert_learns_from_rows_without_labels(
    base: str, every_task: dict[str, Path], tmp_path: Path, kind: str, target: str
) -> None:
    start = every_task[kind]
    train = write_jsonl(tmp_path / "unlabelled.jsonl", unlabelled_rows(kind, target))
    request = TrainRequest(base, train, str(tmp_path / "run"), task=kind, method="fastbert", init=str(start),
               dev=str(start.parent / "dev.jsonl"), schedule=QUICK)  # fmt: skip
    log = run_training(request).log
    assert {entry["stage"] for entry in log} == {"self-distillation"}
    before, after = Predictor.load(start), Predictor.load(tmp_path / "run")
    assert after.task == before.task
    start_weights = dict(before.network.hf.named_parameters())
    assert all(torch.equal(p, start_weights[name]) for name, p in after.network.hf.named_parameters())


@pytest.mark.parametrize("method", ["branchynet", "deebert"])
def test_methods_that_need_labels_name_the_missing_column(
    base: str, trained: Path, tmp_path: Path, method: str
) -> None:
    train = write_jsonl(tmp_path / "unlabelled.jsonl", unlabelled_rows("classification", "label"))
    with pytest.raises(OfframpError, match="the column 'label'"):
        run_training(TrainRequest(base, train, str(tmp_path / "run"), method=method, init=str(trained),
                      dev=str(trained.parent / "dev.jsonl"), schedule=QUICK))  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_fastbert_needs_labels_without_init_or_dev(base: str, trained: Path, tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "unlabelled.jsonl", unlabelled_rows("classification", "label"))
    with pytest.raises(OfframpError, match="the column 'label'"):
        run_training(TrainRequest(base, train, str(tmp_path / "run"), method="fastbert", schedule=QUICK))
    with pytest.raises(OfframpError, match="--dev"):
        run_training(
            TrainRequest(base, train, str(tmp_path / "run"), method="fastbert", init=str(trained), schedule=QUICK)
        )


def test_rows_of_which_some_lack_labels_are_refused(base: str, trained: Path, tmp_path: Path) -> None:
    train = write_jsonl(
        tmp_path / "mixed.jsonl", [*labelled_rows("classification", 3), *unlabelled_rows("classification", "label")]
    )
    with pytest.raises(OfframpError, match="row 4"):
        run_training(TrainRequest(base, train, str(tmp_path / "run"), method="fastbert", init=str(trained),
                      dev=str(trained.parent / "dev.jsonl"), schedule=QUICK))  # fmt: skip
