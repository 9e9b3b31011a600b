"""Our dropout is torch's in distribution, and repeats itself from a seed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offramp.core.dropout import apply_dropout, dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_with_probability_p_and_scales_the_rest(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.full((401, 501), 3.0, dtype=dtype, requires_grad=True)
    y = dropout(x, p)
    gone = y == 0
    assert abs(gone.float().mean().item() - p) < 0.004
    assert torch.equal(y[~gone], torch.full_like(y[~gone], 3.0) * (1 / (1 - p)))
    spread = gone.float().mean(0).std().item(), gone.float().mean(1).std().item()
    assert spread == pytest.approx([(p * (1 - p) / n) ** 0.5 for n in (401, 501)], rel=0.15)  # no pattern by place
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad == 0, gone) and torch.equal(grad * 3, y.detach())


def test_dropout_repeats_from_a_seed_and_differs_between_calls() -> None:
    x = torch.ones(64, 7)
    torch.manual_seed(5)
    first, second = dropout(x, 0.3), dropout(x, 0.3)
    torch.manual_seed(5)
    assert torch.equal(dropout(x, 0.3), first) and not torch.equal(first, second)


def test_dropout_of_odd_shapes_views_and_extreme_probabilities() -> None:
    x = torch.arange(1.0, 16.0).reshape(3, 5)
    assert dropout(x, 0.0) is x and dropout(x, 0.5, training=False) is x and not dropout(x, 1.0).any()
    y = dropout(x.t(), 0.4)
    assert y.shape == (5, 3) and 0 < int((y == 0).sum()) < 15
    assert torch.allclose(y[y != 0], (x.t() / 0.6)[y != 0])
    assert dropout(torch.ones(0, 4), 0.1).shape == (0, 4)
    assert dropout(torch.ones(9, dtype=torch.float64), 0.5).dtype == torch.float64


def test_apply_dropout_calls_modules_of_other_kinds() -> None:
    x = torch.ones(50)
    assert apply_dropout(nn.Identity(), x) is x and apply_dropout(nn.Dropout(0.5).eval(), x) is x
    assert (apply_dropout(nn.Dropout(0.5), x) == 0).any()
