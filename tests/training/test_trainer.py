"""The trainer: what it scores, what it keeps, and that nothing but the seed decides."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offramp import engines, methods, tasks
from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.inference import run_folder as folders
from offramp.inference.batching import score_for_training, score_policy
from offramp.nn.batches import Data
from offramp.nn.network import Network, bare_network
from offramp.training.schedule import Schedule
from offramp.training.trainer import Trainer, TrainingInterrupted
from tests import runs

FAST = Schedule(epochs=3, batch_size=8, lr=0.01, precision="fp32")


def build(base: str, method: str = "branchynet", kind: str = "classification") -> tuple[Network, list[Any], Data, Data]:
    """A fresh network, its stages and rows."""
    train, dev = runs.rows(kind, 32), runs.rows(kind, 16, 1)
    tokenizer = folders.load_tokenizer(base)
    task = tasks.get(runs.TASKS[kind]).from_rows(train, "train").with_tokenizer(tokenizer)
    found = methods.get(method)
    torch.manual_seed(0)
    net = folders.build_network(folders.load_backbone(base, task), task, found, found.options())
    data = [Data(rows, task.encode(tokenizer, rows, 64)) for rows in (train, dev)]
    return net, found.stages(net, found.options()), data[0], data[1]


def fit(base: str, folder: Path, schedule: Schedule = FAST) -> dict[str, torch.Tensor]:
    net, stages, train, dev = build(base)
    Trainer(net, schedule, folder, score_for_training, lambda **_: None).fit(stages, train, dev)
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def test_every_epoch_is_scored_with_its_own_weights(base: str, tmp_path: Path) -> None:
    """Backbones keep Q, K and V fused while they score; training must not leave them with those of an earlier epoch."""
    net, stages, train, dev = build(base)
    seen: list[tuple[dict[str, float], dict[str, float]]] = []

    def report(**news: Any) -> None:
        if "done" in news:
            fresh = bare_network(copy.deepcopy(net.hf), net.task)
            expected, _ = score_policy(fresh, engines.make("torch", fresh.encoder), Policy(), dev)
            seen.append((expected, {name: news[name] for name in expected}))

    many = replace(FAST, epochs=6)
    Trainer(net, many, tmp_path, score_for_training, report).fit(stages, train, dev)
    assert len(seen) == many.epochs
    assert all(expected == said for expected, said in seen)
    assert len({str(said) for _, said in seen}) > 1, "nothing was learned, so nothing was tested"


def test_the_best_epoch_is_kept(base: str, tmp_path: Path) -> None:
    net, stages, train, dev = build(base)
    kept: list[dict[str, torch.Tensor]] = []
    best: list[float] = []

    def report(**news: Any) -> None:
        if "done" in news:
            kept.append({name: p.detach().clone() for name, p in net.named_parameters()})
            best.append(news["accuracy"])

    progress = Trainer(net, FAST, tmp_path, score_for_training, report).fit(stages, train, dev)
    chosen = max(range(FAST.epochs), key=lambda epoch: (best[epoch], epoch))
    assert all(torch.equal(p, kept[chosen][name]) for name, p in net.named_parameters())
    assert [entry["epoch"] for entry in progress.log] == [1, 2, 3]


def test_the_seed_decides_everything(base: str, tmp_path: Path) -> None:
    first = fit(base, tmp_path / "1")
    torch.rand(100)  # whatever else was drawn does not matter
    second, other = fit(base, tmp_path / "2"), fit(base, tmp_path / "3", Schedule(**{**vars(FAST), "seed": 7}))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_stop_after_the_last_step_is_heard_and_resumed(base: str, tmp_path: Path) -> None:
    expected = fit(base, tmp_path / "expected")
    net, stages, train, dev = build(base)

    def report(**news: Any) -> None:
        trainer.stop = "done" in news and news["epoch"] == FAST.epochs

    trainer = Trainer(net, FAST, tmp_path / "run", score_for_training, report)
    with pytest.raises(TrainingInterrupted):
        trainer.fit(stages, train, dev)
    again = fit(base, tmp_path / "run")
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_two_stages_freeze_what_they_do_not_train(base: str, tmp_path: Path) -> None:
    net, stages, train, dev = build(base, "deebert")
    after: dict[str, dict[str, torch.Tensor]] = {}
    modes: dict[str, set[tuple[bool, bool]]] = {}

    def report(**news: Any) -> None:
        if "steps" in news:
            modes.setdefault(news["stage"], set()).add((net.hf.training, net.added.training))
        else:
            after[news["stage"]] = {name: p.detach().clone() for name, p in net.named_parameters()}

    Trainer(net, FAST, tmp_path, score_for_training, report).fit(stages, train, dev)
    assert modes == {"fine-tune": {(True, True)}, "off-ramps": {(False, True)}}
    final = dict(net.named_parameters())
    for name, before in after["fine-tune"].items():
        if name.startswith("added."):
            assert not torch.equal(before, final[name])
    assert all(p.requires_grad == name.startswith("added.") for name, p in final.items())


def test_training_works_outside_the_main_thread(base: str, tmp_path: Path) -> None:
    """Only there can signals be caught, but nobody should have to know."""
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(len(fit(base, tmp_path))))
    thread.start()
    thread.join(60)
    assert done


def test_the_rate_warms_up_and_falls_to_zero() -> None:
    rates = [Schedule(warmup=0.1).rate(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5) and 0 < rates[99] < 0.02
    assert Schedule().rate(0, 1) == 1.0


@pytest.mark.parametrize(
    "bad", [{"epochs": 0}, {"batch_size": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"precision": "fp8"}]
)
def test_a_schedule_refuses_nonsense(bad: dict[str, Any]) -> None:
    with pytest.raises(OfframpError, match=next(iter(bad)).replace("_", "-")):
        Schedule(**bad)
