"""A ragged batch as a type: the states of all tokens in one matrix, row lengths, and named columns.

Independent of backbones and methods. Rows leave with `keep_rows`, tokens with `keep_tokens`; every column is selected
with them, so that a method's memory stays beside the row or token it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offramp.core.columns import ID, ORIGIN, POSITION, PRESENT, TYPE, Column
from offramp.core.layout import Layout, layout
from offramp.errors import OfframpError


@dataclass(frozen=True)
class Packed:
    """Rows of different lengths without padding.

    `lengths` stays on the CPU, because layouts are planned there. `rows` and `tokens` hold named columns, first
    dimension rows or tokens. The column `origin` numbers tokens (and rows) of the batch as it was packed.
    """

    states: Tensor  # [tokens, hidden]
    lengths: Tensor  # [rows], int64, CPU
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.lengths.shape[0]

    @cached_property
    def total(self) -> int:
        """Number of tokens."""
        return int(self.lengths.sum())

    @cached_property
    def starts(self) -> Tensor:
        """Index of each row's first token."""  # [rows]
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def row_of_token(self) -> Tensor:
        """Row index of every token."""  # [tokens]
        rows = np.repeat(
            np.arange(self.count), self.lengths.numpy()
        )  # numpy: torch would start its threads for a few numbers
        return torch.from_numpy(rows).to(self.device)

    @property
    def device(self) -> torch.device:
        """Device of the columns."""
        return next(iter(self.tokens.values())).device if self.tokens else self.states.device

    def first(self) -> Tensor:
        """Return the state of each row's first token."""  # [rows, hidden]
        return self.states.index_select(0, self.starts.to(self.states.device))

    @cached_property
    def layout(self) -> Layout:
        """Attention layout with every token as query and key; planned once for each composition of rows."""
        return layout(self.lengths, self.tokens[POSITION])

    def mean(self) -> Tensor:
        """Return the mean state of each row, weighted by `PRESENT` where training removes tokens softly."""
        if self._plain_row:
            return self.states.mean(0, keepdim=True)
        states, count = self.states, self.lengths.to(self.states.device, self.states.dtype)
        if PRESENT in self.tokens:
            weight = self.tokens[PRESENT].to(states.dtype)
            count = count.new_zeros(self.count).index_add(0, self.row_of_token, weight)
            states = states * weight[:, None]
        total = states.new_zeros(self.count, states.shape[1]).index_add(0, self.row_of_token, states)
        return total / count[:, None]  # [rows, hidden]

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of token values in each row."""  # [tokens, n] → [rows, n]
        return values.new_zeros(self.count, values.shape[1]).index_add(0, self.row_of_token, values)

    def max(self) -> Tensor:
        """Return the largest value of each dimension in each row; log `PRESENT` lowers softly removed tokens."""
        if self._plain_row:
            return self.states.amax(0, keepdim=True)
        states = self.states
        if PRESENT in self.tokens:
            states = states + self.tokens[PRESENT].clamp(min=1e-30).log().to(states.dtype)[:, None]
        index = self.row_of_token[:, None].expand_as(states)
        empty = states.new_zeros(self.count, states.shape[1])
        return empty.scatter_reduce(0, index, states, "amax", include_self=False)  # [rows, hidden]

    @property
    def _plain_row(self) -> bool:
        """Whether this is one row at run time, which is pooled without scattering."""
        return self.count == 1 and PRESENT not in self.tokens and not torch.is_grad_enabled()

    def with_states(self, states: Tensor) -> Packed:
        """Return the same rows and columns with other states."""
        return self._same(Packed(states, self.lengths, self.rows, self.tokens))

    def with_rows(self, **columns: Tensor) -> Packed:
        """Return the same batch with row columns added or replaced."""
        return self._same(Packed(self.states, self.lengths, {**self.rows, **columns}, self.tokens))

    def with_tokens(self, **columns: Tensor) -> Packed:
        """Return the same batch with token columns added or replaced."""
        return self._same(Packed(self.states, self.lengths, self.rows, {**self.tokens, **columns}))

    def without_tokens(self, name: str) -> Packed:
        """Return the same batch without a token column."""
        columns = {known: column for known, column in self.tokens.items() if known != name}
        return self._same(Packed(self.states, self.lengths, self.rows, columns))

    def _same(self, other: Packed) -> Packed:
        """Copy cached values to `other`, which has the same composition."""
        for name in ("total", "starts", "row_of_token", "layout"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def to(self, device: torch.device) -> Packed:
        """Return the batch with states and columns on a device; lengths stay on the CPU."""
        if device == self.device:
            return self
        rows = {name: column.to(device) for name, column in self.rows.items()}
        tokens = {name: column.to(device) for name, column in self.tokens.items()}
        return Packed(self.states.to(device), self.lengths, rows, tokens)

    def keep_tokens(self, keep: Tensor) -> Packed:
        """Return only the tokens where `keep` is true; every row must keep at least one token."""
        index = keep.nonzero().squeeze(1)
        if index.shape[0] == keep.shape[0]:
            return self
        counts = torch.bincount(self.row_of_token.index_select(0, index), minlength=self.count).cpu()
        if bool((counts == 0).any()):
            row = int((counts == 0).nonzero()[0])
            raise OfframpError(
                "to drop tokens from a packed batch",
                f"a mask that leaves row {row} with no token at all",
                "keep the first token of every row; a row that is done leaves with keep_rows",
            )
        return self._take(index, counts, self.rows)

    def keep_rows(self, keep: Tensor) -> Packed:
        """Return only the rows where `keep` is true, with their tokens and columns."""
        keep = keep.cpu()
        if bool(keep.all()):
            return self
        index = keep.to(self.device)[self.row_of_token].nonzero().squeeze(1)
        rows = {name: column[keep.to(column.device)] for name, column in self.rows.items()}
        return self._take(index, self.lengths[keep], rows)

    def _take(self, index: Tensor, lengths: Tensor, rows: Mapping[str, Tensor]) -> Packed:
        states = self.states.index_select(0, index) if self.states.dim() > 1 else self.states  # none yet
        tokens = {name: column.index_select(0, index) for name, column in self.tokens.items()}
        return Packed(states, lengths, rows, tokens)

    @staticmethod
    def concat(parts: Sequence[Packed], bases: Sequence[Packed] | None = None) -> Packed:
        """Return the rows of several batches as one batch; a column that a part lacks gets its declared default.

        Origins stay unique: those of a part are moved up by the size of the parts before it, or of their `bases`, the
        whole batches that the parts were taken from.
        """
        bases = bases or parts
        shifted, rows, tokens = [], 0, 0
        for part, base in zip(parts, bases, strict=True):
            if part.count:
                part = part.with_rows(origin=part.rows[ORIGIN] + rows).with_tokens(origin=part.tokens[ORIGIN] + tokens)
                shifted.append(part)
            rows, tokens = rows + base.count, tokens + base.total
        if len(shifted) < 2:
            return shifted[0] if shifted else parts[0]
        states = torch.cat([part.states for part in shifted])
        row_columns = _concat_columns([part.rows for part in shifted], [part.count for part in shifted])
        token_columns = _concat_columns([part.tokens for part in shifted], [part.total for part in shifted])
        return Packed(states, torch.cat([part.lengths for part in shifted]), row_columns, token_columns)

    def restore(self, memory: Tensor) -> Tensor:
        """Return `memory`, the states of the original batch, with this batch's states put back at their origins."""
        return memory.index_copy(0, self.tokens[ORIGIN], self.states)  # [original tokens, hidden]


