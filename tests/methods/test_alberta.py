"""ALBERTa at run time: RevPC by hand, planned depths, replay, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offramp import engines, methods
from offramp.calibration.calibrate import CalibrationContext, find_operating_points
from offramp.calibration.replay import replay
from offramp.core.loop import Result, run
from offramp.errors import OfframpError
from offramp.inference.batching import run_encoded
from offramp.methods.alberta import ALBERTaOptions, ALBERTaPolicy, ALBERTaSettings, StructurePredictor, executed, revpc
from offramp.nn.batches import Data, pack_rows
from offramp.nn.network import Network
from offramp.training.forward import forward_all_layers
from tests import factories

LENGTHS = [9, 4, 17, 6, 12, 5, 8, 21]


def network_and_rows(task: str = "classification", backbone: str = "bert", **options: Any) -> tuple[Network, Data]:
    """Return a network of five layers whose predictor plans different depths, unless `start` is given, and its rows.

    The model's head answers at every depth: nothing is trained here, and new heads would answer at random.
    """
    config, chosen = {"num_hidden_layers": 5}, {"start": 0.0, "head": "own", **options}
    net = factories.network("alberta", task, backbone, lengths=LENGTHS, seed=None, config=config, **chosen)
    data = factories.data(LENGTHS)
    if "start" not in options:
        _spread(net, data)
    return net, data


def _spread(net: Network, data: Data) -> None:
    """Centre the predictor's logits over these rows, and widen them."""
    unit, seen = predictor(net), []
    unit.last.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        unit.last.weight.mul_(60)
        net.exit_unit(
            unit.prefix, forward_all_layers(net.encoder, pack_rows(net.task, data.encoded)).after(unit.prefix)
        )
        unit.last.weight.mul_(2 / seen[0].std(0).mean())
        unit.last.bias.sub_(seen[0].mean(0) * 2 / seen[0].std(0).mean())


def predictor(net: Network) -> StructurePredictor:
    unit = net.added["exit_unit"]
    assert isinstance(unit, StructurePredictor)
    return unit


def run_rows(net: Network, data: Data, settings: ALBERTaSettings, rows: slice = slice(None)) -> Result:
    with torch.no_grad():
        packed = pack_rows(net.task, data.encoded[rows])
        return run(engines.make("torch", net.encoder), net, ALBERTaPolicy(net, settings), packed)


def test_revpc_on_known_vectors() -> None:
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[1.0, 0.9, 0.7, 0.4], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    assert torch.allclose(revpc(probs), expected)
    drawn = revpc(torch.randn(200, 11).softmax(-1))
    assert (drawn[:, 0] == 1).all() and (drawn.diff(dim=-1) <= 0).all()  # so γ = 1 still runs the first layer


def test_executed_stops_at_the_first_layer_below_gamma() -> None:
    needs = torch.tensor([[0.1, 0.5, 0.4], [0.4, 0.1, 0.5]])  # without RevPC needs may rise again
    assert executed(needs, 0.0).all()
    assert executed(needs, 0.3).tolist() == [[False] * 3, [True, False, False]]
    assert executed(needs, torch.tensor([[0.05], [0.45]])).tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_rows_that_end_at_different_depths_equal_rows_alone(task: str) -> None:
    net, data = network_and_rows(task)
    together = run_rows(net, data, ALBERTaSettings(0.5))
    assert len(set(together.exit_layer.tolist())) > 2
    parts = together.logits.split(LENGTHS if net.per_token else 1)
    for row, part in enumerate(parts):
        alone = run_rows(net, data, ALBERTaSettings(0.5), slice(row, row + 1))
        assert alone.exit_layer[0] == together.exit_layer[row]
        assert torch.allclose(alone.logits, part, atol=1e-5)


def test_each_row_is_planned_once_and_answered_once() -> None:
    net, data = network_and_rows()
    trace = run_rows(net, data, ALBERTaSettings(0.5)).trace
    units, heads = ([event for event in trace if event.kind == kind] for kind in ("exit_unit", "head"))
    assert [(unit.layer, len(unit.rows)) for unit in units] == [(1, len(LENGTHS))]
    assert sorted(row for head in heads for row in head.rows.tolist()) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("backbone", ["bert", "modernbert"])
def test_gates_of_one_give_the_plain_model(backbone: str) -> None:
    net, data = network_and_rows(backbone=backbone, start=40.0)
    with torch.no_grad():
        predictor(net).last.weight.zero_()
    result = run_rows(net, data, ALBERTaSettings())
    assert torch.allclose(result.logits, factories.hf_padded(net.hf, [e.ids for e in data.encoded]).logits, atol=1e-5)
    assert result.exit_layer.tolist() == [net.depth] * len(LENGTHS)


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_replay_equals_a_real_run(task: str) -> None:
    net, data = network_and_rows(task)
    subject = CalibrationContext(net, methods.get("alberta"), data)
    recording, exits = subject.record(), set()
    for gamma in (0.0, 0.2, 0.45, 0.7, 1.0):
        policy = ALBERTaPolicy(net, ALBERTaSettings(gamma))
        real = run_encoded(net, engines.make("torch", net.encoder), policy, data.encoded, batch_size=3)
        replayed = replay(net, recording, policy)
        assert np.array_equal(real.exit_layer, replayed.exit_layer)
        assert np.allclose(real.macs, replayed.macs)
        for a, b in zip(real.logits, replayed.logits, strict=True):
            assert np.allclose(a, b, atol=1e-5)
        exits |= set(real.exit_layer)
    assert exits == {2.0, 3.0, 4.0, 5.0}
    points = find_operating_points(net, subject.method, data, "rows", "0").points
    assert points[-1].settings == {"gamma": 0.0, "hard": False} and points[0].mac_share < 0.5


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_gamma_outside_its_range_is_refused(gamma: float) -> None:
    with pytest.raises(OfframpError, match="all layers"):
        ALBERTaSettings(gamma)


def test_invalid_options_are_refused() -> None:
    with pytest.raises(OfframpError, match="0 to 3 for this model"):
        network_and_rows(prefix=4)
    with pytest.raises(OfframpError, match="cut=true"):
        ALBERTaOptions(cut=False, explore=0.0)
    with pytest.raises(OfframpError, match="depth penalty"):
        ALBERTaOptions(penalty=-1.0)


def test_without_revpc_the_softmax_gates() -> None:
    net, data = network_and_rows(revpc=False)
    with torch.no_grad():
        packed = pack_rows(net.task, data.encoded)
        needs = net.exit_unit(1, forward_all_layers(net.encoder, packed).after(1))
    assert torch.allclose(needs.sum(-1), torch.ones(len(LENGTHS)))
    assert run_rows(net, data, ALBERTaSettings()).exit_layer.tolist() == [net.depth] * len(LENGTHS)
    assert run_rows(net, data, ALBERTaSettings(1.0)).exit_layer.tolist() == [1] * len(LENGTHS)


def test_prefix_of_zero_plans_from_the_embeddings() -> None:
    net, data = network_and_rows(prefix=0)
    ends = run_rows(net, data, ALBERTaSettings(0.5)).exit_layer.tolist()
    assert min(ends) >= 1 and len(set(ends)) > 1
