"""Many machines: batch inference and comparisons on a Ray cluster (extra `ray`).

    from offramp import distributed

    distributed.predict("texts/*.parquet", "runs/mine", "answers/", budget=0.5, replicas=8)

Importing this package does not import Ray; a function that needs it names the extra to install if it is missing.
"""

from __future__ import annotations

from offramp.distributed.batch import BatchSummary, predict

__all__ = ["BatchSummary", "predict"]
