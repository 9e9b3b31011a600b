"""Our loss of words is torch's cross-entropy, its gradient too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from offramp.decoding.vocabulary_loss import word_loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equals_cross_entropy(smoothing: float) -> None:
    torch.manual_seed(0)
    scores, targets = torch.randn(7, 23), torch.randint(0, 23, (7,))
    scores[0, 3] = 60.0  # far from the rest
    ours, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    loss, misses = word_loss(ours, targets, smoothing)
    expected = F.cross_entropy(theirs, targets, label_smoothing=smoothing)
    (3.0 * loss).backward()
    (3.0 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and ours.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)
    assert torch.allclose(misses, F.cross_entropy(scores, targets, reduction="none"), atol=1e-5)
    assert not misses.requires_grad
    low = scores.bfloat16().requires_grad_()
    word_loss(low, targets, smoothing)[0].backward()
    assert low.grad is not None and low.grad.dtype == torch.bfloat16
