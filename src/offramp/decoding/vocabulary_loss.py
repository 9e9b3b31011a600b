"""Cross-entropy over a vocabulary with smoothed labels, in as few passes over the scores as there can be.

Training all exits of a decoder scores every word several times; most of the memory traffic is here. Nothing as wide as
the vocabulary is kept but the scores themselves and, going back, their gradient; in between a few words at a time are
looked at, so that they stay in a processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CACHED = 1 << 18  # so many scores at a time


class _Smoothed(torch.autograd.Function):
    """Mean over words of (1 − ε)·(−log p_target) + ε·mean(−log p)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        total, mean = (scores.new_empty(len(scores), dtype=torch.float32) for _ in range(2))
        for some in _parts(scores):
            wide = scores[some].float()
            torch.logsumexp(wide, 1, out=total[some])
            torch.mean(wide, 1, out=mean[some])
        misses = total - scores.gather(1, targets[:, None]).squeeze(1).float()
        loss = (1.0 - smoothing) * misses + smoothing * (total - mean) if smoothing else misses
        ctx.save_for_backward(scores, targets, total)
        ctx.smoothing = smoothing
        ctx.mark_non_differentiable(misses)
        return loss.mean(), misses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        scores, targets, total = ctx.saved_tensors
        made, unit = torch.empty_like(scores), grads[0] / len(targets)
        for some in _parts(scores):
            wide = scores[some].float().sub_(total[some, None]).exp_()
            if ctx.smoothing:
                wide -= ctx.smoothing / scores.shape[1]
            right = targets[some, None]
            wide.scatter_add_(1, right, wide.new_full(right.shape, ctx.smoothing - 1.0))
            made[some] = wide.mul_(unit)
        return made, None, None


def _parts(scores: Tensor) -> Iterator[slice]:
    """A few words at a time; on a GPU all of them."""
    step = len(scores) if scores.is_cuda else max(1, CACHED // scores.shape[1])
    return (slice(start, start + step) for start in range(0, len(scores), max(1, step)))


def word_loss(scores: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The mean loss of words [words, vocabulary], and −log p of each target ([words], no gradient)."""
    loss, misses = _Smoothed.apply(scores, targets, smoothing)
    return loss, misses
