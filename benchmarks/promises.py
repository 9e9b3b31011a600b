"""How often `max_loss` is broken on rows that calibration did not use, and what keeping it costs.

    python benchmarks/promises.py RUN… --data rows.jsonl --rows 2000 --trials 200 --json promises.json

The rows of each run are recorded once. Each trial draws some of them, calibrates on them as `offramp calibrate` does,
chooses a point for each loss by its confidence bound and, for comparison, by its estimate, and measures both on the
other rows, paired with the full model. A bound with confidence 0.9 may be broken in one trial of ten. A rule that
always answers with the full model is never broken: the share of MACs stands beside the violations. Trials that are in
the file already are not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from offramp import __version__
from offramp.calibration.calibrate import CalibrationContext, explore_settings, point_evaluator
from offramp.calibration.loss_bounds import CONFIDENCE, loss_bounds, stored_points
from offramp.calibration.replay import record_exits
from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.inference.operating_points import OperatingPoints, pareto_front
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import load_run
from offramp.nn.batches import Data
from offramp.utils.files import read_json, write_json
from offramp.utils.hardware import hardware

PROGRAM = "python benchmarks/promises.py"
LOSSES = (0.005, 0.01, 0.02)
Trial = dict[str, Any]


def run_trials(
    predictor: Predictor, rows: Sequence[Mapping[str, Any]], drawn: int, trials: Sequence[int], confidence: float
) -> list[Trial]:
    """Calibrate on drawn rows and measure the chosen points on the others, once for each trial number."""
    method, network = predictor.model.method, predictor.network
    if not method.replays or predictor.task.scores_by_loss:
        raise OfframpError("repeated calibrations", f"{method.name}, which must run for each", "use an exit method")
    if not 0 < drawn < len(rows):
        raise OfframpError(f"{drawn} rows for each trial", f"{len(rows)} rows", "leave some rows to measure on")
    data = Data(rows, predictor.prepare(rows))
    context = CalibrationContext(network, method, data, loss_confidence=confidence)
    recording = record_exits(network, data, policy=method.policy(network, method.settings()))
    higher, found = predictor.task.higher_is_better, []
    for trial in trials:
        chosen = np.zeros(len(rows), dtype=bool)
        chosen[np.random.default_rng(trial).permutation(len(rows))[:drawn]] = True
        *tried, full = explore_settings(*context.select_rows(chosen, recording))
        points = OperatingPoints(
            predictor.task.metric,
            higher,
            {"name": "drawn", "rows": drawn, "fingerprint": ""},
            stored_points(pareto_front(tried, full, higher)),
            bounds=loss_bounds(tried, confidence),
        )
        evaluate = point_evaluator(*context.select_rows(~chosen, recording))
        full_score = evaluate({}).score
        for loss in LOSSES:
            for rule, known in (("bound", points), ("estimate", replace(points, bounds=None))):
                point, unproven = known.within_loss(loss)
                measured = evaluate(point.settings)
                lost = (full_score - measured.score) * (1 if higher else -1)
                found.append(
                    {
                        "trial": trial,
                        "max_loss": loss,
                        "rule": rule,
                        "proven": rule == "bound" and not unproven,
                        "lost": lost,
                        "mac_share": measured.mac_share,
                    }
                )
    return found


def summarise(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return, for each loss and rule, how often it was broken and the share of MACs."""
    rows = []
    for loss in LOSSES:
        for rule in ("bound", "estimate"):
            own = [one for one in trials if (one["max_loss"], one["rule"]) == (loss, rule)]
            if own:
                rows.append(
                    {
                        "max_loss": loss,
                        "rule": rule,
                        "trials": len(own),
                        "broken": float(np.mean([one["lost"] > loss + 1e-9 for one in own])),
                        "proven": float(np.mean([one["proven"] for one in own])),
                        "mean_lost": float(np.mean([one["lost"] for one in own])),
                        "mac_share": float(np.mean([one["mac_share"] for one in own])),
                    }
                )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the trials that the file lacks and print the summary of each run."""
    parser = argparse.ArgumentParser(PROGRAM, description="How often max_loss is broken on new rows.")
    parser.add_argument("runs", nargs="+", help="run folders of exit methods")
    parser.add_argument("--data", required=True, help="labelled rows that no run was trained on")
    parser.add_argument("--rows", type=int, default=2000, help="rows drawn for each calibration")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--confidence", type=float, default=CONFIDENCE)
    parser.add_argument("--block", type=int, default=10, help="trials between two writes of the file")
    parser.add_argument("--json", required=True, help="the result; an interrupted study goes on from it")
    given = parser.parse_args(arguments)
    target, rows = Path(given.json), read_rows(given.data)
    study = {"data": Path(given.data).name, "rows": given.rows, "confidence": given.confidence}
    stored = read_json(target) if target.is_file() else {**study, "version": __version__, "hardware": hardware()}
    if any(stored.get(name) != value for name, value in study.items()):
        raise OfframpError("to continue a study", f"{target}, a study of other rows or another confidence", "move it")
    for run in given.runs:
        predictor, name = Predictor(load_run(run), engine="torch"), Path(run).name
        own = stored.setdefault("runs", {}).setdefault(name, {"method": predictor.model.method.name, "trials": []})
        done = {one["trial"] for one in own["trials"]}
        waiting = [trial for trial in range(given.trials) if trial not in done]
        for first in range(0, len(waiting), given.block):
            block = waiting[first : first + given.block]
            own["trials"] += run_trials(predictor, rows, given.rows, block, given.confidence)
            own["summary"] = summarise(own["trials"])
            write_json(target, stored)
        for line in own["summary"]:
            print(
                f"{name}: max_loss {line['max_loss']:g} by {line['rule']}: broken in {100 * line['broken']:.1f} % of "
                f"{line['trials']}, mean loss {100 * line['mean_lost']:.2f} points, {line['mac_share']:.3f} of the MACs"
            )


if __name__ == "__main__":
    main()
