"""Variable-length attention over packed tokens.

Linear layers never see padding; only attention lays rows out in rectangles (core/layout.py). Training on a CPU has a
kernel of its own (`training_kernel`), CUDA devices use torch's (`cuda_kernel`), relative positions are in `distances`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from offramp.core.attention import cuda_kernel
from offramp.core.attention.distances import RelativePositions, add_mask
from offramp.core.attention.training_kernel import Block, attend_while_training, attend_with_scores, trains_on_cpu
from offramp.core.layout import AttentionOptions, AttentionScores, Layout, PaddingIndex, Rectangle, layout

__all__ = ["AttentionOptions", "AttentionScores", "Layout", "RelativePositions", "attend", "layout", "pad", "unpad"]


class _Pad(torch.autograd.Function):
    """A gather whose gradient is a gather too: filler is masked downstream, so its gradient is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pad: Tensor, unpad: Tensor) -> Tensor:
        ctx.save_for_backward(unpad)
        return x.index_select(0, pad)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (unpad,) = ctx.saved_tensors  # type: ignore[attr-defined]  # autograd adds it at run time
        return grads[0].index_select(0, unpad), None, None


def pad(x: Tensor, index: PaddingIndex | None) -> Tensor:
    """Gather packed tokens into rectangles, flattened."""  # [tokens, …] → [padded, …]
    return x if index is None else _Pad.apply(x, index.pad, index.unpad)


def unpad(x: Tensor, index: PaddingIndex | None) -> Tensor:
    """Gather flattened rectangles back into packed tokens."""
    return x if index is None else x.index_select(0, index.unpad)


def attend(
    query: Tensor, key: Tensor, value: Tensor, where: Layout, plan: AttentionOptions
) -> tuple[Tensor, AttentionScores | None]:
    """Return the mixture of each row's values for its queries [queries, hidden], and attention scores if requested."""
    if where.mix is not None:
        return where.mix(query, key, value, plan)
    if cuda_kernel.serves(query, plan):
        return cuda_kernel.attend_packed(query, key, value, where, plan), None
    q, k, v = pad(query, where.query), pad(key, where.key), pad(value, where.key)
    bias = None if plan.key_bias is None else pad(plan.key_bias, where.key)
    windows = _windows(where, plan.window) if plan.window is not None else None
    outs, columns, diagonals = [], [], []
    for i, rectangle in enumerate(where.rectangles):
        qb = _heads(q[rectangle.query_span], rectangle.rows, plan.heads)
        kb, vb = (_heads(x[rectangle.key_span], rectangle.rows, plan.heads) for x in (k, v))
        mask = _mask(rectangle, windows[i] if windows else None, bias)
        if plan.relative is not None:
            mask = add_mask(plan.relative.logits(qb, kb, _places(where, rectangle)), mask)
        if plan.scores:
            out, mean = _scored((qb, kb, vb), mask, rectangle, plan)
            column, diagonal = mean.sum(1).reshape(-1), _diagonal(mean, where, rectangle).reshape(-1)
            columns.append(column)
            diagonals.append(diagonal)
        else:
            out = _mixed((qb, kb, vb), mask, plan)
        outs.append(out.transpose(1, 2).reshape(rectangle.rows * rectangle.queries, -1))
    out = unpad(_join(outs), where.query)
    if not plan.scores:
        return out, None
    return out, AttentionScores(unpad(_join(columns), where.key), unpad(_join(diagonals), where.key))


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _heads(x: Tensor, rows: int, heads: int) -> Tensor:
    return x.view(rows, x.shape[0] // rows, heads, -1).transpose(1, 2)  # [rows, heads, places, width]


def _mask(rectangle: Rectangle, window: Tensor | None, bias: Tensor | None) -> Tensor | None:
    mask = rectangle.mask
    if window is not None:
        mask = window if mask is None else mask & window
    if bias is None:
        return mask
    soft = bias[rectangle.key_span].view(rectangle.rows, 1, 1, rectangle.keys)
    return soft if mask is None else soft.masked_fill(~mask, float("-inf"))


def _places(where: Layout, rectangle: Rectangle) -> tuple[Tensor, Tensor]:
    """Return the original positions of the queries and keys in one rectangle."""  # [rows, queries], [rows, keys]
    q, k = pad(where.query_position, where.query), pad(where.key_position, where.key)
    return q[rectangle.query_span].view(rectangle.rows, -1), k[rectangle.key_span].view(rectangle.rows, -1)


def _mixed(block: Block, mask: Tensor | None, plan: AttentionOptions) -> Tensor:
    """Use the fused kernel, except where separate products are faster: CPU training with dropout or in bfloat16."""
    q, k, v = block
    slow = plan.dropout > 0 or (q.dtype == torch.bfloat16 and k.shape[2] <= 128)  # on long rows the fused backward wins
    if not trains_on_cpu(q) or not slow or plan.window is not None:  # filler outside its window attends to nothing: NaN
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=plan.dropout)
    return attend_while_training(block, mask, plan.dropout)


def _scored(block: Block, mask: Tensor | None, rectangle: Rectangle, plan: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Return the mixture and the weights averaged over heads; filler queries contribute nothing."""
    out, mean = attend_with_scores(block, mask, plan.dropout, blind=plan.window is not None)
    if rectangle.query_real is not None:
        mean = mean.masked_fill(~rectangle.query_real[:, :, None], 0.0)  # filler may attend to nothing and be NaN
    return out, mean


def _diagonal(mean: Tensor, where: Layout, rectangle: Rectangle) -> Tensor:
    """Return the weight of each key for itself as a query; 0 for tokens that are no queries."""  # [rows, keys]
    if where.same:
        return mean.diagonal(dim1=1, dim2=2)
    q, k = _places(where, rectangle)
    return (mean * (q[:, :, None] == k[:, None, :])).sum(1)


def _windows(where: Layout, window: int) -> list[Tensor]:
    if ("window", window) not in where.cache:
        q, k = pad(where.query_position, where.query), pad(where.key_position, where.key)
        where.cache["window", window] = [
            (q[b.query_span].view(b.rows, 1, -1, 1) - k[b.key_span].view(b.rows, 1, 1, -1)).abs() <= window
            for b in where.rectangles
        ]
    masks: list[Tensor] = where.cache["window", window]
    return masks
