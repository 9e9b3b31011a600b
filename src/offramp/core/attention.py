"""Variable-length attention over packed tokens.

Linear layers never see padding; only here are rows laid out in rectangles, and rows share a rectangle only when their
lengths are close, so one long row never inflates its batch. Queries and keys have separate lengths: idle tokens are
keys without being queries. Equal lengths take a path without gathers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import FunctionCtx

from offramp.core.relative import distance_scores, with_mask

Ints = NDArray[np.int64]


class Scores(NamedTuple):
    """How much attention each key received, averaged over heads and summed over its row's queries."""

    columns: Tensor  # [keys]
    diagonal: Tensor  # [keys], what a token gave itself (0 where it was no query)


@dataclass(frozen=True)
class Bucket:
    """Rows laid out in one rectangle."""

    rows: int
    queries: int
    keys: int
    query_span: slice
    key_span: slice
    mask: Tensor | None  # [rows, 1, 1, keys], True = attend; None when all keys are real
    query_real: Tensor | None  # [rows, queries]; None when all queries are real


@dataclass(frozen=True)
class Layout:
    """Where every query and key of a packed batch lies in the rectangles. Made once per composition."""

    buckets: tuple[Bucket, ...]
    query: Index | None  # None: one rectangle in packed order
    key: Index | None
    query_position: Tensor  # [queries], original positions (rotary, sliding windows)
    key_position: Tensor  # [keys]
    same: bool  # queries and keys are the same tokens
    windows: dict[int, list[Tensor]] = field(default_factory=dict)


class Index(NamedTuple):
    """A gather into rectangles and the way back."""

    pad: Tensor  # [padded] token index; filler repeats the row's first token
    unpad: Tensor  # [tokens] place in the padded block


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


def layout(
    keys: Tensor, positions: Tensor, queries: Tensor | None = None, query_positions: Tensor | None = None
) -> Layout:
    """Plan the rectangles for rows of `keys` lengths (and fewer `queries`, where some tokens are idle)."""
    key_lengths = keys.numpy()
    query_lengths = key_lengths if queries is None else queries.numpy()
    place = positions if query_positions is None else query_positions
    same = queries is None
    if (key_lengths == key_lengths[0]).all() and (query_lengths == query_lengths[0]).all():
        rows, wide, tall = len(key_lengths), int(key_lengths[0]), int(query_lengths[0])
        bucket = Bucket(rows, tall, wide, slice(0, rows * tall), slice(0, rows * wide), None, None)
        return Layout((bucket,), None, None, place, positions, same)
    groups = _groups(key_lengths)
    key = _index(key_lengths, groups, positions.device)
    query = key if same else _index(query_lengths, groups, positions.device)
    buckets = _buckets(query_lengths, key_lengths, groups, positions.device)
    return Layout(buckets, query, key, place, positions, same)


def _groups(lengths: Ints) -> list[Ints]:
    """Row indices grouped so that no row is padded by more than about a third (plus a few tokens)."""
    order = np.argsort(-lengths, kind="stable")
    groups, start = [], 0
    for i in range(1, len(order) + 1):
        longest = lengths[order[start]]
        if i == len(order) or lengths[order[i]] < longest * 3 // 4 - 8:
            groups.append(order[start:i])
            start = i
    return groups


def _index(lengths: Ints, groups: list[Ints], device: torch.device) -> Index:
    starts = np.cumsum(lengths) - lengths
    pads, unpad, base = [], np.empty(int(lengths.sum()), dtype=np.int64), 0
    for rows in groups:
        wide = max(1, int(lengths[rows].max()))
        column = np.arange(wide)
        real = column[None, :] < lengths[rows][:, None]
        # a row without queries has no token of its own to repeat: any index serves, nothing reads it back
        index = np.minimum(starts[rows][:, None] + np.where(real, column[None, :], 0), len(unpad) - 1)
        place = base + np.arange(len(rows) * wide).reshape(len(rows), wide)
        unpad[index[real]] = place[real]
        pads.append(index.ravel())
        base += index.size
    return Index(torch.from_numpy(np.concatenate(pads)).to(device), torch.from_numpy(unpad).to(device))


