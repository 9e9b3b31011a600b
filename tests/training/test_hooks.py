"""What the trainer tells a stage, and that stages with artifacts, second optimisers and samples resume exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from offramp.inference.batching import score_for_training
from offramp.nn.batches import Batch
from offramp.training.schedule import Schedule
from offramp.training.stage import Backward, ParameterGroups, Stage
from offramp.training.trainer import Trainer, TrainingInterrupted
from tests.training.test_trainer import build

QUICK = Schedule(epochs=2, batch_size=8, lr=0.01, precision="fp32")


@dataclass
class Probe(Stage):
    """Two parameters in two optimisers, one with a huge gradient."""

    shares: list[float] = field(default_factory=list)
    told: list[int] = field(default_factory=list)

    needs_reference: ClassVar[bool] = True

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return super().trainable()[:2]

    def optimisers(self, lr: float) -> list[ParameterGroups]:
        return [[{"params": [p], "lr": lr}] for _, p in self.trainable()]

    def set_progress(self, share: float) -> None:
        self.shares.append(share)

    def end_epoch(self, history: Sequence[dict[str, float]]) -> None:
        self.told.append(len(history))

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        (_, small), (_, large) = self.trainable()
        loss = small.sum() * 1e-3 + large.sum() * 1e6
        backward(loss)
        return {"loss": loss.detach()}


def test_a_stage_is_told_where_it_stands(base: str, tmp_path: Path) -> None:
    net, _, train, dev = build(base)
    probe = Probe(net)
    Trainer(net, QUICK, tmp_path, score_for_training, lambda **_: None).fit([probe], train, dev)
    assert probe.shares == pytest.approx([i / 8 for i in range(8)]) and probe.told == [1, 2]
    assert probe.reference["mac_share"] == 1.0 and 0 <= probe.reference["accuracy"] <= 1


def test_optimisers_are_clipped_each_by_itself(base: str, tmp_path: Path) -> None:
    net, _, train, dev = build(base)
    probe, norms = Probe(net), []

    def look(**news: Any) -> None:
        if "steps" in news:
            norms.append([float(p.grad.norm()) for _, p in probe.trainable() if p.grad is not None])

    Trainer(net, QUICK, tmp_path, score_for_training, look).fit([probe], train, dev)
    alone = 1e-3 * probe.trainable()[0][1].numel() ** 0.5
    assert norms[0] == pytest.approx([min(1.0, alone), 1.0], rel=1e-3)


def fit(base: str, folder: Path, method: str, stops: Sequence[tuple[str, int, int]] = ()) -> dict[str, Tensor]:
    """A run of a method, interrupted at (stage, epoch, step) and begun again by a fresh network each time."""
    torch.manual_seed(0)
    for stop in (*stops, None):
        net, stages, train, dev = build(base, method)
        trainer = Trainer(net, QUICK, folder, score_for_training, lambda **_: None)

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
def test_an_interrupted_run_ends_as_an_undisturbed_one(
    method: str, stops: list[tuple[str, int, int]], base: str, tmp_path: Path
) -> None:
    once, pieces = fit(base, tmp_path / "once", method), fit(base, tmp_path / "pieces", method, stops)
    assert all(torch.equal(once[name], pieces[name]) for name in once)
