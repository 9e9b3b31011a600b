"""Which tokens of a packed batch attend to which, and how rows are laid out in rectangles for attention.

Rows share a rectangle only when their lengths are close, so one long row never inflates its batch. Queries and keys
have separate lengths: idle tokens are keys without being queries. Equal lengths need no gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from offramp.core.attention.distances import RelativePositions

Ints = NDArray[np.int64]


class AttentionScores(NamedTuple):
    """Attention that each key received, averaged over heads and summed over its row's queries."""

    columns: Tensor  # [keys]
    diagonal: Tensor  # [keys], attention of a token to itself (0 where it was no query)


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one attention call."""

    heads: int
    dropout: float = 0.0
    window: int | None = None  # tokens further apart than this do not attend to each other
    scores: bool = False
    key_bias: Tensor | None = None  # [keys], added to the logits of each key (soft removal)
    relative: RelativePositions | None = None  # logits from distances (core/attention/distances.py)


Mixer = Callable[[Tensor, Tensor, Tensor, AttentionOptions], tuple[Tensor, AttentionScores | None]]


@dataclass(frozen=True)
class Rectangle:
    """Rows laid out in one rectangle."""

    rows: int
    queries: int
    keys: int
    query_span: slice
    key_span: slice
    mask: Tensor | None  # [rows, 1, 1, keys], True = attend; None when all keys are real
    query_real: Tensor | None  # [rows, queries]; None when all queries are real


class PaddingIndex(NamedTuple):
    """Indices of a gather into rectangles and of the gather back."""

    pad: Tensor  # [padded] token index; filler repeats the row's first token
    unpad: Tensor  # [tokens] place in the padded block


@dataclass(frozen=True)
class Layout:
    """Which queries attend to which keys: rows by their lengths, rectangles planned on demand.

    `mix`, if given, replaces `attend`: a compiled engine traces a layer with it. `cache` holds derived values.
    """

    key_lengths: Ints  # [rows]
    query_lengths: Ints  # [rows]
    query_position: Tensor  # [queries], original positions (rotary, sliding windows)
    key_position: Tensor  # [keys]
    same: bool  # queries and keys are the same tokens
    mix: Mixer | None = None
    cache: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def even(self) -> bool:
        """Whether all rows have one length: one rectangle in packed order, without gathers."""
        keys, queries = self.key_lengths, self.query_lengths
        return len(keys) == 1 or bool((keys == keys[0]).all() and (queries == queries[0]).all())

    @cached_property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """Rectangles of rows of similar length."""
        if self.even:
            rows, wide, tall = len(self.key_lengths), int(self.key_lengths[0]), int(self.query_lengths[0])
            return (Rectangle(rows, tall, wide, slice(0, rows * tall), slice(0, rows * wide), None, None),)
        return _buckets(self.query_lengths, self.key_lengths, self._groups, self.key_position.device)

    @cached_property
    def _groups(self) -> list[Ints]:
        return _groups(self.key_lengths)

    @cached_property
    def key(self) -> PaddingIndex | None:
        """Places of keys in the rectangles; None: packed order."""
        return None if self.even else _padding_index(self.key_lengths, self._groups, self.key_position.device)

    @cached_property
    def query(self) -> PaddingIndex | None:
        """Places of queries in the rectangles; None: packed order."""
        if self.even or self.same:
            return self.key
        return _padding_index(self.query_lengths, self._groups, self.key_position.device)


def layout(
    keys: Tensor, positions: Tensor, queries: Tensor | None = None, query_positions: Tensor | None = None
) -> Layout:
    """Return the layout of rows with these key lengths, and fewer queries where some tokens are idle."""
    key_lengths = keys.numpy()
    place = positions if query_positions is None else query_positions
    return Layout(key_lengths, key_lengths if queries is None else queries.numpy(), place, positions, queries is None)


def _groups(lengths: Ints) -> list[Ints]:
    """Group row indices so that no row is padded by more than about a third plus a few tokens."""
    order = np.argsort(-lengths, kind="stable")
    groups, start = [], 0
    for i in range(1, len(order) + 1):
        longest = lengths[order[start]]
        if i == len(order) or lengths[order[i]] < longest * 3 // 4 - 8:
            groups.append(order[start:i])
            start = i
    return groups


def _padding_index(lengths: Ints, groups: list[Ints], device: torch.device) -> PaddingIndex:
    starts = np.cumsum(lengths) - lengths
    pads, unpad, base = [], np.empty(int(lengths.sum()), dtype=np.int64), 0
    for rows in groups:
        wide = max(1, int(lengths[rows].max()))
        column = np.arange(wide)
        real = column[None, :] < lengths[rows][:, None]
        # a row without queries has no token of its own to repeat: any index works, because nothing reads it back
        index = np.minimum(starts[rows][:, None] + np.where(real, column[None, :], 0), len(unpad) - 1)
        place = base + np.arange(len(rows) * wide).reshape(len(rows), wide)
        unpad[index[real]] = place[real]
        pads.append(index.ravel())
        base += index.size
    return PaddingIndex(torch.from_numpy(np.concatenate(pads)).to(device), torch.from_numpy(unpad).to(device))


def _buckets(queries: Ints, keys: Ints, groups: list[Ints], device: torch.device) -> tuple[Rectangle, ...]:
    rectangles, q0, k0 = [], 0, 0
    for rows in groups:
        tall, wide = max(1, int(queries[rows].max())), int(keys[rows].max())
        q1, k1 = q0 + len(rows) * tall, k0 + len(rows) * wide
        real = _real(keys[rows], wide, device)
        mask = None if real is None else real[:, None, None, :]
        rectangle = Rectangle(
            len(rows), tall, wide, slice(q0, q1), slice(k0, k1), mask, _real(queries[rows], tall, device)
        )
        rectangles.append(rectangle)
        q0, k0 = q1, k1
    return tuple(rectangles)


def _real(lengths: Ints, wide: int, device: torch.device) -> Tensor | None:
    real = np.arange(wide)[None, :] < lengths[:, None]
    return None if real.all() else torch.from_numpy(real).to(device)
