"""Offramp: Transformer encoders that spend only the compute an input needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from offramp.errors import OfframpError

if TYPE_CHECKING:
    from offramp.inference.predictor import Predictor

__version__ = "0.1.0"
__all__ = ["OfframpError", "__version__", "load"]


def load(
    folder: str | Path,
    engine: str = "auto",
    precision: Literal["fp32", "bf16", "int8"] = "fp32",
    threads: int | None = None,
) -> Predictor:
    """Open a run folder written by `offramp train`, ready to predict.

    Engine "auto" is OpenVINO on a CPU where it is installed (`pip install 'offramp[openvino]'`), torch otherwise.

    `import offramp` stays quick because torch is imported here, on first use.
    """
    from offramp.inference.predictor import Predictor

    return Predictor.load(folder, engine, precision, threads)
