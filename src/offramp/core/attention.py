"""Variable-length attention over packed tokens.

Linear layers never see padding; only here are rows laid out in rectangles (`layout.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from offramp.core import varlen
from offramp.core.layout import Bucket, Index, Layout, Plan, Scores, layout
from offramp.core.relative import distance_scores, with_mask
from offramp.core.written import Block, learning, scored, written_out

__all__ = ["Layout", "Plan", "Scores", "attend", "layout", "pad", "unpad"]


class _Pad(torch.autograd.Function):
    """Gather whose gradient is a gather too: filler is masked downstream, so its gradient is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pad: Tensor, unpad: Tensor) -> Tensor:
        ctx.save_for_backward(unpad)
        return x.index_select(0, pad)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (unpad,) = ctx.saved_tensors  # type: ignore[attr-defined]  # autograd adds it at run time
        return grads[0].index_select(0, unpad), None, None


def pad(x: Tensor, index: Index | None) -> Tensor:
    """Packed → rectangles, flat."""  # [tokens, …] → [padded, …]
    return x if index is None else _Pad.apply(x, index.pad, index.unpad)


def unpad(x: Tensor, index: Index | None) -> Tensor:
    """Rectangles, flat → packed."""
    return x if index is None else x.index_select(0, index.unpad)


def attend(query: Tensor, key: Tensor, value: Tensor, where: Layout, plan: Plan) -> tuple[Tensor, Scores | None]:
    """Each row's queries over that row's keys: [queries, hidden], and what each key received if asked."""
    if where.mix is not None:
        return where.mix(query, key, value, plan)
    if varlen.serves(query, plan):
        return varlen.attend(query, key, value, where, plan), None
    q, k, v = pad(query, where.query), pad(key, where.key), pad(value, where.key)
    bias = None if plan.key_bias is None else pad(plan.key_bias, where.key)
    windows = _windows(where, plan.window) if plan.window is not None else None
    outs, columns, diagonals = [], [], []
    for i, bucket in enumerate(where.buckets):
        qb = _heads(q[bucket.query_span], bucket.rows, plan.heads)
        kb, vb = (_heads(x[bucket.key_span], bucket.rows, plan.heads) for x in (k, v))
        mask = _mask(bucket, windows[i] if windows else None, bias)
        if plan.relative is not None:
            mask = with_mask(distance_scores((qb, kb), plan.relative, _places(where, bucket)), mask)
        if plan.scores:
            out, mean = _scored((qb, kb, vb), mask, bucket, plan)
            column, diagonal = mean.sum(1).reshape(-1), _diagonal(mean, where, bucket).reshape(-1)
            columns.append(column)
            diagonals.append(diagonal)
        else:
            out = _mixed((qb, kb, vb), mask, plan)
        outs.append(out.transpose(1, 2).reshape(bucket.rows * bucket.queries, -1))
    out = unpad(_join(outs), where.query)
    if not plan.scores:
        return out, None
    return out, Scores(unpad(_join(columns), where.key), unpad(_join(diagonals), where.key))


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _heads(x: Tensor, rows: int, heads: int) -> Tensor:
    return x.view(rows, x.shape[0] // rows, heads, -1).transpose(1, 2)  # [rows, heads, places, width]


def _mask(bucket: Bucket, window: Tensor | None, bias: Tensor | None) -> Tensor | None:
    mask = bucket.mask
    if window is not None:
        mask = window if mask is None else mask & window
    if bias is None:
        return mask
    soft = bias[bucket.key_span].view(bucket.rows, 1, 1, bucket.keys)
    return soft if mask is None else soft.masked_fill(~mask, float("-inf"))


def _places(where: Layout, bucket: Bucket) -> tuple[Tensor, Tensor]:
    """Original positions in one rectangle: of its queries and of its keys."""  # [rows, queries], [rows, keys]
    q, k = pad(where.query_position, where.query), pad(where.key_position, where.key)
    return q[bucket.query_span].view(bucket.rows, -1), k[bucket.key_span].view(bucket.rows, -1)


def _mixed(block: Block, mask: Tensor | None, plan: Plan) -> Tensor:
    """The fused kernel, except where single products are quicker: training on a CPU, with dropout or in bfloat16."""
    q, k, v = block
    slow = plan.dropout > 0 or (q.dtype == torch.bfloat16 and k.shape[2] <= 128)  # long rows: its backward pass wins
    if not learning(q) or not slow or plan.window is not None:  # filler outside its window sees nothing: NaN if written
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=plan.dropout)
    return written_out(block, mask, plan.dropout)


def _scored(block: Block, mask: Tensor | None, bucket: Bucket, plan: Plan) -> tuple[Tensor, Tensor]:
    """Attention written out: the mixture, and the weights averaged over heads (filler queries give nothing)."""
    out, mean = scored(block, mask, plan.dropout, blind=plan.window is not None)
    if bucket.query_real is not None:
        mean = mean.masked_fill(~bucket.query_real[:, :, None], 0.0)  # filler may see nothing and be NaN
    return out, mean


def _diagonal(mean: Tensor, where: Layout, bucket: Bucket) -> Tensor:
    """What each key got from itself as a query; a token that is no query gave itself nothing."""  # [rows, keys]
    if where.same:
        return mean.diagonal(dim1=1, dim2=2)
    q, k = _places(where, bucket)
    return (mean * (q[:, :, None] == k[:, None, :])).sum(1)


def _windows(where: Layout, window: int) -> list[Tensor]:
    if ("window", window) not in where.cache:
        q, k = pad(where.query_position, where.query), pad(where.key_position, where.key)
        where.cache["window", window] = [
            (q[b.query_span].view(b.rows, 1, -1, 1) - k[b.key_span].view(b.rows, 1, 1, -1)).abs() <= window
            for b in where.buckets
        ]
    made: list[Tensor] = where.cache["window", window]
    return made
