"""Counted operations against published numbers and against torch's own counter."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from offramp import backbones, engines
from offramp.core import cost
from offramp.core.attention import AttentionScores, Layout
from offramp.core.cost import Event, HeadCost, LayerCost
from offramp.core.engine import Engine
from offramp.core.loop import run
from offramp.core.packed import pack
from offramp.core.policy import Policy
from offramp.nn.exit_policies import ExitOptions, build_exit_heads
from offramp.nn.network import bare_network
from offramp.tasks import get
from tests import factories
from tests.factories import ExitAt, KeepFirst


class MiniLM:
    """6×384, FFN 1536, encoder only: the shape whose numbers are published."""

    wide = 384

    def embed_cost(self) -> HeadCost:
        return HeadCost(0, 0)

    def layer_cost(self, layer: int) -> LayerCost:
        shape = {"hidden_size": self.wide, "num_attention_heads": 12, "intermediate_size": 4 * self.wide}
        config = transformers.BertConfig(num_hidden_layers=1, **shape)
        with torch.device("meta"):
            net = transformers.BertModel(config)
        return backbones.encoder(net).layers[0].cost

    def exit_cost(self, layer: int) -> HeadCost:
        return HeadCost(0, 0)

    exit_unit_cost = predictor_cost = exit_cost


def test_published_macs_of_a_full_minilm() -> None:
    assert round(float(cost.full(MiniLM(), 6, torch.tensor([384]))) / 1e9, 3) == 4.756


class BertBase(MiniLM):
    """12×768, FFN 3072."""

    wide = 768


def test_published_macs_of_a_full_bert() -> None:
    """The published count, 35 340 779 904, includes pooler and head; ours here is the encoder alone."""
    counted = float(cost.full(BertBase(), 12, torch.tensor([384])))
    assert round(counted / 1e9, 2) == 35.33 and 35_340_779_904 - counted < 0.001 * counted


def shortened(model: MiniLM, length: int, kept: Iterable[int]) -> float:
    """MACs of one row whose layers keep so many tokens between attention and feed-forward."""
    log, row = [], torch.tensor([0])
    for layer, count in enumerate(kept, start=1):
        n, m = torch.tensor([length]), torch.tensor([count])
        log += [Event("attend", layer, row, n, n), Event("feed", layer, row, m, m)]
        length = count
    return float(cost.macs(log, model, 1))


@pytest.mark.parametrize(
    ("kept", "billions"),
    [((269, 253, 252, 202, 104, 34), 2.484), ((315, 251, 242, 159, 142, 33), 2.545)],  # published: 2.49 and 2.55
)
def test_published_macs_of_length_configurations(kept: tuple[int, ...], billions: float) -> None:
    assert round(shortened(MiniLM(), 384, kept) / 1e9, 3) == billions


@pytest.mark.parametrize(
    ("depth", "length", "share"), [(12, 128, 0.348), (6, 128, 0.541), (12, 384, 0.333), (6, 384, 0.529)]
)
def test_the_least_that_dropping_a_fifth_in_every_layer_costs(depth: int, length: int, share: float) -> None:
    """Published shares that end exactly here (0.35, 0.54) are limited by the drop, not by what is lost."""
    kept = [length]
    for _ in range(depth):
        kept.append(max(2, math.ceil(0.8 * kept[-1] - 1e-9)))
    full = float(cost.full(BertBase(), depth, torch.tensor([length])))
    assert round(shortened(BertBase(), length, kept[1:]) / full, 3) == share


class Eager(Engine):
    """The torch engine with every attention written out as matrix products, which torch's counter can see."""

    def __init__(self, encoder: backbones.Encoder) -> None:
        self.inner = engines.make("torch", encoder)
        self.embed, self.feed = self.inner.embed, self.inner.feed

    @property
    def depth(self) -> int:
        return self.inner.depth

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, AttentionScores | None]:
        return self.inner.attend(layer, queries, keys, where, True)


POLICIES = [
    Policy(),
    ExitAt({1: [1], 2: [0]}),
    KeepFirst({1: 6, 2: 3}, "after_attention"),
    KeepFirst({2: 5}, "before_layer"),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", factories.BACKBONES)
@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_counts_equal_torchs_flop_counter(kind: str, task: str, policy: Any) -> None:
    rows = [{"text": "a", "label": i, "tokens": ["a", "b", "c"], "tags": ["O", "B-X", "I-X"]} for i in range(3)]
    spec = get(task).from_rows(rows, "rows")
    net = bare_network(factories.hf_model(kind, spec.auto_class), spec)
    net.added.update({"exit_heads": build_exit_heads(net, ExitOptions())})
    packed = pack(factories.token_ids([12, 12]))  # equal lengths: attention computes no padding
    with torch.no_grad():
        run(Eager(net.encoder), net, policy, packed)  # what a model computes once (position vectors) is no row's cost
        with FlopCounterMode(display=False) as counter:
            result = run(Eager(net.encoder), net, policy, packed)
    counted = float(cost.macs(result.trace, net, 2).sum())
    assert 2 * counted == pytest.approx(counter.get_total_flops())
