"""Cross-entropy over a vocabulary with smoothed labels, in as few passes over the scores as there can be.

Training all exits of a decoder scores every word several times; most of the memory traffic is here. Nothing as wide as
the vocabulary is kept but the scores themselves, and their gradient is made in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Smoothed(torch.autograd.Function):
    """Mean over words of (1 − ε)·(−log p_target) + ε·mean(−log p)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        wide = scores.float()
        total = wide.logsumexp(1)  # [words]
        misses = total - wide.gather(1, targets[:, None]).squeeze(1)
        loss = (1.0 - smoothing) * misses + smoothing * (total - wide.mean(1)) if smoothing else misses
        ctx.save_for_backward(scores, targets, total)
        ctx.smoothing = smoothing
        ctx.mark_non_differentiable(misses)
        return loss.mean(), misses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        scores, targets, total = ctx.saved_tensors
        made = (scores.float() - total[:, None]).exp_()
        if ctx.smoothing:
            made -= ctx.smoothing / scores.shape[1]
        made.scatter_add_(1, targets[:, None], made.new_full((len(targets), 1), ctx.smoothing - 1.0))
        return made.mul_(grads[0] / len(targets)).to(scores.dtype), None, None


def word_loss(scores: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The mean loss of words [words, vocabulary], and −log p of each target ([words], no gradient)."""
    loss, misses = _Smoothed.apply(scores, targets, smoothing)
    return loss, misses
