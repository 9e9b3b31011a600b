"""Attention written out equals the fused kernel, gradients too, and drops weights as it says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.core.attention.training_kernel import attend_while_training, attend_with_scores


def block(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 3, n, 8).to(dtype).requires_grad_() for n in (5, 7, 7))
    return q, k, v


def masks() -> dict[str, Tensor | None]:
    seen = torch.arange(7)[None, None, None, :] < torch.tensor([7, 4])[:, None, None, None]
    added = torch.zeros(2, 1, 1, 7).masked_fill(~seen, float("-inf"))
    return {"none": None, "seen": seen, "added": added, "learned": torch.randn(2, 1, 5, 7).requires_grad_()}


@pytest.mark.parametrize("kind", ["none", "seen", "added", "learned"])
def test_training_kernel_equals_the_fused_kernel_and_its_gradients(kind: str) -> None:
    parts, mask = block(), masks()[kind]
    result, expected = attend_while_training(parts, mask, 0.0), F.scaled_dot_product_attention(*parts, attn_mask=mask)
    weights, given = torch.randn_like(result), parts if kind != "learned" else (*parts, mask)
    torch.testing.assert_close(result, expected)
    grads, expected_grads = (torch.autograd.grad(out, given, weights) for out in (result, expected))
    torch.testing.assert_close(grads, expected_grads)


def test_training_kernel_stays_in_bfloat16_under_autocast() -> None:
    parts = block(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        result = attend_while_training(parts, masks()["seen"], 0.0)
    expected = F.scaled_dot_product_attention(*(x.float() for x in parts), attn_mask=masks()["seen"])
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), expected, atol=0.03, rtol=0.03)
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(result.float().sum(), parts))


@pytest.mark.parametrize("kind", ["seen", "added"])
def test_training_kernel_gradients_match_finite_differences_with_dropout(kind: str) -> None:
    """With the same numbers drawn the function is smooth, so small steps tell its slope."""
    parts = tuple(x.detach().double().requires_grad_() for x in block())
    mask = masks()[kind]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()

    def with_seed(*given: Tensor) -> Tensor:
        torch.manual_seed(9)
        return attend_while_training((given[0].float(), given[1].float(), given[2].float()), mask, 0.4).double()

    q, k, v = parts
    result = with_seed(q, k, v)
    assert not torch.allclose(result, attend_while_training((q.float(), k.float(), v.float()), mask, 0.0).double())
    weights = torch.randn_like(result)
    for place, grad in enumerate(torch.autograd.grad(result, parts, weights)):
        direction = torch.randn_like(grad)
        forward, backward = (
            [x + s * 1e-2 * direction if i == place else x for i, x in enumerate(parts)] for s in (1, -1)
        )
        slope = ((with_seed(*forward) - with_seed(*backward)) * weights).sum() / 2e-2
        assert slope.item() == pytest.approx((grad * direction).sum().item(), rel=0.02, abs=0.02)


@pytest.mark.parametrize("trains", [True, False])
def test_mean_weights_carry_no_gradient(trains: bool) -> None:
    q, k, v = (x.detach().requires_grad_(trains) for x in block())
    mask = masks()["seen"]
    out, mean = attend_with_scores((q, k, v), mask, 0.0)
    plain = (q @ k.transpose(2, 3) * 8**-0.5).masked_fill(~mask, float("-inf")).softmax(-1)  # type: ignore[operator]  # it is no None here
    torch.testing.assert_close(out, plain @ v)
    torch.testing.assert_close(mean, plain.mean(1).detach())
    assert not mean.requires_grad and out.requires_grad == trains


def test_queries_without_visible_keys_leave_other_gradients_finite() -> None:
    q, k, v = block()
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    mask[0, 0, 2] = False
    out, _ = attend_with_scores((q, k, v), mask, 0.0, blind=True)
    (grad,) = torch.autograd.grad(out[:, :, :2].sum(), k)
    assert out[0, 0, 2].isnan().all() and not grad.isnan().any()
