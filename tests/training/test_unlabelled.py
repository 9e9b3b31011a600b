"""Training without labels: allowed where every stage learns from the model itself, else refused as ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offramp.commands.train import TrainRequest, run_training
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.training.schedule import Schedule
from tests import runs

QUICK = Schedule(epochs=1, batch_size=8, lr=0.005)


def bare(kind: str, target: str) -> runs.Rows:
    return [{k: v for k, v in row.items() if k != target} for row in runs.rows(kind, 30, 7)]


@pytest.mark.parametrize(("kind", "target"), [("classification", "label"), ("tagging", "tags")])
def test_fastbert_learns_from_rows_without_labels(
    base: str, every_task: dict[str, Path], tmp_path: Path, kind: str, target: str
) -> None:
    start = every_task[kind]
    train = runs.jsonl(tmp_path / "bare.jsonl", bare(kind, target))
    made = TrainRequest(base, train, str(tmp_path / "run"), task=kind, method="fastbert", init=str(start),
               dev=str(start.parent / "dev.jsonl"), schedule=QUICK)  # fmt: skip
    log = run_training(made).log
    assert {entry["stage"] for entry in log} == {"self-distillation"}
    before, after = Predictor.load(start), Predictor.load(tmp_path / "run")
    assert after.task == before.task
    theirs = dict(before.network.hf.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in after.network.hf.named_parameters())


@pytest.mark.parametrize("method", ["branchynet", "deebert"])
def test_methods_that_need_labels_say_what_is_missing(base: str, trained: Path, tmp_path: Path, method: str) -> None:
    train = runs.jsonl(tmp_path / "bare.jsonl", bare("classification", "label"))
    with pytest.raises(OfframpError, match="the column 'label'"):
        run_training(TrainRequest(base, train, str(tmp_path / "run"), method=method, init=str(trained),
                      dev=str(trained.parent / "dev.jsonl"), schedule=QUICK))  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_without_init_or_dev_labels_are_needed(base: str, trained: Path, tmp_path: Path) -> None:
    train = runs.jsonl(tmp_path / "bare.jsonl", bare("classification", "label"))
    with pytest.raises(OfframpError, match="the column 'label'"):
        run_training(TrainRequest(base, train, str(tmp_path / "run"), method="fastbert", schedule=QUICK))
    with pytest.raises(OfframpError, match="--dev"):
        run_training(
            TrainRequest(base, train, str(tmp_path / "run"), method="fastbert", init=str(trained), schedule=QUICK)
        )


def test_some_rows_without_labels_are_a_mistake(base: str, trained: Path, tmp_path: Path) -> None:
    train = runs.jsonl(tmp_path / "odd.jsonl", [*runs.rows("classification", 3), *bare("classification", "label")])
    with pytest.raises(OfframpError, match="row 4"):
        run_training(TrainRequest(base, train, str(tmp_path / "run"), method="fastbert", init=str(trained),
                      dev=str(trained.parent / "dev.jsonl"), schedule=QUICK))  # fmt: skip
