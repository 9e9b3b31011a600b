"""Hooks of a stage, epochs by score and cost, and exact resuming of stages with artifacts or two optimisers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from offramp import methods
from offramp.nn.batches import Batch
from offramp.training.objectives import StageWithTeacher
from offramp.training.schedule import Schedule
from offramp.training.stage import (
    Backward,
    ParameterGroups,
    Stage,
    cheapest_epoch,
    mark_later_stages,
    rank_epochs,
    with_embedding_rate,
)
from offramp.training.trainer import Trainer, TrainingInterrupted
from tests import factories

QUICK = Schedule(epochs=2, batch_size=8, lr=0.01, precision="fp32")


@dataclass
class RecordingStage(Stage):
    """Two parameters in two optimisers, one with a huge gradient; records what the trainer reports to it."""

    shares: list[float] = field(default_factory=list)
    epochs_ended: list[int] = field(default_factory=list)

    needs_reference: ClassVar[bool] = True

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return super().trainable()[:2]

    def optimisers(self, lr: float) -> list[ParameterGroups]:
        return [[{"params": [p], "lr": lr}] for _, p in self.trainable()]

    def set_progress(self, share: float) -> None:
        self.shares.append(share)

    def end_epoch(self, history: Sequence[dict[str, float]]) -> None:
        self.epochs_ended.append(len(history))

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        (_, small), (_, large) = self.trainable()
        loss = small.sum() * 1e-3 + large.sum() * 1e6
        backward(loss)
        return {"loss": loss.detach()}


def test_the_trainer_reports_progress_and_reference_scores_to_a_stage(base: str, tmp_path: Path) -> None:
    net, _, train, dev = factories.training_setup(base)
    stage = RecordingStage(net)
    factories.trainer(net, QUICK, tmp_path).fit([stage], train, dev)
    assert stage.shares == pytest.approx([i / 8 for i in range(8)]) and stage.epochs_ended == [1, 2]
    assert stage.reference["mac_share"] == 1.0 and 0 <= stage.reference["accuracy"] <= 1


def test_embedding_tables_have_a_learning_rate_of_their_own(base: str) -> None:
    net = factories.training_setup(base)[0]
    (groups,) = Stage(net).optimisers(1e-4)
    assert with_embedding_rate(net, groups, 0.0) is groups
    rates = {id(p): group["lr"] for group in with_embedding_rate(net, groups, 2e-3) for p in group["params"]}
    assert len(rates) == sum(len(group["params"]) for group in groups)
    for name, parameter in Stage(net).trainable():
        if "_embeddings.weight" in name:
            assert rates[id(parameter)] == 2e-3, name
        elif "encoder.layer" in name:
            assert rates[id(parameter)] == 1e-4, name


def test_stages_after_fine_tuning_have_a_learning_rate_of_their_own() -> None:
    net = factories.network("pabee")
    before, fine_tuning, after = Stage(net, "a"), Stage(net, "b", fine_tuning=True), Stage(net, "c")
    mark_later_stages([before, fine_tuning, after])
    assert [stage.follows_fine_tuning for stage in (before, fine_tuning, after)] == [False, False, True]
    schedule = Schedule(lr=1e-4)
    assert schedule.lr_of(False) == 1e-4 and schedule.lr_of(True) == pytest.approx(3e-5)
    assert Schedule(lr=1e-4, later_lr=2e-4).lr_of(True) == 2e-4


@pytest.mark.parametrize("name", ["pabee", "berxit", "alberta", "length_adaptive"])
def test_later_stages_learn_the_logits_of_the_fine_tuned_model(name: str, tmp_path: Path) -> None:
    net, data = factories.network(name), factories.data()
    _, stage = methods.get(name).stages(net, methods.get(name).options())
    assert isinstance(stage, StageWithTeacher)
    stage.prepare(data, tmp_path)
    assert stage.teacher is None  # nothing was fine-tuned before
    stage.follows_fine_tuning = True
    stage.prepare(data, tmp_path)
    batch = factories.batch(net, data)
    known = stage.with_teacher(batch).teacher
    assert known is not None and known.shape == (len(data.encoded), net.task.outputs)


def test_the_trainer_clips_each_optimiser_alone(base: str, tmp_path: Path) -> None:
    net, _, train, dev = factories.training_setup(base)
    stage, norms = RecordingStage(net), []

    def report(**news: Any) -> None:
        if "steps" in news:
            norms.append([float(p.grad.norm()) for _, p in stage.trainable() if p.grad is not None])

    factories.trainer(net, QUICK, tmp_path, report).fit([stage], train, dev)
    alone = 1e-3 * stage.trainable()[0][1].numel() ** 0.5
    assert norms[0] == pytest.approx([min(1.0, alone), 1.0], rel=1e-3)


def test_rank_epochs_puts_the_best_first_and_the_later_of_equals() -> None:
    net = factories.network()
    history = [{"accuracy": score} for score in (0.5, 0.9, 0.7, 0.9)]
    assert rank_epochs(net, history) == [3, 1, 2, 0]


def test_cheapest_epoch_scores_within_the_slack_or_is_the_best() -> None:
    net, reference = factories.network(), {"accuracy": 0.9}
    history = [{"accuracy": a, "mac_share": m} for a, m in ((0.90, 0.8), (0.89, 0.5), (0.60, 0.1), (0.89, 0.5))]
    assert cheapest_epoch(net, history, reference, slack=0.02) == 3
    assert cheapest_epoch(net, history, {"accuracy": 0.99}, slack=0.02) == 0


def train_with_interruptions(
    base: str, folder: Path, method: str, stops: Sequence[tuple[str, int, int]] = ()
) -> dict[str, Tensor]:
    """Return the parameters of a run that is interrupted at (stage, epoch, step) and resumed by a new network."""
    torch.manual_seed(0)
    for stop in (*stops, None):
        net, stages, train, dev = factories.training_setup(base, method)
        trainer = factories.trainer(net, QUICK, folder)

        def report(stop: Any = stop, trainer: Trainer = trainer, **news: Any) -> None:
            trainer.stop = "steps" in news and (news["stage"], news["epoch"], news["step"]) == stop

        trainer.report = report
        if stop is not None:
            with pytest.raises(TrainingInterrupted):
                trainer.fit(stages, train, dev)
    trainer.fit(stages, train, dev)
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


@pytest.mark.parametrize(
    ("method", "stops"),
    [
        ("adapler", [("fine-tune", 1, 2), ("fine-tune", 1, 4), ("length", 0, 1), ("length", 1, 3)]),
        ("tr_bert", [("reinforce", 0, 2), ("reinforce", 1, 1), ("distil and reinforce", 1, 2)]),
    ],
)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    method: str, stops: list[tuple[str, int, int]], base: str, tmp_path: Path
) -> None:
    expected = train_with_interruptions(base, tmp_path / "expected", method)
    resumed = train_with_interruptions(base, tmp_path / "resumed", method, stops)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
