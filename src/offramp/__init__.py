"""Offramp: Transformer encoders that spend only the compute an input needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from offramp.errors import OfframpError

if TYPE_CHECKING:
    from offramp.model.predictor import Predictor

__version__ = "0.1.0"
__all__ = ["OfframpError", "__version__", "load"]


def load(folder: str | Path, engine: str = "torch") -> Predictor:
    """Open a run folder written by `offramp train`, ready to predict.

    `import offramp` stays quick because torch is imported here, on first use.
    """
    from offramp.model.predictor import Predictor

    return Predictor.load(folder, engine=engine)
