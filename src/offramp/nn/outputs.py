"""What a run returns for each row."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Computed = Array | Callable[[], Array]  # a column, or how to compute it when it is read


class RunOutput:
    """Logits, exit layers and cost of each encoded row. Costs may be given as functions that are called when read."""

    def __init__(
        self,
        logits: list[NDArray[Any]],  # [outputs] or [tokens, outputs]; of translations [pieces, 2]: piece and exit
        exit_layer: Array,
        macs: Computed,
        tokens_kept: Computed,
        tokens_by_layer: Computed | None = None,
        full_macs: Array | None = None,
        *,
        finite: bool = False,
    ) -> None:
        self.logits, self.exit_layer = logits, exit_layer
        self._macs, self._tokens_kept, self._tokens_by_layer = macs, tokens_kept, tokens_by_layer
        self.full_macs = full_macs  # MACs of the full model, where they depend on the generated text
        self.finite = finite  # all logits are known to be numbers

    @cached_property
    def macs(self) -> Array:
        """MACs of each row."""
        return self._macs() if callable(self._macs) else self._macs

    @cached_property
    def tokens_kept(self) -> Array:
        """Mean number of tokens that a layer computed, for each row."""
        return self._tokens_kept() if callable(self._tokens_kept) else self._tokens_kept

    @cached_property
    def tokens_by_layer(self) -> Array | None:
        """Tokens of all rows that each layer computed; None: unknown."""  # [layers]
        return self._tokens_by_layer() if callable(self._tokens_by_layer) else self._tokens_by_layer
