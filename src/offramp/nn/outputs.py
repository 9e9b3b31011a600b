"""What a run returns for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RunOutput:
    """Logits, exit layers and cost of each encoded row."""

    logits: list[NDArray[Any]]  # [outputs] or [tokens, outputs]; of translations [pieces, 2]: piece and exit
    exit_layer: Array
    macs: Array
    tokens_kept: Array
    tokens_by_layer: Array | None = None  # [layers] tokens of all rows that each layer computed; None: unknown
    full_macs: Array | None = None  # MACs of the full model, where they depend on the generated text
