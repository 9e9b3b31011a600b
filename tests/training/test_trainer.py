"""The trainer: what it scores, which epoch it keeps, and that nothing but the seed decides."""

from __future__ import annotations

import copy
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offramp import engines
from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.inference.batching import score_policy
from offramp.nn.network import Network, bare_network
from offramp.training import checkpoint
from offramp.training.schedule import Schedule
from offramp.training.trainer import TrainingInterrupted
from tests import factories

FAST = Schedule(epochs=3, batch_size=8, lr=0.01, precision="fp32")


def copy_parameters(net: Network) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def train(base: str, folder: Path, schedule: Schedule = FAST) -> dict[str, Tensor]:
    """Return the parameters of a network after training in a folder."""
    net, stages, rows, dev = factories.training_setup(base)
    factories.trainer(net, schedule, folder).fit(stages, rows, dev)
    return copy_parameters(net)


def test_fit_scores_every_epoch_with_its_own_weights(base: str, tmp_path: Path) -> None:
    """Backbones cache fused Q, K and V while they score; training must not leave those of an earlier epoch."""
    net, stages, rows, dev = factories.training_setup(base)
    scores: list[tuple[dict[str, float], dict[str, float]]] = []

    def report(**news: Any) -> None:
        if "done" in news:
            fresh = bare_network(copy.deepcopy(net.hf), net.task)
            expected, _ = score_policy(fresh, engines.make("torch", fresh.encoder), Policy(), dev)
            scores.append((expected, {name: news[name] for name in expected}))

    schedule = replace(FAST, epochs=6)
    factories.trainer(net, schedule, tmp_path, report).fit(stages, rows, dev)
    assert len(scores) == schedule.epochs
    assert all(expected == reported for expected, reported in scores)
    assert len({str(reported) for _, reported in scores}) > 1, "nothing was learned, so nothing was tested"


def test_fit_keeps_the_best_epoch(base: str, tmp_path: Path) -> None:
    net, stages, rows, dev = factories.training_setup(base)
    weights: list[dict[str, Tensor]] = []
    scores: list[float] = []

    def report(**news: Any) -> None:
        if "done" in news:
            weights.append(copy_parameters(net))
            scores.append(news["accuracy"])

    progress = factories.trainer(net, FAST, tmp_path, report).fit(stages, rows, dev)
    best = max(range(FAST.epochs), key=lambda epoch: (scores[epoch], epoch))
    assert all(torch.equal(p, weights[best][name]) for name, p in net.named_parameters())
    assert [entry["epoch"] for entry in progress.log] == [1, 2, 3]


def test_snapshots_hold_the_weights_after_equal_parts_of_a_stage(base: str, tmp_path: Path) -> None:
    net, stages, rows, dev = factories.training_setup(base)
    seen: dict[str, dict[str, Tensor]] = {}

    def report(**news: Any) -> None:
        if "done" in news:
            seen[checkpoint.snapshot_name(0, news["epoch"])] = copy_parameters(net)

    schedule = replace(FAST, epochs=5, snapshots=2)
    factories.trainer(net, schedule, tmp_path, report).fit(stages, rows, dev)
    kept = sorted((tmp_path / checkpoint.SNAPSHOTS).iterdir())
    assert [path.name for path in kept] == [checkpoint.snapshot_name(0, n) for n in (3, 5)]
    for path in kept:
        checkpoint.read_weights(path, net)
        assert all(torch.equal(p, seen[path.name][name]) for name, p in net.named_parameters())
    assert [n for n in range(8) if replace(schedule, epochs=8, snapshots=4).keeps_snapshot(n)] == [1, 3, 5, 7]


def test_fit_depends_on_the_seed_alone(base: str, tmp_path: Path) -> None:
    first = train(base, tmp_path / "1")
    torch.rand(100)  # the global generator's state must not matter
    second, other = train(base, tmp_path / "2"), train(base, tmp_path / "3", replace(FAST, seed=7))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_fit_interrupted_after_the_last_step_is_resumed(base: str, tmp_path: Path) -> None:
    expected = train(base, tmp_path / "expected")
    net, stages, rows, dev = factories.training_setup(base)

    def report(**news: Any) -> None:
        trainer.stop = "done" in news and news["epoch"] == FAST.epochs

    trainer = factories.trainer(net, FAST, tmp_path / "run", report)
    with pytest.raises(TrainingInterrupted):
        trainer.fit(stages, rows, dev)
    resumed = train(base, tmp_path / "run")
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_ctrl_c_is_given_back_where_training_cannot_begin(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, stages, rows, dev = factories.training_setup(base)

    def fail(*_: Any) -> None:
        raise OfframpError("fitted tables", "no disk", "make room")

    monkeypatch.setattr(type(net), "prepare", fail)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(OfframpError):
        factories.trainer(net, FAST, tmp_path).fit(stages, rows, dev)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_fit_freezes_what_a_stage_does_not_train(base: str, tmp_path: Path) -> None:
    net, stages, rows, dev = factories.training_setup(base, "deebert")
    weights: dict[str, dict[str, Tensor]] = {}
    modes: dict[str, set[tuple[bool, bool]]] = {}

    def report(**news: Any) -> None:
        if "steps" in news:
            modes.setdefault(news["stage"], set()).add((net.hf.training, net.added.training))
        else:
            weights[news["stage"]] = copy_parameters(net)

    factories.trainer(net, FAST, tmp_path, report).fit(stages, rows, dev)
    assert [modes[stage.name] for stage in stages] == [{(True, True)}, {(False, True)}]
    final = dict(net.named_parameters())
    for name, before in weights[stages[0].name].items():
        if name.startswith("added."):
            assert not torch.equal(before, final[name])
    assert all(p.requires_grad == name.startswith("added.") for name, p in final.items())


def test_fit_works_outside_the_main_thread(base: str, tmp_path: Path) -> None:
    """Signals can be caught in the main thread only."""
    finished: list[int] = []
    thread = threading.Thread(target=lambda: finished.append(len(train(base, tmp_path))))
    thread.start()
    thread.join(60)
    assert finished


def test_schedule_rate_warms_up_and_decays_to_zero() -> None:
    rates = [Schedule(warmup=0.1).rate(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5) and 0 < rates[99] < 0.02
    assert Schedule().rate(0, 1) == 1.0


@pytest.mark.parametrize(
    "invalid", [{"epochs": 0}, {"batch_size": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"precision": "fp8"}]
)
def test_schedule_refuses_invalid_values(invalid: dict[str, Any]) -> None:
    with pytest.raises(OfframpError, match=next(iter(invalid)).replace("_", "-")):
        Schedule(**invalid)
