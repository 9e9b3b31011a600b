"""How many replicas the predicted work needs; Ray Serve's controller calls this, so nothing of Offramp is imported."""

from __future__ import annotations

from typing import Any

LOAD = "offramp_load"  # the metric that replicas report
TARGET = 0.7  # load of a replica that leaves room for bursts


def replicas_for_work(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas at which each has the target load; `context` is Ray's `AutoscalingContext`.

    A load of 1 is as much predicted work (tokens × expected depth at the measured speed) as one replica can do in the
    gear of a quiet server. Replicas that have not reported yet are taken to be like the others.
    """
    loads = list((context.aggregated_metrics or {}).get(LOAD, {}).values())
    if not loads:
        return float(context.target_num_replicas), {}
    total = sum(loads) / len(loads) * max(len(loads), context.current_num_replicas)
    return max(1.0, total / TARGET), {}
