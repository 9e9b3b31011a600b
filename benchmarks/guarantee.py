"""How often a proven risk is broken on rows that the proof did not use.

    python benchmarks/guarantee.py RUN --data rows.jsonl --risk 0.01 --rows 1500 --trials 100 --json guarantee.json

The rows are recorded once. Each trial draws some of them, proves a risk on them as `offramp calibrate --risk` does, and
measures the proven setting on the other rows. A proof with confidence 0.95 may be broken in one trial of twenty. The
other rows are a sample too: a setting whose true risk is exactly the allowed one measures above it in half of the
trials. The reported rate is therefore an upper estimate.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offramp import __version__
from offramp.calibration import risk as risks
from offramp.calibration.calibrate import CalibrationContext
from offramp.calibration.replay import record_exits
from offramp.calibration.risk import disagreement_evaluator, prove_risk
from offramp.cli.printing.progress import row_bar
from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.evaluation.result_cells import Origin, data_and_split, hardware, labelled_data, model_name
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import load_run, read_recipe
from offramp.utils.command_line import command_line, key_values
from offramp.utils.files import write_json
from offramp.utils.progress import report_progress

PROGRAM = "python benchmarks/guarantee.py"


@dataclass(frozen=True)
class Trials:
    """What is proven, on how many rows, how often."""

    risk: float
    confidence: float
    rows: int  # drawn for each proof
    trials: int


def repeat_proofs(
    predictor: Predictor, rows: Sequence[Mapping[str, Any]], trials: Trials, origin: Origin
) -> dict[str, Any]:
    """Prove again and again; return how often the other rows show more than the risk, and what was saved."""
    method = predictor.model.method
    if not method.replays or predictor.task.scores_by_loss:
        raise OfframpError("repeated proofs", f"{method.name}, which must run again for each", "use an exit method")
    if not 0 < trials.rows < len(rows):
        fix = "draw fewer rows than there are, and leave some to test on"
        raise OfframpError(f"{trials.rows} rows for each proof", f"{len(rows)} rows", fix)
    risks.check_provable(trials.risk, trials.confidence, trials.rows - trials.rows // 2)
    data, started = labelled_data(predictor, rows, origin), time.perf_counter()
    context = CalibrationContext(predictor.network, method, data)
    policy = method.policy(predictor.network, method.settings())
    recording = record_exits(predictor.network, data, engine=predictor.engine, policy=policy)
    losses, shares, cheaper = [], [], 0
    for trial in range(trials.trials):
        drawn = np.zeros(len(rows), dtype=bool)
        drawn[np.random.default_rng(trial).permutation(len(rows))[: trials.rows]] = True
        proven = prove_risk(*context.select_rows(drawn, recording), trials.risk, trials.confidence)
        row_losses, share = disagreement_evaluator(*context.select_rows(~drawn, recording))(proven.settings)
        losses.append(float(row_losses.mean()))
        shares.append(share)
        cheaper += proven.settings != asdict(method.settings())
        report_progress(trial + 1, trials.trials)
    return {
        "what": "a proven risk on rows the proof never saw",
        "method": method.name,
        "model": model_name(predictor.model.base_model),
        "data": origin.data,
        "split": origin.split,
        "rows": len(rows),
        **{f"asked_{name}": value for name, value in asdict(trials).items()},
        "broken": round(float(np.mean(np.array(losses) > trials.risk)), 4),
        "allowed": round(1.0 - trials.confidence, 6),
        "departure": _spread(losses),
        "share_of_full": _spread(shares),
        "cheaper_than_full": cheaper,
        "seconds": round(time.perf_counter() - started, 1),
        "hardware": hardware(),
        "command": origin.command,
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    numbers = {"mean": np.mean(values), "p05": low, "p50": middle, "p95": high}
    return {name: round(float(value), 6) for name, value in numbers.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trials, write what was found and print it in a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a folder that `offramp train` wrote")
    parser.add_argument("--data", required=True, help="many labelled rows that the model was not trained on")
    parser.add_argument("--risk", type=float, default=0.01, help="allowed disagreement with the full model")
    parser.add_argument("--confidence", type=float, default=0.95, help="of each proof")
    parser.add_argument("--rows", type=int, default=1500, help="rows drawn for each proof; the others test it")
    parser.add_argument("--trials", type=int, default=100, help="number of proofs")
    parser.add_argument("--limit", type=int, help="use only the first N rows")
    parser.add_argument("--column", action="append", metavar="NAME=COLUMN", help="rename a column")
    parser.add_argument("--json", help="write the numbers here")
    options = parser.parse_args(arguments)
    trials = Trials(options.risk, options.confidence, options.rows, options.trials)
    try:
        rows = read_rows(options.data, columns=key_values(options.column, "--column"), limit=options.limit)
        origin = Origin(*data_and_split(options.data), command_line(PROGRAM), read_recipe(options.run))
        with row_bar("proving"):
            found = repeat_proofs(Predictor(load_run(options.run)), rows, trials, origin)
    except OfframpError as error:
        sys.exit(str(error))
    if options.json:
        write_json(Path(options.json), found)
    print(f"{found['broken']:.3f} of {options.trials} proofs were broken ({found['allowed']:g} are allowed)")
    loss, share = (found[name]["mean"] for name in ("departure", "share_of_full"))
    print(f"mean disagreement {loss:.4f} at {share:.3f} of the compute")


if __name__ == "__main__":
    main()
