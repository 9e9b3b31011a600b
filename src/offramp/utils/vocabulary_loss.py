"""Cross-entropy over a vocabulary with smoothed labels, in as few passes over the scores as possible.

A masked language model scores every masked token, and all exits of a decoder score every token several times: most of
the memory traffic is here. Only the scores themselves and, in the backward pass, their gradient are kept as wide as
the vocabulary; in between, a few tokens at a time are processed, so that their scores stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CACHED_SCORES = 1 << 18  # scores processed at a time


class _SmoothedCrossEntropy(torch.autograd.Function):
    """Mean over tokens of (1 − ε)·(−log p_target) + ε·mean(−log p)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        log_total, mean = (scores.new_empty(len(scores), dtype=torch.float32) for _ in range(2))
        for part in _parts(scores):
            wide = scores[part].float()
            torch.logsumexp(wide, 1, out=log_total[part])
            torch.mean(wide, 1, out=mean[part])
        nll = log_total - scores.gather(1, targets[:, None]).squeeze(1).float()
        loss = (1.0 - smoothing) * nll + smoothing * (log_total - mean) if smoothing else nll
        ctx.save_for_backward(scores, targets, log_total)
        ctx.smoothing = smoothing
        ctx.mark_non_differentiable(nll)
        return loss.mean(), nll

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        scores, targets, log_total = ctx.saved_tensors
        gradient, scale = torch.empty_like(scores), grads[0] / len(targets)
        for part in _parts(scores):
            wide = scores[part].float().sub_(log_total[part, None]).exp_()
            if ctx.smoothing:
                wide -= ctx.smoothing / scores.shape[1]
            target = targets[part, None]
            wide.scatter_add_(1, target, wide.new_full(target.shape, ctx.smoothing - 1.0))
            gradient[part] = wide.mul_(scale)
        return gradient, None, None


def _parts(scores: Tensor) -> Iterator[slice]:
    """Yield slices of a few tokens each; on a GPU one slice of all tokens."""
    step = len(scores) if scores.is_cuda else max(1, CACHED_SCORES // scores.shape[1])
    return (slice(start, start + step) for start in range(0, len(scores), max(1, step)))


def vocabulary_loss(scores: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the mean loss of tokens [tokens, vocabulary], and −log p of each target ([tokens], no gradient)."""
    loss, nll = _SmoothedCrossEntropy.apply(scores, targets, smoothing)
    return loss, nll
