"""TR-BERT: selectors, rollouts and their loss, the heuristic, and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offramp import engines, methods
from offramp.core import cost
from offramp.core.loop import run
from offramp.core.packed import pack
from offramp.errors import OfframpError
from offramp.methods import tr_bert
from offramp.methods.tr_bert import (
    Rollout,
    TRBERTOptions,
    TRBERTPolicy,
    TRBERTSettings,
    hooks_of_last_block,
    repeat_rows,
    selector_layers,
)
from offramp.nn.batches import Batch, Data, build_batch, pack_rows
from offramp.nn.network import Network
from offramp.training.distillation import distillation_loss_by_row
from offramp.training.forward import forward_all_layers, forward_with_dropping
from offramp.training.losses import last_exit_loss
from tests import factories

LENGTHS = [9, 3, 17, 5]
FOUR_LAYERS = {"num_hidden_layers": 4}


def network_and_rows(task: str = "classification") -> tuple[Network, Data]:
    return factories.network("tr_bert", task, seed=None, config=FOUR_LAYERS), factories.data(LENGTHS)


def all_rows(net: Network, data: Data) -> Batch:
    return factories.batch(net, data)


def run_rollout(net: Network, repeated: Any, **fields: Any) -> tuple[Rollout, Tensor]:
    rollout = Rollout(net, **fields)
    torch.manual_seed(0)
    return rollout, run(engines.make("torch", net.encoder), net, rollout, repeated).logits


def test_selector_layers_are_those_of_the_published_models() -> None:
    expected = {12: (2, 7), 6: (2, 4), 3: (2,), 1: (1,)}
    assert {depth: selector_layers(depth) for depth in expected} == expected


def test_repeat_rows_gives_blocks_of_the_same_rows() -> None:
    net, data = network_and_rows()
    packed = pack_rows(net.task, data.encoded)
    repeated = repeat_rows(packed, 3)
    assert repeated.lengths.tolist() == LENGTHS * 3 and repeated.rows["origin"].tolist() == list(range(12))
    assert torch.equal(repeated.tokens["id"].view(3, -1)[2], packed.tokens["id"])
    assert torch.equal(repeated.tokens["origin"], torch.arange(packed.total * 3))
    engine = engines.make("torch", net.encoder)
    once, often = (run(engine, net, TRBERTPolicy(net, TRBERTSettings()), p).logits for p in (packed, repeated))
    assert torch.allclose(often, once.repeat(3, 1), atol=1e-5)


def test_guided_rows_keep_the_tokens_that_the_heuristic_ranks_highest() -> None:
    net, data = network_and_rows()
    packed = pack_rows(net.task, data.encoded)
    worth = torch.rand(packed.total, 2)
    worth[packed.starts] = 2.0
    with torch.no_grad():  # all tokens are kept with probability 1/2
        for _, p in net.added.named_parameters():
            p.zero_()
    rollout, _ = run_rollout(net, packed, worth=worth, guided=4)
    kept = [rollout.kept_tokens[0][packed.row_of_token[rollout.kept_tokens[0]] == row] for row in range(4)]
    for row, (start, n) in enumerate(zip(packed.starts.tolist(), LENGTHS, strict=True)):
        count = round(n / 2)  # of probabilities 1/2; Python and torch both round halves to even
        best = worth[start : start + n, 0].topk(count).indices + start
        assert kept[row].tolist() == sorted(best.tolist())


def test_rollout_loss_is_advantage_times_surprise() -> None:
    """The advantage is the reward of a choice minus the mean of its row; the loss is advantage × mean −log p."""
    net, data = network_and_rows()
    repeated = repeat_rows(pack_rows(net.task, data.encoded), 2)
    rollout, _ = run_rollout(net, repeated)
    losses = torch.rand(8)
    kept = rollout.kept_share(repeated)
    counts = [[int((repeated.row_of_token[s] == row).sum()) for row in range(8)] for s in rollout.kept_tokens]
    by_hand = [sum(c[row] for c in counts) / 2 / repeated.lengths[row].item() for row in range(8)]
    assert kept.tolist() == pytest.approx(by_hand)
    reward = -losses - 0.5 * kept
    surprise = torch.stack(rollout.surprise).mean(0)
    expected = sum((reward[i] - (reward[i % 4] + reward[i % 4 + 4]) / 2) * surprise[i] for i in range(8)) / 8
    assert rollout.loss(losses, 0.5, repeated, 2).item() == pytest.approx(expected.item(), rel=1e-4)


def test_surprise_is_the_mean_over_tokens_that_can_be_dropped() -> None:
    net, data = network_and_rows()
    packed = pack_rows(net.task, data.encoded)
    rollout, _ = run_rollout(net, packed)
    with torch.no_grad():
        states = forward_all_layers(net.encoder, packed).states[1]
        chance = net.added["predictors"]["2"](states).sigmoid()
    kept = torch.zeros(packed.total, dtype=torch.bool)
    kept[rollout.kept_tokens[0]] = True
    log_chance = torch.where(kept, chance, 1 - chance).log()
    for row, (start, n) in enumerate(zip(packed.starts.tolist(), LENGTHS, strict=True)):
        assert kept[start], "the first token was dropped"
        own = -log_chance[start + 1 : start + n].mean().item()
        assert rollout.surprise[0][row].item() == pytest.approx(own, rel=1e-4)


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_hooks_of_last_block_give_the_logits_of_the_rollout(task: str) -> None:
    net, data = network_and_rows(task)
    packed = pack_rows(net.task, data.encoded)
    repeated = repeat_rows(packed, 3)
    with torch.no_grad():
        rollout, logits = run_rollout(net, repeated)
        soft = forward_all_layers(net.encoder, packed, hooks_of_last_block(rollout, packed, net))
        again = net(net.depth, soft.after(net.depth))
    assert torch.allclose(again, logits[-len(again) :], atol=1e-4)
    assert not torch.allclose(again, logits[: len(again)], atol=1e-3), "all choices were the same"


@pytest.mark.parametrize("name", ["tr_bert+fastbert", "tr_bert+branchynet"])
def test_exit_heads_of_a_pair_give_the_same_with_masks_and_with_dropping(name: str) -> None:
    net = factories.network(name, seed=None, config=FOUR_LAYERS, bag_of_words_depth=3)
    packed = pack(factories.token_ids(LENGTHS))
    with torch.no_grad():
        for parameter in net.added["exit_heads"].parameters():
            parameter.normal_(std=0.1)
        rollout = Rollout(net)
        dropped = forward_with_dropping(net, packed, rollout)
        masked = forward_all_layers(net.encoder, packed, hooks_of_last_block(rollout, packed, net))
        for layer in sorted(net.exit_heads):
            assert torch.allclose(net(layer, dropped.after(layer)), net(layer, masked.after(layer)), atol=1e-3), layer
    assert dropped.after(3).total < packed.total


def test_token_worth_is_gradient_times_change() -> None:
    net, data = network_and_rows()
    worth = tr_bert.token_worth(net, all_rows(net, data))
    assert worth.shape == (sum(LENGTHS), 2)
    at = 0
    for row, n in enumerate(LENGTHS):
        alone = build_batch(net.task, data, [row], None)
        states = forward_all_layers(net.encoder, alone.packed).states
        body = states[3].detach().requires_grad_()  # two thirds of four layers, and one
        layer = net.encoder.layers[3]
        top = layer.feed(layer.attend(body, body, alone.packed.layout, False, None)[0])
        loss = torch.nn.functional.cross_entropy(net(4, alone.packed.with_states(top)), alone.targets)
        (grad,) = torch.autograd.grad(loss, body)
        for place, selector in enumerate(selector_layers(4)):
            expected = (grad * (states[3] - states[selector - 1])).sum(1).abs()
            assert torch.allclose(worth[at : at + n, place], expected, rtol=1e-3, atol=1e-6)
        at += n


def test_last_stage_trains_by_the_objective_of_a_depth_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = network_and_rows()
    passes: list[Any] = []

    def objective(network: Network, states: Any, batch: Batch) -> Tensor:
        passes.append(states)
        return last_exit_loss(network, states, batch)

    stage = methods.get("tr_bert").stages(net, TRBERTOptions(samples=2), objective)[-1]
    stage.prepare(data, tmp_path)
    losses, rewards, real = list[Tensor](), list[Tensor](), Rollout.loss
    monkeypatch.setattr(Rollout, "loss", lambda *inputs: rewards.append(real(*inputs)) or rewards[-1])
    logged = stage.step(all_rows(net, data), lambda loss: (losses.append(loss.detach()), loss.backward()))
    assert torch.allclose(logged["loss"] + rewards[0], losses[0])
    batch, (states,) = all_rows(net, data), passes
    by_labels, logits = last_exit_loss(net, states, batch), net(net.depth, states.after(net.depth))
    by_teacher = distillation_loss_by_row(net, logits, stage.teacher.for_batch(batch), batch.packed).mean()
    assert torch.allclose(logged["loss"], by_labels + by_teacher, rtol=1e-4)
    assert sorted(states.present) == [1, 2, 3, 4] and bool((states.present[1] == 1).all())
    assert all(p.grad is not None for name, p in net.named_parameters() if "pooler" not in name)


def test_threshold_of_one_keeps_the_first_tokens_only() -> None:
    net, data = network_and_rows()
    result = run(
        engines.make("torch", net.encoder),
        net,
        TRBERTPolicy(net, TRBERTSettings(threshold=1.0)),
        pack_rows(net.task, data.encoded),
    )
    kept = cost.tokens_kept(result.trace, net.depth, 4) * net.depth
    assert kept.tolist() == [n + 3 for n in LENGTHS]


def test_trained_run_has_cheaper_operating_points(base: str, tmp_path: Path) -> None:
    folder = factories.run_folder(base, tmp_path, "tr_bert", options={"alpha": 3.0, "samples": 3, "select_lr": 0.02})
    from offramp.inference.predictor import Predictor

    predictor = Predictor.load(str(folder))
    assert predictor.points is not None and min(p.mac_share for p in predictor.points.points) < 0.9


def test_invalid_options_and_settings_are_refused() -> None:
    nan, inf = float("nan"), float("inf")
    rates = [{"select_lr": rate} for rate in (0.0, -1.0, 1.0, nan)]
    costs = [{"alpha": -1.0}, {"alpha": inf}, {"alpha_both": inf}, {"guide": 2.0}]
    for wrong in ({"samples": 1}, {"slack": -0.01}, {"slack": nan}, *costs, *rates):
        with pytest.raises(OfframpError):
            TRBERTOptions(**wrong)
    with pytest.raises(OfframpError, match="all tokens are kept"):
        TRBERTSettings(threshold=1.5)
