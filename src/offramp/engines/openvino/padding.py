"""Where tokens lie when a compiled graph attends: one block of lines for a whole batch, whatever its lengths.

A line is a row, as long as that wastes little. Where one long row would inflate the others, short rows share a line,
and a mask lets each token see its own row only. Filler repeats a token of its line and is never read back.

Sizes are few, because a graph makes kernels for every size it meets, and they stay: numbers of tokens, lines and places
are rounded up (`room`, `many`, `wide`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.core.layout import Ints, Layout

Index = NDArray[np.int32]
Floats = NDArray[np.float32]
SPARE = 100  # cells of attention per token that cost little beside the token's linear layers


def room(tokens: int) -> int:
    """So many tokens, or up to a sixteenth more (up to seven where there are few)."""
    step = max(8, 1 << max(0, tokens.bit_length() - 5))
    return -(-tokens // step) * step


def many(rows: int) -> int:
    """So many rows or lines, or up to an eighth more."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def wide(places: int) -> int:
    """So many places in a line, or up to three more."""
    return max(4, -(-places // 4) * 4)


def longer(array: NDArray[Any], count: int, filler: int = 0) -> NDArray[Any]:
    """So many, filled up (`np.pad` takes ten times as long for so little)."""
    made = np.full(count, filler, array.dtype)
    made[: len(array)] = array
    return made


@dataclass(frozen=True)
class Side:
    """Queries or keys in lines."""

    pad: Index  # [lines, places] token index
    unpad: Index  # [tokens] place in the flattened block
    row: Ints  # [lines, places] whose token it is, −1 for filler


@dataclass(frozen=True)
class Places:
    """Queries and keys of one composition."""

    query: Side
    key: Side
    mask: Floats  # [lines, 1, 1 or queries, keys], added to the logits: 0 or −∞
    real: Floats  # [lines, queries, 1], 0 for filler

    @property
    def cells(self) -> int:
        """Pairs that attention computes."""
        return self.query.pad.size * self.key.pad.shape[1]


def places(where: Layout) -> Places:
    """The block for a layout, planned once."""
    if "places" not in where.cache:
        where.cache["places"] = _plan(where)
    made: Places = where.cache["places"]
    return made


def _plan(where: Layout) -> Places:
    queries, keys = where.query_lengths, where.key_lengths
    rows = [np.array([row]) for row in range(len(keys))]
    cells, needed = len(keys) * int(queries.max()) * int(keys.max()), int((queries * keys).sum())
    shared = _share(keys) if cells - needed > SPARE * int(keys.sum()) else rows
    lines = shared if len(shared) < 0.7 * len(rows) else rows
    key = _side(keys, lines)
    query = key if where.same else _side(queries, lines)
    if lines is rows:
        seen = (key.row >= 0)[:, None, None, :]
        seen[len(lines) :, ..., 0] = True  # looking at nothing would be NaN
    else:  # filler looks at its line's first row, and in lines of filler at filler
        first = np.full(len(query.row), -1)
        first[: len(lines)] = [line[0] for line in lines]
        asks = np.where(query.row < 0, first[:, None], query.row)
        seen = (asks[:, :, None] == key.row[:, None, :])[:, None]
    mask = np.where(seen, np.float32(0.0), np.float32(-np.inf))
    return Places(query, key, mask, (query.row >= 0).astype(np.float32)[:, :, None])


def _share(lengths: Ints) -> list[Ints]:
    """Rows put together, longest first, into lines no longer than the longest row."""
    room: list[int] = []
    lines: list[list[int]] = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        fits = next((i for i, free in enumerate(room) if free >= lengths[row]), None)
        if fits is None:
            fits = len(room)
            room.append(int(lengths.max()))
            lines.append([])
        room[fits] -= int(lengths[row])
        lines[fits].append(row)
    return [np.array(line) for line in lines]


def _side(lengths: Ints, lines: list[Ints]) -> Side:
    starts, total = np.cumsum(lengths) - lengths, int(lengths.sum())
    if len(lines) == len(lengths):
        return _rows(lengths, starts, total)
    shape = many(len(lines)), wide(max(int(lengths[line].sum()) for line in lines))
    pad, owner = np.zeros(shape, dtype=np.int32), np.full(shape, -1)
    for number, line in enumerate(lines):
        tokens = np.concatenate([np.arange(starts[row], starts[row] + lengths[row]) for row in line])
        pad[number] = min(int(starts[line[0]]), total - 1)
        pad[number, : len(tokens)] = tokens
        owner[number, : len(tokens)] = np.repeat(line, lengths[line])
    unpad = np.empty(total, dtype=np.int32)
    real = owner >= 0
    unpad[pad[real]] = np.flatnonzero(real)
    return Side(pad, unpad, owner)


def _rows(lengths: Ints, starts: Ints, total: int) -> Side:
    """Each row a line."""
    places, lines = wide(int(lengths.max())), many(len(lengths))
    real = np.arange(places) < longer(lengths, lines)[:, None]
    pad = np.minimum(longer(starts, lines)[:, None] + np.arange(places) * real, total - 1).astype(np.int32)
    unpad = np.arange(total) + np.repeat(np.arange(len(lengths)) * places - starts, lengths)
    return Side(pad, unpad.astype(np.int32), np.where(real, np.arange(len(real))[:, None], -1))
