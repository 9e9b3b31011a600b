"""What is particular to each exit method and static baseline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from offramp import engines, methods
from offramp.core.loop import Result, run
from offramp.core.packed import Packed, pack
from offramp.errors import OfframpError
from offramp.methods._base import DepthMethod
from offramp.methods.berxit import BERxiTOptions
from offramp.methods.pabee import PABEEPolicy, PABEESettings
from offramp.methods.shallow_deep import ShallowDeepSettings
from offramp.nn.batches import Batch
from offramp.nn.exit_policies import EntropySettings, JointOptions, ThresholdSettings, exit_weights
from offramp.nn.keys import EXIT_HEADS, EXIT_UNIT
from offramp.nn.network import Network
from offramp.training.forward import forward_all_layers
from offramp.training.losses import exit_losses
from offramp.training.objectives import JointStage
from tests import factories


def method_and_network(name: str, task: str = "classification", **options: Any) -> tuple[methods.Method, Network]:
    return methods.get(name), factories.network(name, task, seed=None, **options)


class ScriptedHeads:
    """Exit heads whose answers are given by a table: [exits][rows] → label."""

    per_token = False

    def __init__(self, labels: list[list[int]]) -> None:
        self.labels = labels

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        labels = torch.tensor([self.labels[layer][row] for row in packed.rows["origin"].tolist()])
        return torch.nn.functional.one_hot(labels, 3).float()

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        return torch.zeros(packed.count)


def run_scripted(net: Network, labels: list[list[int]], policy: Any) -> Result:
    with torch.no_grad():
        packed = pack(factories.token_ids([3] * len(labels[0])))
        return run(engines.make("torch", net.encoder), ScriptedHeads(labels), policy, packed)


def test_pabee_counts_agreements_of_each_row_separately() -> None:
    _, net = method_and_network("pabee")
    labels = [[0, 0, 1], [0, 1, 1], [0, 1, 0], [0, 1, 2]]  # exits 0…3 (the last is the model's own)
    assert run_scripted(net, labels, PABEEPolicy(net, PABEESettings(1))).exit_layer.tolist() == [1, 2, 1]
    assert run_scripted(net, labels, PABEEPolicy(net, PABEESettings(2))).exit_layer.tolist() == [2, 3, 3]
    assert run_scripted(net, labels, PABEEPolicy(net, PABEESettings(0))).exit_layer.tolist() == [3, 3, 3]


def test_pabee_compares_numbers_within_a_tolerance() -> None:
    method, net = method_and_network("pabee", "regression")
    loose = method.policy(net, PABEESettings(1, tolerance=1e6))
    with torch.no_grad():
        result = run(engines.make("torch", net.encoder), net, loose, pack(factories.token_ids([5, 9])))
    assert result.exit_layer.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["branchynet", "deebert", "shallow_deep", "fastbert"])
def test_methods_that_need_a_distribution_refuse_regression_and_list_others(name: str) -> None:
    with pytest.raises(OfframpError, match=r"no distribution.*\n.* berxit, .*layerdrop, .*pabee") as refused:
        method_and_network(name, "regression")
    assert "fastbert" not in str(refused.value).split("fix:")[1]


def test_exit_with_threshold_zero_is_not_evaluated() -> None:
    method, net = method_and_network("branchynet")
    packed = pack(factories.token_ids([5, 9]))
    with torch.no_grad():
        settings = EntropySettings(thresholds=(0.0, 1e-9, 0.0))
        result = run(engines.make("torch", net.encoder), net, method.policy(net, settings), packed)
    assert [event.layer for event in result.trace if event.kind == "head"] == [1, 3]


def test_thresholds_are_refused_with_a_wrong_number_or_range() -> None:
    method, net = method_and_network("branchynet")
    with pytest.raises(OfframpError, match="each of 3 exits"):
        method.policy(net, EntropySettings(thresholds=(0.1, 0.2)))
    with pytest.raises(OfframpError, match="nats"):
        EntropySettings(threshold=-0.1)
    with pytest.raises(OfframpError, match="up to 1"):
        ThresholdSettings(threshold=3.0)
    with pytest.raises(OfframpError, match="temperatures"):
        EntropySettings(temperatures=(0.0, 1.0, 1.0))


def test_shallow_deep_confidence_is_one_minus_threshold() -> None:
    assert ShallowDeepSettings(confidence=0.9).threshold_of(0) == pytest.approx(0.1)
    with pytest.raises(OfframpError, match="probability"):
        ShallowDeepSettings(confidence=90)


def test_shallow_deep_weights_grow_with_progress() -> None:
    _, net = method_and_network("shallow_deep")
    (stage,) = methods.get("shallow_deep").stages(net, JointOptions())
    batch = Batch(pack(factories.token_ids([5, 9, 4])), torch.tensor([0, 1, 2]), [0, 1, 2])
    losses = []
    for share in (0.0, 0.5, 1.0):
        stage.set_progress(share)
        losses.append(float(stage.step(batch, lambda loss: None)["loss"]))
    assert losses[0] < losses[1] < losses[2]
    each = exit_losses(net, forward_all_layers(net.encoder, batch.packed), batch, [0, 1, 2, 3])
    expected = float(each.detach() @ torch.tensor([0.05, 1 / 3, 2 / 3, 1.0]))  # the final weights
    assert losses[2] == pytest.approx(expected, rel=1e-5)
    assert stage.best_epoch([{"accuracy": 0.9}, {"accuracy": 0.8}]) == 1  # early exits are trained most at the end


def test_index_weights_count_exits_from_one() -> None:
    assert exit_weights(3, "index") == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert exit_weights(4, "uniform") == [0.25] * 4


@pytest.mark.parametrize("name", ["branchynet", "shallow_deep", "pabee", "berxit"])
def test_exit_0_trains_its_own_head_and_leaves_the_model_alone(name: str) -> None:
    method, net = method_and_network(name)
    net.eval()
    batch = Batch(pack(factories.token_ids([5, 9, 4])), torch.tensor([0, 1, 2]), [0, 1, 2])

    def gradients() -> dict[str, Tensor]:
        for _, parameter in net.named_parameters():
            parameter.grad = None
        assert isinstance(method, DepthMethod)
        method.objective(method.options())(net, forward_all_layers(net.encoder, batch.packed), batch).backward()
        return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}

    with_exit0 = gradients()
    heads = net.added[EXIT_HEADS]
    assert isinstance(heads, torch.nn.ModuleDict)
    own = {f"added.{EXIT_HEADS}.0.{name}" for name, _ in heads.pop("0").named_parameters()}
    without = gradients()
    assert own <= with_exit0.keys() and not own & without.keys()
    unit = {name for name in without if name.startswith(f"added.{EXIT_UNIT}.")}  # berxit's reads every exit
    torch.testing.assert_close(
        {name: with_exit0[name] for name in without.keys() - unit},
        {name: without[name] for name in without.keys() - unit},
    )


@pytest.mark.parametrize("name", ["branchynet", "shallow_deep", "berxit"])
def test_joint_methods_can_fine_tune_first_and_balance_gradients(name: str) -> None:
    method, net = method_and_network(name)
    stages = method.stages(net, method.options(mixed=True, equilibrium=True))
    assert stages[0].name == "fine-tune" and stages[0].fine_tuning
    assert isinstance(stages[1], JointStage) and stages[1].hooks.equilibrium


@pytest.mark.parametrize("name", ["deebert", "fastbert"])
def test_frozen_backbone_methods_refuse_options_of_joint_training(name: str) -> None:
    for option in ("weights=uniform", "mixed=true", "equilibrium=true"):
        with pytest.raises(OfframpError, match=option.split("=")[0]):
            methods.configure(methods.get(name).options, dict([option.split("=")]), name)


@pytest.mark.parametrize("name, wrong", [("length_adaptive", {"lengths": 0.5}), ("adapler", {"scale": None})])
def test_configure_refuses_values_of_another_type(name: str, wrong: dict[str, Any]) -> None:
    """As in a points.json that was edited by hand."""
    with pytest.raises(OfframpError, match=rf"settings of {name}.*\n.*\n.*give values of these kinds"):
        methods.configure(methods.get(name).settings, wrong, name)


def test_berxit_alternates_and_evaluates_heads_only_where_rows_exit() -> None:
    method, net = method_and_network("berxit")
    fine_tuning, stage = methods.get("berxit").stages(net, BERxiTOptions())
    assert fine_tuning.fine_tuning  # which --init replaces
    batch = Batch(pack(factories.token_ids([5, 9, 4])), torch.tensor([0, 1, 2]), [0, 1, 2])
    stage.begin_epoch(0, 1, 0)
    for parameter in net.added.parameters():
        parameter.grad = None
    stage.step(batch, lambda loss: loss.backward())
    assert all(p.grad is None for p in net.added.parameters())  # even steps: the last exit alone
    every = stage.step(batch, lambda loss: loss.backward())["loss"]
    states = forward_all_layers(net.encoder, batch.packed)
    exits = exit_losses(
        net, states, batch, [0, 1, 2, 3]
    ).sum()  # odd steps: all exits, each with the weight of the last
    unit = methods.get("berxit").objective(BERxiTOptions())(net, states, batch) - exits
    assert every == pytest.approx(float((exits + unit).detach()), rel=1e-5) and 0 < unit < 1
    assert all(p.grad is not None for p in net.added.parameters())
    with torch.no_grad():
        policy = method.policy(net, ThresholdSettings(threshold=1e-9))
        result = run(engines.make("torch", net.encoder), net, policy, pack(factories.token_ids([5, 9])))
    assert [event.layer for event in result.trace if event.kind == "head"] == [3]
    assert [event.layer for event in result.trace if event.kind == "exit_unit"] == [0, 1, 2]


def test_layerdrop_keeps_layers_evenly() -> None:
    method, net = method_and_network("layerdrop")
    policies = {n: method.policy(net, method.settings(n)) for n in (0, 1, 2, 3)}
    kept = {n: sorted(p.kept) for n, p in policies.items()}  # type: ignore[attr-defined]  # layerdrop's own attribute
    assert kept == {0: [1, 2, 3], 1: [3], 2: [2, 3], 3: [1, 2, 3]}


def test_truncate_refuses_more_layers_than_the_model_has() -> None:
    with pytest.raises(OfframpError, match="1 to 2"):
        method_and_network("truncate", k=3)