def _buckets(queries: Ints, keys: Ints, groups: list[Ints], device: torch.device) -> tuple[Bucket, ...]:
    buckets, q0, k0 = [], 0, 0
    for rows in groups:
        tall, wide = max(1, int(queries[rows].max())), int(keys[rows].max())
        q1, k1 = q0 + len(rows) * tall, k0 + len(rows) * wide
        real = _real(keys[rows], wide, device)
        mask = None if real is None else real[:, None, None, :]
        bucket = Bucket(
            len(rows), tall, wide, slice(q0, q1), slice(k0, k1), mask, _real(queries[rows], tall, device)
        )
        buckets.append(bucket)
        q0, k0 = q1, k1
    return tuple(buckets)


def _real(lengths: Ints, wide: int, device: torch.device) -> Tensor | None:
    real = np.arange(wide)[None, :] < lengths[:, None]
    return None if real.all() else torch.from_numpy(real).to(device)


def pad(x: Tensor, index: Index | None) -> Tensor:
    """Packed → rectangles, flat."""  # [tokens, …] → [padded, …]
    return x if index is None else _Pad.apply(x, index.pad, index.unpad)


def unpad(x: Tensor, index: Index | None) -> Tensor:
    """Rectangles, flat → packed."""
    return x if index is None else x.index_select(0, index.unpad)


@dataclass(frozen=True)
class Plan:
    """What a layer asks of attention besides the vectors."""

    heads: int
    dropout: float = 0.0
    window: int | None = None  # tokens further apart than this do not see each other
    scores: bool = False
    key_bias: Tensor | None = None  # [keys], added to the logits of each key (soft removal)
    relative: Tensor | None = None  # [distances, head width], vectors of distances (core/relative.py)


def attend(query: Tensor, key: Tensor, value: Tensor, where: Layout, plan: Plan) -> tuple[Tensor, Scores | None]:
    """Each row's queries over that row's keys: [queries, hidden], and what each key received if asked."""
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
            out, mean = _scored((qb, kb, vb), mask, bucket, plan.dropout)
            column, diagonal = mean.sum(1).reshape(-1), _diagonal(mean, where, bucket).reshape(-1)
            columns.append(column)
            diagonals.append(diagonal)
        else:
            out = F.scaled_dot_product_attention(qb, kb, vb, attn_mask=mask, dropout_p=plan.dropout)
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


def _scored(
    block: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, bucket: Bucket, dropout: float
) -> tuple[Tensor, Tensor]:
    """Attention written out: the mixture, and the weights averaged over heads (filler queries give nothing)."""
    q, k, v = block
    logits = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    weights = with_mask(logits, mask).softmax(-1)  # [rows, heads, queries, keys]
    mean = weights.mean(1)
    if bucket.query_real is not None:
        mean = mean.masked_fill(~bucket.query_real[:, :, None], 0.0)  # filler may see nothing and be NaN
    return F.dropout(weights, dropout) @ v if dropout else weights @ v, mean


def _diagonal(mean: Tensor, where: Layout, bucket: Bucket) -> Tensor:
    """What each key got from itself as a query; a token that is no query gave itself nothing."""  # [rows, keys]
    if where.same:
        return mean.diagonal(dim1=1, dim2=2)
    q, k = _places(where, bucket)
    return (mean * (q[:, :, None] == k[:, None, :])).sum(1)


def _windows(where: Layout, window: int) -> list[Tensor]:
    if window not in where.windows:
        q, k = pad(where.query_position, where.query), pad(where.key_position, where.key)
        where.windows[window] = [
            (q[b.query_span].view(b.rows, 1, -1, 1) - k[b.key_span].view(b.rows, 1, 1, -1)).abs() <= window
            for b in where.buckets
        ]
    return where.windows[window]
