"""Planned depth in training: gates from full depth on, rows that are cut, a penalty on depth, runs of every task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offramp import methods
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.methods import alberta
from offramp.methods.alberta import ALBERTaOptions, ALBERTaSettings
from offramp.nn.batches import build_batch, pack_rows
from offramp.training.forward import forward_all_layers
from offramp.training.schedule import Schedule
from tests import factories
from tests.methods.test_alberta import LENGTHS, answer, made, predictor


def test_rows_may_be_cut_at_any_depth_so_that_shallow_exits_learn() -> None:
    torch.manual_seed(0)
    needs = torch.full((600, 3), 0.999)  # left alone, nobody ends early
    depths = alberta.draw_executed(needs, ALBERTaOptions(cut=True, explore=1.0)).sum(1)
    counts = torch.bincount(depths, minlength=4)
    assert counts[0] == 0 and (counts[1:] > 150).all()  # at run time, too, the first gated layer always runs
    raw = alberta.draw_executed(needs, ALBERTaOptions(cut=True, explore=1.0, revpc=False)).sum(1)
    assert (torch.bincount(raw, minlength=4) > 100).all()
    assert (alberta.draw_executed(needs, ALBERTaOptions(cut=True)).sum(1) == 3).float().mean() > 0.97
    for wrong in ({"explore": 0.5}, {"explore": 1.5, "cut": True}):
        with pytest.raises(OfframpError, match="explore"):
            ALBERTaOptions(**wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_a_fresh_predictor_starts_near_full_depth() -> None:
    net, data = made(start=ALBERTaOptions().start)
    with torch.no_grad():
        packed = pack_rows(net.task, data.encoded)
        needs = net.exit_unit(1, forward_all_layers(net.encoder, packed).after(1))
    assert (needs > 0.99).all() and (needs[:, 1:] < 1).all()


def test_gates_between_zero_and_one_are_those_of_training() -> None:
    net, data = made()
    (stage,) = methods.get("alberta").stages(net, ALBERTaOptions(start=0.0))
    with torch.no_grad():
        packed = pack_rows(net.task, data.encoded)
        soft = forward_all_layers(net.encoder, packed, stage.hooks)  # type: ignore[attr-defined]  # a JointStage
        plain = forward_all_layers(net.encoder, packed)
    full = answer(net, data, ALBERTaSettings())
    assert torch.allclose(full.logits, net(net.depth, soft.after(net.depth)), atol=1e-5)
    hard = answer(net, data, ALBERTaSettings(hard=True))
    assert torch.allclose(hard.logits, net(net.depth, plain.after(net.depth)), atol=1e-5)
    assert not torch.allclose(full.logits, hard.logits, atol=1e-2)
    assert torch.equal(soft.states[1], plain.states[1]) and not torch.equal(soft.states[3], plain.states[3])


def test_gradients_reach_the_predictor_through_the_gates() -> None:
    net, data = made()
    (stage,) = methods.get("alberta").stages(net, ALBERTaOptions(start=0.0))
    stage.step(build_batch(net.task, data, range(len(LENGTHS)), seed=0), lambda loss: loss.backward())
    for name, parameter in predictor(net).named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-7, name


def test_a_cut_row_is_copied_upward_and_still_teaches_the_predictor() -> None:
    net, data = made(cut=True)
    options = ALBERTaOptions(start=0.0, cut=True)
    (stage,) = methods.get("alberta").stages(net, options)
    torch.manual_seed(0)
    soft = forward_all_layers(net.encoder, pack_rows(net.task, data.encoded), stage.hooks)  # type: ignore[attr-defined]  # a Joint
    runs_, tokens = soft.packed.rows["executed"], soft.packed.row_of_token
    assert runs_[:, 0].all() and not runs_.all()  # the first is always needed
    for number in range(1, net.depth - 1):
        gone = ~runs_[tokens, number]
        assert torch.equal(soft.states[number + 2][gone], soft.states[number + 1][gone])
    loss = net(net.depth, soft.after(net.depth)).square().sum()
    (grad,) = torch.autograd.grad(loss, soft.packed.rows[alberta.LAYER_NEEDS])
    assert (grad[~runs_] != 0).any()


@pytest.mark.parametrize("head", ["own", "meanmax"])
def test_a_penalty_makes_rows_end_earlier(head: Any) -> None:
    options = ALBERTaOptions(start=2.0, cut=True, penalty=5.0, head=head)
    net, data = made(start=2.0, cut=True, head=head)
    before = answer(net, data, ALBERTaSettings(0.5)).exit_layer.mean()
    (stage,) = methods.get("alberta").stages(net, options)
    some = build_batch(net.task, data, range(len(LENGTHS)), seed=0)
    optimiser = torch.optim.Adam([p for _, p in stage.trainable()], lr=2e-3)
    stage.set_progress(1.0)
    for _ in range(25):
        optimiser.zero_grad()
        stage.step(some, lambda loss: loss.backward())
        optimiser.step()
    reached = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert head == "own" or any(name.startswith("added.exit_heads.") for name in reached)
    assert answer(net, data, ALBERTaSettings(0.5)).exit_layer.mean() < before - 0.5
    for share in (0.0, 0.1, 0.5):  # it grows from nothing, step by step
        stage.set_progress(share)
        assert stage.weight == 5.0 * share  # type: ignore[attr-defined]  # a GatedStage stage
    assert stage.best_epoch([{"accuracy": 0.9}, {"accuracy": 0.5}]) == 1


@pytest.mark.parametrize("kind", ["classification", "regression", "tagging", "question_answering", "masked_lm"])
def test_every_task_trains_and_opens_again_as_it_was(base: str, tmp_path: Path, kind: str) -> None:
    options = {"start": 1.0, "penalty": 0.5}
    schedule = Schedule(epochs=2, batch_size=16, lr=0.003)
    folder = factories.run_folder(base, tmp_path, "alberta", kind, options=options, schedule=schedule)
    first, again = (Predictor.load(folder, engine="torch") for _ in range(2))
    encoded = first.prepare(factories.labelled_rows(kind, 6, 5))
    for gamma in (0.0, 0.6):
        ours, theirs = (p.run(encoded, ALBERTaSettings(gamma), batch_size=4) for p in (first, again))
        assert np.array_equal(ours.exit_layer, theirs.exit_layer)
        assert all(np.array_equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))
    assert first.points is not None and first.points.full_point.settings["gamma"] == 0.0
