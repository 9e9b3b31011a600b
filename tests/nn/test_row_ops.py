"""Within rows of a packed batch: sums, softmax, ranks; and pooling over tokens that are only partly there."""

from __future__ import annotations

import torch

from offramp.core.packed import Packed, pack
from offramp.nn import row_ops as rows
from tests import tiny

LENGTHS = [4, 1, 6]


def packed() -> Packed:
    return pack(tiny.rows(LENGTHS))


def test_shares_are_each_rows_own() -> None:
    logits = torch.randn(11) * 50
    alone = torch.cat([part.log_softmax(0) for part in logits.split(LENGTHS)])
    assert torch.allclose(rows.log_softmax_by_row(logits, packed()), alone, atol=1e-5)
    assert torch.allclose(rows.sum_by_row(logits, packed()), torch.stack([p.sum() for p in logits.split(LENGTHS)]))


def test_gradients_of_shares_are_those_of_softmax() -> None:
    logits, weights = torch.randn(11, requires_grad=True), torch.randn(11)
    (ours,) = torch.autograd.grad((rows.log_softmax_by_row(logits, packed()) * weights).sum(), logits)
    alone = torch.cat([part.log_softmax(0) for part in logits.split(LENGTHS)])
    (theirs,) = torch.autograd.grad((alone * weights).sum(), logits)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_ranks_fall_with_the_value_and_break_ties_by_place() -> None:
    values = torch.tensor([1.0, 3.0, 1.0, 2.0, 9.0, 0.0, 0.0, 5.0, 1.0, 2.0, 3.0])
    assert rows.rank_by_row(values, packed()).tolist() == [2, 0, 3, 1, 0, 4, 5, 0, 3, 2, 1]


def test_pooling_counts_tokens_as_far_as_they_are_present() -> None:
    batch = packed().with_states(torch.randn(11, 3))
    keep = torch.tensor([1, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    gone, soft = batch.keep_tokens(keep), batch.with_tokens(present=keep.float())
    assert torch.allclose(soft.mean(), gone.mean(), atol=1e-6) and torch.allclose(soft.max(), gone.max())
    whole = batch.with_tokens(present=torch.ones(11))
    assert torch.allclose(whole.mean(), batch.mean()) and torch.allclose(whole.max(), batch.max())
    half = batch.with_tokens(present=torch.full((11,), 0.5))
    assert torch.allclose(half.mean(), batch.mean(), atol=1e-6)
