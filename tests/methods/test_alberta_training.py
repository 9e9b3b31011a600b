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
from offramp.nn.batches import pack_rows
from offramp.training.forward import forward_all_layers
from offramp.training.schedule import Schedule
from tests import factories
from tests.methods.test_alberta import network_and_rows, predictor, run_rows


def test_draw_executed_explores_every_depth() -> None:
    torch.manual_seed(0)
    needs = torch.full((600, 3), 0.999)  # without exploring, hardly any row ends early
    depths = alberta.draw_executed(needs, ALBERTaOptions(cut=True, explore=1.0)).sum(1)
    counts = torch.bincount(depths, minlength=4)
    assert counts[0] == 0 and (counts[1:] > 150).all()  # as at run time, the first gated layer always runs
    raw = alberta.draw_executed(needs, ALBERTaOptions(cut=True, explore=1.0, revpc=False)).sum(1)
    assert (torch.bincount(raw, minlength=4) > 100).all()
    assert (alberta.draw_executed(needs, ALBERTaOptions(explore=0.0)).sum(1) == 3).float().mean() > 0.97
    for wrong in ({"explore": 0.5, "cut": False}, {"explore": 1.5}):
        with pytest.raises(OfframpError, match="explore"):
            ALBERTaOptions(**wrong)  # type: ignore[arg-type]  # invalid on purpose


def test_new_predictor_starts_near_full_depth() -> None:
    net, data = network_and_rows(start=ALBERTaOptions().start)
    with torch.no_grad():
        packed = pack_rows(net.task, data.encoded)
        needs = net.exit_unit(1, forward_all_layers(net.encoder, packed).after(1))
    assert (needs[:, 1:] > 0.6).all() and (needs[:, 1:] < 0.97).all(), "deep, but not saturated: it can still learn"


def test_the_default_prefix_is_the_first_hidden_group() -> None:
    grouped = {"num_hidden_layers": 6, "num_hidden_groups": 3}
    one_group = {"num_hidden_layers": 6, "num_hidden_groups": 1}
    cases = (("alberta", grouped, 2), ("albert", grouped, 2), ("albert", one_group, 1), ("bert", {}, 1))
    for backbone, config, expected in cases:
        net = factories.network("alberta", backbone=backbone, seed=None, config=config)
        assert predictor(net).prefix == expected and predictor(net).last.out_features == net.depth - expected
        assert min(net.exit_heads) == expected


def test_run_time_gates_are_those_of_training() -> None:
    net, data = network_and_rows()
    *_, stage = methods.get("alberta").stages(net, ALBERTaOptions(cut=False, explore=0.0, head="own"))
    with torch.no_grad():
        packed = pack_rows(net.task, data.encoded)
        soft = forward_all_layers(net.encoder, packed, stage.hooks)  # type: ignore[attr-defined]  # a JointStage
        plain = forward_all_layers(net.encoder, packed)
    full = run_rows(net, data, ALBERTaSettings())
    assert torch.allclose(full.logits, net(net.depth, soft.after(net.depth)), atol=1e-5)
    hard = run_rows(net, data, ALBERTaSettings(hard=True))
    assert torch.allclose(hard.logits, net(net.depth, plain.after(net.depth)), atol=1e-5)
    assert not torch.allclose(full.logits, hard.logits, atol=1e-2)
    assert torch.equal(soft.states[1], plain.states[1]) and not torch.equal(soft.states[3], plain.states[3])


def test_gradients_reach_the_predictor_through_the_gates() -> None:
    net, data = network_and_rows()
    *_, stage = methods.get("alberta").stages(net, ALBERTaOptions(cut=False, explore=0.0, head="own"))
    stage.step(factories.batch(net, data, seed=0), lambda loss: loss.backward())
    for name, parameter in predictor(net).named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-7, name


def test_cut_rows_are_copied_and_still_train_the_predictor() -> None:
    net, data = network_and_rows(cut=True)
    options = ALBERTaOptions(start=0.0, cut=True)
    *_, stage = methods.get("alberta").stages(net, options)
    torch.manual_seed(0)
    soft = forward_all_layers(net.encoder, pack_rows(net.task, data.encoded), stage.hooks)  # type: ignore[attr-defined]  # a JointStage
    executed, tokens = soft.packed.rows["executed"], soft.packed.row_of_token
    assert executed[:, 0].all() and not executed.all()  # the first is always needed
    for number in range(1, net.depth - 1):
        skipped = ~executed[tokens, number]
        assert torch.equal(soft.states[number + 2][skipped], soft.states[number + 1][skipped])
    loss = net(net.depth, soft.after(net.depth)).square().sum()
    (grad,) = torch.autograd.grad(loss, soft.packed.rows[alberta.LAYER_NEEDS])
    assert (grad[~executed] != 0).any()


@pytest.mark.parametrize("head", ["own", "meanmax"])
def test_penalty_makes_rows_end_earlier(head: Any) -> None:
    options = ALBERTaOptions(start=2.0, cut=True, penalty=5.0, head=head)
    net, data = network_and_rows(start=2.0, cut=True, head=head)
    before = run_rows(net, data, ALBERTaSettings(0.5)).exit_layer.mean()
    *_, stage = methods.get("alberta").stages(net, options)
    batch = factories.batch(net, data, seed=0)
    optimiser = torch.optim.Adam([p for _, p in stage.trainable()], lr=2e-3)
    stage.set_progress(1.0)
    for _ in range(25):
        optimiser.zero_grad()
        stage.step(batch, lambda loss: loss.backward())
        optimiser.step()
    reached = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert head == "own" or any(name.startswith("added.exit_heads.") for name in reached)
    assert run_rows(net, data, ALBERTaSettings(0.5)).exit_layer.mean() < before - 0.5
    for share in (0.0, 0.1, 0.5):  # it grows linearly from 0
        stage.set_progress(share)
        assert stage.weight == 5.0 * share  # type: ignore[attr-defined]  # a GatedStage
    assert stage.best_epoch([{"accuracy": 0.9}, {"accuracy": 0.5}]) == 1


@pytest.mark.parametrize("kind", ["classification", "regression", "tagging", "question_answering", "masked_lm"])
def test_every_task_trains_and_loads_with_the_same_answers(base: str, tmp_path: Path, kind: str) -> None:
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


@pytest.mark.parametrize("dropout", [True, False])
def test_the_gated_stage_trains_the_backbone_with_dropout_or_without(dropout: bool) -> None:
    net, _ = network_and_rows()
    *_, stage = methods.get("alberta").stages(net, ALBERTaOptions(dropout=dropout))
    stage.set_train_mode()
    assert net.hf.training is dropout
    assert net.added.training
