"""Off-ramps: what they read."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from offramp.core.cost import HeadCost
from offramp.core.packed import Packed, pack
from offramp.parts.heads import LexicalRamp


class Silent(nn.Module):
    """A head that says nothing."""

    def forward(self, packed: Packed) -> Tensor:
        return torch.zeros(packed.count, 3)


def lexical() -> LexicalRamp:
    torch.manual_seed(0)
    ramp = LexicalRamp(Silent(), HeadCost(5.0, 1.0), vocabulary=20, outputs=3)
    nn.init.normal_(ramp.words)
    nn.init.normal_(ramp.pairs)
    return ramp


def by_hand(ramp: LexicalRamp, row: list[int]) -> Tensor:
    beside = [ramp.pairs[(a * 31337 + b * 7919) % ramp.PAIRS] for a, b in itertools.pairwise(row)]
    return ramp.STEP * (sum(ramp.words[i] for i in row) + sum(beside, torch.zeros(3)))


def test_a_lexical_ramp_adds_up_words_and_neighbours_of_each_row() -> None:
    ramp, rows = lexical(), [[1, 2, 3], [4], [5, 6, 5, 6, 7]]
    with torch.no_grad():
        said = ramp(pack(rows))
        for row, logits in zip(rows, said, strict=True):
            assert torch.allclose(logits, by_hand(ramp, row), atol=1e-5)
            assert torch.equal(ramp(pack([row]))[0], logits)  # no neighbour from another row


def test_its_tables_learn_and_are_paid_for() -> None:
    ramp = lexical()
    ramp(pack([[1, 2], [3]])).sum().backward()
    assert ramp.words.grad is not None and ramp.pairs.grad is not None
    assert ramp.words.grad.abs().sum(1).nonzero().ravel().tolist() == [1, 2, 3]
    assert int((ramp.pairs.grad.abs().sum(1) > 0).sum()) == 1  # a single pair of neighbours
    assert ramp.cost == HeadCost(5.0, 1.0 + 2 * 3)


def test_words_that_are_not_there_do_not_speak() -> None:
    ramp, rows = lexical(), [[1, 2, 3, 4], [5, 6]]
    packed = pack(rows).with_tokens(present=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.5]))
    with torch.no_grad():
        said = ramp(packed)
        gone = by_hand(ramp, [1, 2]) + ramp.STEP * ramp.words[4]
        half = 0.5 * by_hand(ramp, [5, 6]) + 0.5 * ramp.STEP * ramp.words[5]  # of the word and of the pair
    assert torch.allclose(said, torch.stack([gone, half]), atol=1e-5)