class RowArrays(NamedTuple):
    """Rows of token ids as plain arrays, one row after another."""

    ids: NDArray[np.int64]  # [tokens]
    types: NDArray[np.int64]
    positions: NDArray[np.int64]
    lengths: NDArray[np.int64]  # [rows]


def arrays_of_rows(ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> RowArrays:
    """Return rows of token ids as arrays, with positions."""
    if not ids or any(len(row) == 0 for row in ids):
        raise OfframpError("to pack a batch", "no rows, or a row without tokens", "give every row at least one token")
    lengths = np.fromiter((len(row) for row in ids), np.int64, len(ids))
    flat = joined(ids)
    kinds = joined(types) if types else np.zeros_like(flat)
    origin = np.arange(len(flat))
    position = origin if len(ids) == 1 else origin - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return RowArrays(flat, kinds, position, lengths)


def pack(ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Packed:
    """Pack rows of token ids into a batch with the columns ID, TYPE, POSITION and ORIGIN; it has no states yet."""
    flat, kinds, position, lengths = arrays_of_rows(ids, types)
    columns = {ID: flat, TYPE: kinds, POSITION: position, ORIGIN: np.arange(len(flat))}
    tokens: dict[str, Tensor] = {name: torch.from_numpy(column) for name, column in columns.items()}
    return Packed(torch.empty(0), torch.from_numpy(lengths), {ORIGIN: torch.arange(len(ids))}, tokens)


def _concat_columns(parts: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Concatenate columns by name; a part that lacks one is filled with the column's declared default."""
    example = {name: column for part in parts for name, column in part.items()}
    return {name: torch.cat([_column(part, name, example[name], n) for part, n in zip(parts, sizes, strict=True)])
            for name in example}  # fmt: skip


def _column(part: Mapping[str, Tensor], name: str, example: Tensor, size: int) -> Tensor:
    if name in part:
        return part[name]
    declared = Column.declared.get(name)
    if declared is None or declared.default is None:
        fix = "give every batch the column, or declare a default for it with offramp.core.columns.Column"
        raise OfframpError("to concatenate packed batches", f"a batch without the column {name!r}", fix)
    return example.new_full((size, *example.shape[1:]), declared.default)


def joined(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the numbers of all rows as one array."""
    return np.array(rows[0] if len(rows) == 1 else [number for row in rows for number in row], dtype=np.int64)
