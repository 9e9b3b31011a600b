"""The places of tokens when a compiled graph attends: one block of lines for a whole batch, whatever its lengths.

A line is one row, as long as that wastes little. Where one long row would inflate the others, short rows share a line,
and a mask restricts each token to its own row. Filler repeats a token of its line and is never read back.

Numbers of tokens, lines and places are rounded up to a few sizes (`padded_tokens`, `padded_rows`, `padded_length`),
because a graph compiles kernels for every size it meets and keeps them.
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


def padded_tokens(tokens: int) -> int:
    """Round a number of tokens up by at most a sixteenth (by at most seven where there are few)."""
    step = max(8, 1 << max(0, tokens.bit_length() - 5))
    return -(-tokens // step) * step


def padded_rows(rows: int) -> int:
    """Round a number of rows or lines up by at most an eighth."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def padded_length(places: int) -> int:
    """Round a number of places in a line up to a multiple of four."""
    return max(4, -(-places // 4) * 4)


def extend(array: NDArray[Any], count: int, filler: int = 0) -> NDArray[Any]:
    """Extend an array with filler (`np.pad` takes ten times as long on small arrays)."""
    result = np.full(count, filler, array.dtype)
    result[: len(array)] = array
    return result


@dataclass(frozen=True)
class LineIndex:
    """Indices of queries or keys in lines."""

    pad: Index  # [lines, places] token index
    unpad: Index  # [tokens] place in the flattened block
    row: Ints  # [lines, places] row of the token, −1 for filler


@dataclass(frozen=True)
class LineLayout:
    """Queries and keys of one composition of rows, in lines."""

    query: LineIndex
    key: LineIndex
    mask: Floats  # [lines, 1, 1 or queries, keys], added to the logits: 0 or −∞
    real: Floats  # [lines, queries, 1], 0 for filler

    @property
    def cells(self) -> int:
        """Number of query-key pairs that attention computes."""
        return self.query.pad.size * self.key.pad.shape[1]


def line_layout(where: Layout) -> LineLayout:
    """Return the lines of a layout, planned once."""
    if "places" not in where.cache:
        where.cache["places"] = _plan(where)
    result: LineLayout = where.cache["places"]
    return result


def _plan(where: Layout) -> LineLayout:
    queries, keys = where.query_lengths, where.key_lengths
    rows = [np.array([row]) for row in range(len(keys))]
    cells, needed = len(keys) * int(queries.max()) * int(keys.max()), int((queries * keys).sum())
    shared = _pack_lines(keys) if cells - needed > SPARE * int(keys.sum()) else rows
    lines = shared if len(shared) < 0.7 * len(rows) else rows
    key = _side(keys, lines)
    query = key if where.same else _side(queries, lines)
    if lines is rows:
        visible = (key.row >= 0)[:, None, None, :]
        visible[len(lines) :, ..., 0] = True  # attending to nothing would be NaN
    else:  # filler attends to its line's first row, and in lines of filler to filler
        first = np.full(len(query.row), -1)
        first[: len(lines)] = [line[0] for line in lines]
        asks = np.where(query.row < 0, first[:, None], query.row)
        visible = (asks[:, :, None] == key.row[:, None, :])[:, None]
    mask = np.where(visible, np.float32(0.0), np.float32(-np.inf))
    return LineLayout(query, key, mask, (query.row >= 0).astype(np.float32)[:, :, None])


def _pack_lines(lengths: Ints) -> list[Ints]:
    """Pack rows, longest first, into lines no longer than the longest row."""
    free_places: list[int] = []  # of each line
    lines: list[list[int]] = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        fits = next((i for i, free in enumerate(free_places) if free >= lengths[row]), None)
        if fits is None:
            fits = len(free_places)
            free_places.append(int(lengths.max()))
            lines.append([])
        free_places[fits] -= int(lengths[row])
        lines[fits].append(row)
    return [np.array(line) for line in lines]


def _side(lengths: Ints, lines: list[Ints]) -> LineIndex:
    starts, total = np.cumsum(lengths) - lengths, int(lengths.sum())
    if len(lines) == len(lengths):
        return _rows(lengths, starts, total)
    shape = padded_rows(len(lines)), padded_length(max(int(lengths[line].sum()) for line in lines))
    pad, owner = np.zeros(shape, dtype=np.int32), np.full(shape, -1)
    for number, line in enumerate(lines):
        tokens = np.concatenate([np.arange(starts[row], starts[row] + lengths[row]) for row in line])
        pad[number] = min(int(starts[line[0]]), total - 1)
        pad[number, : len(tokens)] = tokens
        owner[number, : len(tokens)] = np.repeat(line, lengths[line])
    unpad = np.empty(total, dtype=np.int32)
    real = owner >= 0
    unpad[pad[real]] = np.flatnonzero(real)
    return LineIndex(pad, unpad, owner)


def _rows(lengths: Ints, starts: Ints, total: int) -> LineIndex:
    """Return one line for each row."""
    places, lines = padded_length(int(lengths.max())), padded_rows(len(lengths))
    real = np.arange(places) < extend(lengths, lines)[:, None]
    pad = np.minimum(extend(starts, lines)[:, None] + np.arange(places) * real, total - 1).astype(np.int32)
    unpad = np.arange(total) + np.repeat(np.arange(len(lengths)) * places - starts, lengths)
    return LineIndex(pad, unpad.astype(np.int32), np.where(real, np.arange(len(real))[:, None], -1))
