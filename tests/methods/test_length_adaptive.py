"""The Length-Adaptive Transformer: what a step trains, which lengths it draws, who comes back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from offramp import engines, methods
from offramp.core.attention import AttentionScores
from offramp.core.cost import tokens_kept
from offramp.core.loop import Result, State, run
from offramp.core.packed import pack
from offramp.core.policy import PairPolicy, Policy
from offramp.errors import OfframpError
from offramp.inference.run_folder import build_network
from offramp.methods._shared.lengths import LengthPolicy, cliffs, shortest_lengths
from offramp.methods.length_adaptive import LengthAdaptiveOptions, LengthDropStage, LengthSettings
from offramp.nn.batches import Batch
from offramp.nn.network import Network
from offramp.tasks import get
from tests import factories
from tests.methods.test_exits import made as plain

LENGTHS = [12, 3, 20, 1]


def made(task: str = "classification", **options: Any) -> tuple[Network, LengthDropStage]:
    _, net = plain("length_adaptive", task, **options)
    _, stage = methods.get("length_adaptive").stages(net, LengthAdaptiveOptions(**options))
    assert isinstance(stage, LengthDropStage)
    return net, stage


class Watch(Policy):
    """Who is there after every layer."""

    def __init__(self) -> None:
        self.first: list[bool] = []

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        starts = s.packed.tokens["position"][s.packed.starts]
        self.first.append(bool((starts == 0).all()))
        return None


def answer(net: Network, settings: LengthSettings, watch: Policy | None = None) -> Result:
    policy = PairPolicy(LengthPolicy(net, settings), watch or Policy())
    with torch.no_grad():
        return run(engines.make("torch", net.encoder), net, policy, pack(factories.token_ids(LENGTHS)))


def test_each_row_keeps_its_share_and_its_first_token() -> None:
    net, _ = made()
    watch = Watch()
    result = answer(net, LengthSettings((0.5, 0.25, 0.1)), watch)
    fed = {event.layer: event.tokens.tolist() for event in result.trace if event.kind == "feed"}
    assert fed == {1: [6, 2, 10, 1], 2: [3, 2, 5, 1], 3: [2, 2, 2, 1]}
    assert all(watch.first)


def test_the_tokens_that_received_most_attention_stay() -> None:
    net, _ = made()
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

    answer(net, LengthSettings((1.0, 0.5, 0.5)), Look())
    others = seen["columns"][1:].topk(5).indices + 1
    assert seen["kept"].tolist() == sorted([0, *others.tolist()])


def test_lengths_drawn_for_training_lie_between_the_shortest_and_all() -> None:
    net, stage = made(drop=0.3)
    torch.manual_seed(0)
    assert stage.draw_lengths(frozenset(), shortest=True) == pytest.approx((0.7, 0.49, 0.343))
    assert stage.draw_lengths(frozenset({2}), shortest=True) == pytest.approx((0.7, 0.7, 0.49))
    assert shortest_lengths(net) == pytest.approx((0.7, 0.49, 0.343))
    drawn = [stage.draw_lengths(frozenset(), shortest=False) for _ in range(200)]
    for before, now in ((None, 0), (0, 1), (1, 2)):
        ratio = torch.tensor([one[now] / (1.0 if before is None else one[before]) for one in drawn])
        assert 0.7 <= float(ratio.min()) < 0.72 and 0.98 < float(ratio.max()) <= 1.0


def test_some_of_the_random_lengths_are_cliffs() -> None:
    net, stage = made(cliffs=0.5)
    known = cliffs(shortest_lengths(net))
    torch.manual_seed(0)
    drawn = [stage.draw_lengths(frozenset(), shortest=False) in known for _ in range(300)]
    assert 0.4 < sum(drawn) / 300 < 0.6
    edge = known[0].count(1.0) + 1
    assert not any(stage.draw_lengths(frozenset({edge}), shortest=False) in known[:1] for _ in range(50))
    assert not any(stage.draw_lengths(frozenset(), shortest=True) in known for _ in range(50))


def some_batch() -> Batch:
    return Batch(pack(factories.token_ids([12, 7, 20])), torch.tensor([0, 1, 2]), [0, 1, 2])


def test_a_step_is_four_passes_that_share_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stage = made(layer_drop=0.0)
    drawn: list[tuple[float, ...]] = []
    real = stage.draw_lengths
    monkeypatch.setattr(stage, "draw_lengths", lambda out, smallest: drawn.append(real(out, smallest)) or drawn[-1])
    losses: list[float] = []
    stage.set_train_mode()
    torch.manual_seed(0)
    told = stage.step(some_batch(), lambda loss: losses.append(float(loss.detach())))
    assert len(losses) == 4 and told["loss"].item() == pytest.approx(sum(losses))
    assert drawn[0] == pytest.approx((0.8, 0.64, 0.512)) and len(drawn) == 3


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_short_models_learn_from_the_full_one_alone(kl: str) -> None:
    """With nothing dropped the short models say what the full one says: their divergence is zero, labels or not."""
    net, stage = made(drop=1e-9, layer_drop=0.0, kl=kl, sandwiches=0)
    net.eval()
    losses: list[float] = []
    stage.step(some_batch(), lambda loss: losses.append(float(loss.detach())))
    full, short = losses
    assert short == pytest.approx(0.0, abs=1e-6) and full > 0.1


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_divergence_is_that_of_the_full_from_the_short_model_or_the_other_way(kl: str) -> None:
    net, stage = made(drop=0.8, layer_drop=0.0, kl=kl, sandwiches=0)
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
    meant = (one.exp() * (one - other)).sum(1).mean() / 2  # two passes share the step
    assert losses[1] == pytest.approx(float(meant), rel=1e-3) and meant > 1e-5


def test_layers_are_skipped_as_often_as_asked() -> None:
    net, stage = made(layer_drop=0.3)
    torch.manual_seed(0)
    drawn = [stage.draw_skipped_layers() for _ in range(300)]
    for layer in range(1, net.depth + 1):
        assert 0.2 < sum(layer in out for out in drawn) / 300 < 0.4


def test_tags_of_dropped_tokens_are_answered() -> None:
    """Drop-and-restore: every token has an answer, and the others' answers show that somebody was missing."""
    rows = [{"tokens": ["a", "b", "c"], "tags": ["O", "B-X", "I-X"]}]
    spec = get("tagging").from_rows(rows, "rows")
    net = build_network(
        factories.hf_model("bert", spec.auto_class), spec, plain("length_adaptive")[0], LengthAdaptiveOptions()
    )
    net.eval()
    short, full = answer(net, LengthSettings((0.5, 0.25, 0.1))), answer(net, LengthSettings())
    assert short.logits.shape == full.logits.shape == (sum(LENGTHS), spec.outputs)
    assert tokens_kept(short.trace, 3, 4).sum() < tokens_kept(full.trace, 3, 4).sum()
    last = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    assert torch.allclose(short.logits[last[3]], full.logits[last[3]], atol=1e-5)  # a row of one token loses nobody
    assert not torch.allclose(short.logits, full.logits, atol=1e-2)


@pytest.mark.parametrize("options", [{"drop": 0.0}, {"drop": 1.0}, {"layer_drop": 1.0}, {"sandwiches": -1}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OfframpError, match=r"e\.g\. drop=0\.2"):
        LengthAdaptiveOptions(**options)


@pytest.mark.parametrize("often", [-0.1, 1.1, float("nan")])
def test_cliffs_are_asked_for_by_a_share(often: float) -> None:
    with pytest.raises(OfframpError, match=r"use 0 to 1, e\.g\. 0\.5"):
        LengthAdaptiveOptions(cliffs=often)


def test_settings_are_plain_json() -> None:
    assert asdict(LengthSettings((0.5, 0.5))) == {"lengths": (0.5, 0.5)}
