"""Attention as one autograd function, for training on a CPU.

The fused kernel has no dropout there, and its backward pass in bfloat16 takes far longer. This function keeps the
matrix of weights in the precision of the states and passes over it as few times as possible. A boolean mask tells
which keys are visible; a float mask is added to the logits and may be trained.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from offramp.core.attention.distances import add_mask
from offramp.core.dropout import INTEGER_VIEWS, apply_keep_bits, draw_keep_bits, dropout

Block = tuple[Tensor, Tensor, Tensor]  # queries, keys, values: [rows, heads, places, width]


class _Request(NamedTuple):
    """What is computed besides the mixture."""

    drop: float
    mean_weights: bool = False


def trains_on_cpu(q: Tensor) -> bool:
    """Return whether this is training on a CPU, in a precision that bitwise dropout supports."""
    return q.requires_grad and q.device.type == "cpu" and q.dtype in INTEGER_VIEWS


def attend_while_training(block: Block, mask: Tensor | None, drop: float) -> Tensor:
    """Return softmax attention with dropout on the weights."""
    mixture: Tensor = _Attention.apply(*block, mask, _Request(drop))[0]
    return mixture


def attend_with_scores(block: Block, mask: Tensor | None, drop: float, blind: bool = False) -> tuple[Tensor, Tensor]:
    """Return the same with the weights averaged over heads, which carry no gradient because they only rank tokens.

    `blind`: some queries may see no key at all; their NaN must not reach the gradients of others.
    """
    q, k, v = block
    if trains_on_cpu(q) and not blind:
        result: tuple[Tensor, Tensor] = _Attention.apply(*block, mask, _Request(drop, mean_weights=True))
        return result
    weights = add_mask(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, mask).softmax(-1)
    return dropout(weights, drop) @ v, weights.detach().mean(1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, request: _Request
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(q.device.type, enabled=False):  # autocast would widen the matrix
            ctx.scale, ctx.factor = q.shape[-1] ** -0.5, 1.0 / (1.0 - request.drop)
            q = q * ctx.scale
            weights = _masked(q @ k.transpose(2, 3), mask).softmax(-1)
            ctx.kept = draw_keep_bits(weights.shape, request.drop) if request.drop else None
            left = weights if ctx.kept is None else apply_keep_bits(weights, ctx.kept, ctx.factor)
            ctx.save_for_backward(q, k, v, mask, weights, left)
            mean = weights.mean(1, dtype=torch.float32) if request.mean_weights else None
            if mean is not None:
                ctx.mark_non_differentiable(mean)
            return left @ v, mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, weights, left = ctx.saved_tensors
        pulled = grads[0] @ v.transpose(2, 3)
        if ctx.kept is not None:
            pulled = apply_keep_bits(pulled, ctx.kept, ctx.factor)
        pulled = torch._softmax_backward_data(pulled, weights, -1, weights.dtype)
        for_q, for_k = (pulled @ k).mul_(ctx.scale), pulled.transpose(2, 3) @ q
        for_mask = pulled.sum_to_size(mask.shape).to(mask.dtype) if ctx.needs_input_grad[3] else None
        return for_q, for_k, left.transpose(2, 3) @ grads[0], for_mask, None


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """As `add_mask`, in place."""
    if mask is None:
        return scores
    return scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores.add_(mask)
