"""`offramp guarantee` as a function: how often a proven risk is broken on rows the proof never saw.

The rows are recorded once. Then, again and again, some of them are drawn for a proof as `offramp calibrate --risk`
makes it, and the others show what came of it. A proof with confidence 0.95 may be broken by one draw in twenty. What
the others show is itself a sample, so a setting whose true risk is just allowed is seen above it in half of the draws:
the rate is an upper estimate.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from offramp import __version__
from offramp.calibration import risk as risks
from offramp.calibration.replay import record_exits
from offramp.calibration.scores import select_rows
from offramp.calibration.subject import CalibrationContext
from offramp.commands.calibrate import disagreement_evaluator, prove_risk
from offramp.errors import OfframpError
from offramp.evaluation.result_cells import Origin, hardware, labelled, model_name
from offramp.inference.predictor import Predictor
from offramp.utils.progress import tell


@dataclass(frozen=True)
class Draws:
    """What is proven, on how many rows, how often."""

    risk: float
    confidence: float
    rows: int  # drawn for each proof
    trials: int


def broken(predictor: Predictor, rows: Sequence[Mapping[str, Any]], draws: Draws, origin: Origin) -> dict[str, Any]:
    """The record of all draws: how often the others showed more than the risk, what was saved, what was found."""
    method = predictor.model.method
    if not method.replays or predictor.task.scores_by_loss:
        raise OfframpError(
            "proofs by the hundred", f"{method.name}, which must run anew for each", "use an exit method"
        )
    if not 0 < draws.rows < len(rows):
        fix = "draw fewer rows than there are, and leave some to test on"
        raise OfframpError(f"{draws.rows} rows for each proof", f"{len(rows)} rows", fix)
    risks.check_provable(draws.risk, draws.confidence, draws.rows - draws.rows // 2)
    data, started = labelled(predictor, rows, origin), time.perf_counter()
    subject, tape = (
        CalibrationContext(predictor.network, method, data),
        record_exits(
            predictor.network, data, engine=predictor.engine, policy=method.policy(predictor.network, method.settings())
        ),
    )
    found, shares, cheaper = [], [], 0
    for trial in range(draws.trials):
        drawn = np.zeros(len(rows), dtype=bool)
        drawn[np.random.default_rng(trial).permutation(len(rows))[: draws.rows]] = True
        proven = prove_risk(*select_rows(subject, tape, drawn), draws.risk, draws.confidence)
        losses, share = disagreement_evaluator(*select_rows(subject, tape, ~drawn))(proven.settings)
        found.append(float(losses.mean()))
        shares.append(share)
        cheaper += proven.settings != asdict(method.settings())
        tell(trial + 1, draws.trials)
    return {
        "what": "a proven risk on rows the proof never saw",
        **{"method": method.name, "model": model_name(predictor.model.base_model), "data": origin.data},
        **{"split": origin.split, "rows": len(rows), **{f"asked_{k}": v for k, v in asdict(draws).items()}},
        "broken": round(float(np.mean(np.array(found) > draws.risk)), 4),
        "allowed": round(1.0 - draws.confidence, 6),
        "departure": _spread(found),
        "share_of_full": _spread(shares),
        "cheaper_than_full": cheaper,
        "seconds": round(time.perf_counter() - started, 1),
        **{"hardware": hardware(), "command": origin.command, "version": __version__},
        "date": datetime.date.today().isoformat(),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    return {
        name: round(float(v), 6)
        for name, v in zip(("mean", "p05", "p50", "p95"), (np.mean(values), low, middle, high), strict=True)
    }
