"""Sums, softmax and ranks within rows of a packed batch, and pooling over tokens that are partly present."""

from __future__ import annotations

import torch

from offramp.core.packed import Packed, pack
from offramp.nn.row_ops import first_tokens, log_softmax_by_row, rank_by_row, sum_by_row
from tests import factories

LENGTHS = [4, 1, 6]


def packed() -> Packed:
    return pack(factories.token_ids(LENGTHS))


def test_log_softmax_and_sum_by_row_equal_those_of_each_row_alone() -> None:
    logits = torch.randn(11) * 50
    alone = torch.cat([part.log_softmax(0) for part in logits.split(LENGTHS)])
    assert torch.allclose(log_softmax_by_row(logits, packed()), alone, atol=1e-5)
    assert torch.allclose(sum_by_row(logits, packed()), torch.stack([p.sum() for p in logits.split(LENGTHS)]))


def test_gradient_of_log_softmax_by_row_is_that_of_each_row_alone() -> None:
    logits, weights = torch.randn(11, requires_grad=True), torch.randn(11)
    (gradient,) = torch.autograd.grad((log_softmax_by_row(logits, packed()) * weights).sum(), logits)
    alone = torch.cat([part.log_softmax(0) for part in logits.split(LENGTHS)])
    (expected,) = torch.autograd.grad((alone * weights).sum(), logits)
    assert torch.allclose(gradient, expected, atol=1e-6)


def test_rank_by_row_falls_with_the_value_and_breaks_ties_by_position() -> None:
    values = torch.tensor([1.0, 3.0, 1.0, 2.0, 9.0, 0.0, 0.0, 5.0, 1.0, 2.0, 3.0])
    assert rank_by_row(values, packed()).tolist() == [2, 0, 3, 1, 0, 4, 5, 0, 3, 2, 1]


def test_first_tokens_marks_the_first_token_of_each_row() -> None:
    assert first_tokens(packed()).nonzero().squeeze(1).tolist() == [0, 4, 5]


def test_pooling_weighs_tokens_by_their_presence() -> None:
    batch = packed().with_states(torch.randn(11, 3))
    keep = torch.tensor([1, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    dropped, masked = batch.keep_tokens(keep), batch.with_tokens(present=keep.float())
    assert torch.allclose(masked.mean(), dropped.mean(), atol=1e-6) and torch.allclose(masked.max(), dropped.max())
    full = batch.with_tokens(present=torch.ones(11))
    assert torch.allclose(full.mean(), batch.mean()) and torch.allclose(full.max(), batch.max())
    half = batch.with_tokens(present=torch.full((11,), 0.5))
    assert torch.allclose(half.mean(), batch.mean(), atol=1e-6)
