"""The vocabulary loss is torch's cross-entropy, and so is its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from offramp.utils.vocabulary_loss import vocabulary_loss


def scores_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    scores, targets = torch.randn(7, 23), torch.randint(0, 23, (7,))
    scores[0, 3] = 60.0  # an outlier
    return scores, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_vocabulary_loss_and_gradient_equal_torch_cross_entropy(smoothing: float) -> None:
    scores, targets = scores_and_targets()
    tested, reference = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    loss, nll = vocabulary_loss(tested, targets, smoothing)
    expected = F.cross_entropy(reference, targets, label_smoothing=smoothing)
    (3.0 * loss).backward()
    (3.0 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert tested.grad is not None and torch.allclose(tested.grad, reference.grad, atol=1e-6)
    assert torch.allclose(nll, F.cross_entropy(scores, targets, reduction="none"), atol=1e-5)
    assert not nll.requires_grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_vocabulary_loss_gradient_has_the_precision_of_the_scores(smoothing: float) -> None:
    scores, targets = scores_and_targets()
    low = scores.bfloat16().requires_grad_()
    vocabulary_loss(low, targets, smoothing)[0].backward()
    assert low.grad is not None and low.grad.dtype == torch.bfloat16
