"""Many machines: batch inference, serving and comparisons on a Ray cluster (extra `ray`).

    from offramp import distributed

    distributed.predict("texts/*.parquet", "runs/mine", "answers/", budget=0.5, replicas=8)

Importing this package imports neither Ray nor torch; a function that needs Ray names the extra if it is missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offramp.distributed.batch import BatchSummary, predict

__all__ = ["BatchSummary", "predict"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("offramp.distributed.batch"), name)
