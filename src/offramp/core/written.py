"""Attention product by product, for training on a CPU: the fused kernel knows no dropout, and its backward pass in
bfloat16 takes far longer.

One function of autograd keeps the matrix of weights in the states' own precision and walks over it as seldom as can be.
A mask says what may be seen, or is added (and may learn).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from offramp.core.dropout import BITS, blanked, dropout, kept_bits
from offramp.core.relative import with_mask

Block = tuple[Tensor, Tensor, Tensor]  # queries, keys, values: [rows, heads, places, width]


class Asked(NamedTuple):
    """What is asked of an attention beside its mixture."""

    drop: float
    ranks: bool = False  # whether the mean weights are told


def learning(q: Tensor) -> bool:
    """Whether this is training on a CPU, in a precision whose bits can be blanked."""
    return q.requires_grad and q.device.type == "cpu" and q.dtype in BITS


def written_out(block: Block, mask: Tensor | None, drop: float) -> Tensor:
    """Softmax of the scaled products, dropped in part, times the values."""
    made: Tensor = _Written.apply(*block, mask, Asked(drop))[0]
    return made


def scored(block: Block, mask: Tensor | None, drop: float, blind: bool = False) -> tuple[Tensor, Tensor]:
    """The same, and the weights averaged over heads, which carry no gradient: they rank. `blind`: some may see nothing,
    which is NaN and must not spread."""
    q, k, v = block
    if learning(q) and not blind:
        made: tuple[Tensor, Tensor] = _Written.apply(*block, mask, Asked(drop, ranks=True))
        return made
    weights = with_mask(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, mask).softmax(-1)
    return dropout(weights, drop) @ v, weights.detach().mean(1)


class _Written(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, asked: Asked
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(q.device.type, enabled=False):  # it would widen the matrix
            ctx.scale, ctx.factor = q.shape[-1] ** -0.5, 1.0 / (1.0 - asked.drop)
            q = q * ctx.scale
            weights = _masked(q @ k.transpose(2, 3), mask).softmax(-1)
            ctx.kept = kept_bits(weights.shape, asked.drop) if asked.drop else None
            left = weights if ctx.kept is None else blanked(weights, ctx.kept, ctx.factor)
            ctx.save_for_backward(q, k, v, mask, weights, left)
            mean = weights.mean(1, dtype=torch.float32) if asked.ranks else None
            if mean is not None:
                ctx.mark_non_differentiable(mean)
            return left @ v, mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, weights, left = ctx.saved_tensors
        pulled = grads[0] @ v.transpose(2, 3)
        if ctx.kept is not None:
            pulled = blanked(pulled, ctx.kept, ctx.factor)
        pulled = torch._softmax_backward_data(pulled, weights, -1, weights.dtype)
        for_q, for_k = (pulled @ k).mul_(ctx.scale), pulled.transpose(2, 3) @ q
        for_mask = pulled.sum_to_size(mask.shape).to(mask.dtype) if ctx.needs_input_grad[3] else None
        return for_q, for_k, left.transpose(2, 3) @ grads[0], for_mask, None


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """As `with_mask`, in place."""
    if mask is None:
        return scores
    return scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores.add_(mask)
