"""The Length-Adaptive Transformer: what a step trains, which lengths it draws, which tokens are restored."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offramp import engines, methods
from offramp.calibration.grids import length_macs
from offramp.core.attention import AttentionScores
from offramp.core.cost import macs, tokens_kept
from offramp.core.loop import Result, State, run
from offramp.core.packed import pack
from offramp.core.policy import PairPolicy, Policy
from offramp.errors import OfframpError
from offramp.methods._shared.lengths import LengthPolicy
from offramp.methods.length_adaptive import (
    LengthAdaptiveOptions,
    LengthDropStage,
    LengthSettings,
    RestoringMap,
    length_policy,
)
from offramp.nn.batches import Batch
from offramp.nn.lengths import cliffs, shortest_lengths
from offramp.nn.network import Network
from tests import factories

LENGTHS = [12, 3, 20, 1]


def network_and_stage(**options: Any) -> tuple[Network, LengthDropStage]:
    net = factories.network("length_adaptive", seed=None, **options)
    _, stage = methods.get("length_adaptive").stages(net, LengthAdaptiveOptions(**options))
    assert isinstance(stage, LengthDropStage)
    return net, stage


class FirstTokens(Policy):
    """Records after every layer whether each row still has its first token."""

    def __init__(self) -> None:
        self.first: list[bool] = []

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        starts = s.packed.tokens["position"][s.packed.starts]
        self.first.append(bool((starts == 0).all()))
        return None


def run_lengths(net: Network, settings: LengthSettings, recorder: Policy | None = None) -> Result:
    policy = PairPolicy(length_policy(net, settings), recorder or Policy())
    with torch.no_grad():
        return run(engines.make("torch", net.encoder), net, policy, pack(factories.token_ids(LENGTHS)))


def test_each_row_keeps_its_share_and_its_first_token() -> None:
    net, _ = network_and_stage()
    recorder = FirstTokens()
    result = run_lengths(net, LengthSettings((0.5, 0.25, 0.1)), recorder)
    fed = {event.layer: event.tokens.tolist() for event in result.trace if event.kind == "feed"}
    assert fed == {1: [6, 2, 10, 1], 2: [3, 2, 5, 1], 3: [2, 2, 2, 1]}
    assert all(recorder.first)


def test_tokens_that_received_most_attention_are_kept() -> None:
    net, _ = network_and_stage()
    seen: dict[str, Tensor] = {}

    class Look(Policy):
        def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
            if layer == 2 and scores is not None:
                seen.update(columns=scores.columns[:12], origin=s.packed.tokens["origin"][:12])
            return None

        def should_exit(self, layer: int, s: State) -> Tensor | None:
            if layer == 2:
                seen["kept"] = s.packed.tokens["origin"][s.packed.tokens["origin"] < 12]
            return None

    run_lengths(net, LengthSettings((1.0, 0.5, 0.5)), Look())
    others = seen["columns"][1:].topk(5).indices + 1
    assert seen["kept"].tolist() == sorted([0, *others.tolist()])


def test_drawn_lengths_lie_between_the_shortest_and_all_tokens() -> None:
    net, stage = network_and_stage(drop=0.3)
    torch.manual_seed(0)
    assert stage.draw_lengths(frozenset(), shortest=True) == pytest.approx((0.7, 0.49, 0.343))
    assert stage.draw_lengths(frozenset({2}), shortest=True) == pytest.approx((0.7, 0.7, 0.49))
    assert shortest_lengths(net) == pytest.approx((0.7, 0.49, 0.343))
    drawn = [stage.draw_lengths(frozenset(), shortest=False) for _ in range(200)]
    for before, now in ((None, 0), (0, 1), (1, 2)):
        ratio = torch.tensor([one[now] / (1.0 if before is None else one[before]) for one in drawn])
        assert 0.7 <= float(ratio.min()) < 0.72 and 0.98 < float(ratio.max()) <= 1.0


def test_cliffs_are_drawn_with_their_probability() -> None:
    net, stage = network_and_stage(cliffs=0.5)
    known = cliffs(shortest_lengths(net))
    torch.manual_seed(0)
    drawn = [stage.draw_lengths(frozenset(), shortest=False) in known for _ in range(300)]
    assert 0.4 < sum(drawn) / 300 < 0.6
    edge = known[0].count(1.0) + 1
    assert not any(stage.draw_lengths(frozenset({edge}), shortest=False) in known[:1] for _ in range(50))
    assert not any(stage.draw_lengths(frozenset(), shortest=True) in known for _ in range(50))


def some_batch() -> Batch:
    return Batch(pack(factories.token_ids([12, 7, 20])), torch.tensor([0, 1, 2]), [0, 1, 2])


def test_step_is_four_passes_of_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stage = network_and_stage(layer_drop=0.0)
    drawn: list[tuple[float, ...]] = []
    real = stage.draw_lengths
    monkeypatch.setattr(
        stage, "draw_lengths", lambda skipped, shortest: drawn.append(real(skipped, shortest)) or drawn[-1]
    )
    losses: list[float] = []
    stage.set_train_mode()
    torch.manual_seed(0)
    logged = stage.step(some_batch(), lambda loss: losses.append(float(loss.detach())))
    assert len(losses) == 4 and logged["loss"].item() == pytest.approx(sum(losses))
    assert drawn[0] == pytest.approx((0.8, 0.64, 0.512)) and len(drawn) == 3


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_short_models_are_trained_by_the_full_model_alone(kl: str) -> None:
    """With nothing dropped short models give the logits of the full one, so that their divergence is zero."""
    net, stage = network_and_stage(drop=1e-9, layer_drop=0.0, kl=kl, sandwiches=0)
    net.eval()
    losses: list[float] = []
    stage.step(some_batch(), lambda loss: losses.append(float(loss.detach())))
    full, short = losses
    assert short == pytest.approx(0.0, abs=1e-6) and full > 0.1


def test_the_full_length_learns_the_logits_of_the_fine_tuned_model(tmp_path: Path) -> None:
    losses = {}
    for distil in (True, False):
        net, stage = network_and_stage(distil=distil, layer_drop=0.0, sandwiches=0)
        stage.follows_fine_tuning, data = True, factories.data()
        stage.prepare(data, tmp_path)
        batch = factories.batch(net, data)
        net.eval()
        losses[distil, "unchanged"] = full_length_loss(stage, batch)
        with torch.no_grad():
            net.hf.classifier.bias[0] += 2.0
        losses[distil, "changed"] = full_length_loss(stage, batch)
    assert losses[True, "unchanged"] == pytest.approx(losses[False, "unchanged"], abs=1e-5)
    assert losses[True, "changed"] > losses[False, "changed"] + 0.1


def full_length_loss(stage: LengthDropStage, batch: Batch) -> float:
    """Return the loss of a step's first pass, which drops nothing."""
    losses: list[float] = []
    stage.step(batch, lambda loss: losses.append(float(loss.detach())))
    return losses[0]


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_distillation_loss_is_the_chosen_divergence(kl: str) -> None:
    net, stage = network_and_stage(drop=0.8, layer_drop=0.0, kl=kl, sandwiches=0)
    net.eval()
    losses: list[float] = []
    stage.step(some_batch(), lambda loss: losses.append(float(loss.detach())))
    packed, engine = some_batch().packed, engines.make("torch", net.encoder)
    with torch.no_grad():
        full, short = (
            run(engine, net, LengthPolicy(net, settings), packed).logits.log_softmax(-1)
            for settings in (LengthSettings(), LengthSettings(shortest_lengths(net)))
        )
    one, other = (full, short) if kl == "forward" else (short, full)
    expected = (one.exp() * (one - other)).sum(1).mean() / 2  # two passes share the step
    assert losses[1] == pytest.approx(float(expected), rel=1e-3) and expected > 1e-5


