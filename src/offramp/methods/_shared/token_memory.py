"""Values that a policy keeps for all tokens of a row, dropped ones included, because these have answers too."""

from __future__ import annotations

import torch
from torch import Tensor

from offramp.core.columns import ORIGIN, Column
from offramp.core.loop import State


def is_live(s: State) -> Tensor:
    """Return which tokens of `s.with_dropped_tokens()` have not been dropped."""  # [tokens of the live rows] bool
    return torch.isin(s.with_dropped_tokens().tokens[ORIGIN], s.packed.tokens[ORIGIN])


def remember(s: State, name: str, column: Tensor) -> None:
    """Store a value for every original token of the live rows; `s.with_dropped_tokens()` then has it for all."""
    if s.has_dropped:
        absent = column.new_full((s.base.total, *column.shape[1:]), Column.value_of_dropped(name))
        before = s.base.tokens.get(name, absent)
        updated = before.index_copy(0, s.with_dropped_tokens().tokens[ORIGIN], column)
        column = column[is_live(s)]
        s.base = s.base.with_tokens(**{name: updated})
    s.packed = s.packed.with_tokens(**{name: column})
