"""What became of each row, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RunOutput:
    """What happened to each encoded row."""

    logits: list[NDArray[Any]]  # [outputs] or [tokens, outputs]; of sentences [pieces, 2]: piece and exit
    exit_layer: Array
    macs: Array
    tokens_kept: Array
    tokens_by_layer: Array | None = (
        None  # [layers] tokens of all rows together that each layer computed; None: not known
    )
    full_macs: Array | None = None  # what the full model would spend, where that depends on what was said