def test_layers_are_skipped_with_their_probability() -> None:
    net, stage = network_and_stage(layer_drop=0.3)
    torch.manual_seed(0)
    drawn = [stage.draw_skipped_layers() for _ in range(300)]
    for layer in range(1, net.depth + 1):
        assert 0.2 < sum(layer in skipped for skipped in drawn) / 300 < 0.4


def test_dropped_tokens_have_answers() -> None:
    """Drop-and-restore: every token has an answer, and other tokens' answers depend on the dropped ones."""
    net = factories.network("length_adaptive", "tagging", seed=None)
    short, full = run_lengths(net, LengthSettings((0.5, 0.25, 0.1))), run_lengths(net, LengthSettings())
    assert short.logits.shape == full.logits.shape == (sum(LENGTHS), net.task.outputs)
    assert tokens_kept(short.trace, 3, 4).sum() < tokens_kept(full.trace, 3, 4).sum()
    last = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    assert torch.allclose(short.logits[last[3]], full.logits[last[3]], atol=1e-5)  # a row of one token loses none
    assert not torch.allclose(short.logits, full.logits, atol=1e-2)


def test_dropped_tokens_return_with_the_mapped_output_of_the_layer_below() -> None:
    net = factories.network("length_adaptive", "tagging", seed=None)
    packed = pack(factories.token_ids(LENGTHS))
    result = run_lengths(net, LengthSettings((0.5, 0.5, 0.5)))
    (event,) = [event for event in result.trace if event.kind == "predictor" and int(event.tokens.sum())]
    assert event.layer == 1 and event.tokens.tolist() == [6, 1, 10, 0]  # the tokens that layer 1 drops
    with torch.no_grad():
        as_embedded = net(net.depth, packed.with_states(net.encoder.embed(packed)))
    same = torch.isclose(result.logits, as_embedded, atol=1e-5).all(1)
    assert int(same.sum()) == 17, "at first maps are the identity"
    first = net.added["predictors"]["1"]
    assert isinstance(first, RestoringMap)
    with torch.no_grad():
        first.weight.zero_()
        first.bias.fill_(0.3)
        constant = net.model_head.apply(packed.with_states(torch.full_like(net.encoder.embed(packed), 0.3)))
    mapped = run_lengths(net, LengthSettings((0.5, 0.5, 0.5))).logits
    assert torch.allclose(mapped[same], constant[same], atol=1e-5)
    assert torch.equal(mapped[~same], result.logits[~same]), "other tokens are not changed"


