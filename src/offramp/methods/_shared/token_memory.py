"""Memory of exits for all tokens of a row, dropped ones included: answers are theirs too."""

from __future__ import annotations

import torch
from torch import Tensor

from offramp.core.loop import State


def live(s: State) -> Tensor:
    """Which tokens of `s.whole()` are still going."""  # [original tokens of the live rows] bool
    return torch.isin(s.whole().tokens["origin"], s.packed.tokens["origin"])


def note(s: State, name: str, column: Tensor) -> None:
    """Remember a value for every original token of the live rows: the next `s.whole()` has it, dropped tokens too."""
    if s.shortened:
        before = s.base.tokens.get(name, column.new_full((s.base.total, *column.shape[1:]), -1))
        whole = before.index_copy(0, s.whole().tokens["origin"], column)
        column = column[live(s)]
        s.base = s.base.with_tokens(**{name: whole})
    s.packed = s.packed.with_tokens(**{name: column})