def test_maps_are_trained_and_their_cost_is_counted() -> None:
    net = factories.network("length_adaptive", "tagging", seed=None)
    _, stage = methods.get("length_adaptive").stages(net, LengthAdaptiveOptions(layer_drop=0.0, cliffs=0.0))
    stage.step(factories.batch(net), lambda loss: loss.backward())
    maps = net.added["predictors"]
    assert all(maps[layer].weight.grad.abs().sum() > 0 for layer in ("1", "2", "3"))
    lengths = torch.tensor(LENGTHS)
    counted = macs(run_lengths(net, LengthSettings((0.5, 0.5, 0.5))).trace, net, len(LENGTHS))
    assert torch.allclose(counted, length_macs(net, (0.5, 0.5, 0.5), lengths))
    without = factories.network("length_adaptive", "tagging", seed=None, restore="state")
    assert float((counted - length_macs(without, (0.5, 0.5, 0.5), lengths)).sum()) == 17 * net.encoder.hidden**2


def test_folders_of_earlier_versions_restore_the_last_state() -> None:
    method = methods.get("length_adaptive")
    assert method.earlier_options == methods.get("length_adaptive+branchynet").earlier_options == {"restore": "state"}
    options = methods.configure(method.options, dict(method.earlier_options), "length_adaptive")
    net = factories.network("length_adaptive", "tagging", seed=None, restore="state")
    assert "predictors" not in net.added and "predictors" not in method.modules(net, options)
    assert type(method.policy(net, LengthSettings())) is LengthPolicy
    rows = factories.network("length_adaptive", seed=None)
    assert "predictors" not in rows.added, "whole rows need no dropped tokens back"


def test_half_of_the_random_lengths_are_cliffs_where_tokens_have_answers() -> None:
    net = factories.network("length_adaptive", "tagging", seed=None)
    _, stage = methods.get("length_adaptive").stages(net, LengthAdaptiveOptions())
    assert isinstance(stage, LengthDropStage)
    torch.manual_seed(0)
    known = cliffs(shortest_lengths(net))
    steep = [stage.draw_lengths(frozenset(), shortest=False) in known for _ in range(200)]
    assert 70 < sum(steep) < 130
    _, rows = network_and_stage()
    assert not any(rows.draw_lengths(frozenset(), shortest=False) in known for _ in range(20))


@pytest.mark.parametrize("options", [{"drop": 0.0}, {"drop": 1.0}, {"layer_drop": 1.0}, {"sandwiches": -1}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OfframpError, match=r"e\.g\. drop=0\.2"):
        LengthAdaptiveOptions(**options)


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_probability_of_cliffs_outside_its_range_is_refused(probability: float) -> None:
    with pytest.raises(OfframpError, match=r"use 0 to 1, e\.g\. 0\.5"):
        LengthAdaptiveOptions(cliffs=probability)


def test_settings_are_plain_json() -> None:
    assert asdict(LengthSettings((0.5, 0.5))) == {"lengths": (0.5, 0.5)}
