"""What `offramp attach` promises and keeps: disagreement, accuracy, compute and seconds on test rows.

    python benchmarks/attach_study.py --model my-model --text train.jsonl --test test.jsonl --json out.json
    … --texts 100,300,1000,3000     the same with so many texts
    … --wrong other.jsonl           exits and points from texts of another domain, then points from the right ones
    … --resample 200                how often a proven risk is broken over random halves of the test rows

The model is a plain fine-tuned one (`benchmarks/finetune_plain.py`). Settings are chosen on held-out texts and reported
on test rows, with exact (Clopper–Pearson) intervals of the disagreement.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import beta

import offramp
from offramp.calibration.calibrate import CalibrationContext
from offramp.calibration.disagreement import find_disagreement_points, label_by_full_model
from offramp.calibration.risk import check_provable, prove_risk, split_rows
from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.inference.operating_points import DisagreementPoint
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from offramp.utils.command_line import command_line
from offramp.utils.files import write_json
from offramp.utils.hardware import hardware

Rows = Sequence[dict[str, Any]]


def interval(differing: float, rows: int, confidence: float = 0.95) -> list[float]:
    """Return the exact two-sided interval of a share: so many of so many rows."""
    tail, count = (1 - confidence) / 2, round(differing)
    low = 0.0 if count == 0 else float(beta.ppf(tail, count, rows - count + 1))
    high = 1.0 if count == rows else float(beta.ppf(1 - tail, count + 1, rows - count))
    return [round(low, 6), round(high, 6)]


def measure_point(predictor: Predictor, test: Rows, settings: Any) -> dict[str, Any]:
    """Return metrics, disagreement with its interval, share of MACs and seconds of a setting on test rows."""
    task, encoded = predictor.task, predictor.prepare(test)
    full = predictor.run(encoded, predictor.settings(1.0))
    started = time.perf_counter()
    output = predictor.run(encoded, settings)
    seconds = time.perf_counter() - started
    ours, theirs = (task.predictions(test, encoded, one.logits) for one in (output, full))
    differing = task.disagreement(ours, theirs)
    found: dict[str, Any] = {
        "metrics": task.metrics(test, ours),
        "full_metrics": task.metrics(test, theirs),
        "disagreement": float(np.mean(differing)),
        "macs": {
            "mean": float(output.macs.mean()),
            "share_of_full": float(output.macs.sum()) / predictor.full_macs(encoded, output),
        },
        "mean_exit_layer": float(output.exit_layer.mean()),
        "seconds": round(seconds, 4),
    }
    if task.disagreement_is_binary:
        found["interval"] = interval(sum(differing), len(differing))
    return found


def measure_points(predictor: Predictor, test: Rows, points: Sequence[DisagreementPoint]) -> list[dict[str, Any]]:
    """Return what every disagreement point promised and what it gives on test rows."""
    cells = []
    for point in points:
        promised = {"found": point.found, "upper": point.upper, "proven": point.proven, "mac_share": point.mac_share}
        settings = predictor.settings(given=point.settings)
        cells.append({"limit": point.limit, "promised": promised, **measure_point(predictor, test, settings)})
    return cells


def attach_and_measure(options: argparse.Namespace, text: str, rows: int | None, test: Rows, out: Path) -> Any:
    """Attach with so many texts; return the predictor and the numbers."""
    pair = tuple(options.pair.split(",")) if options.pair else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are stored in the run's points
        run = offramp.attach(options.model, text, out, rows=rows, pair=pair, exits=options.exits, seed=options.seed)
    predictor = offramp.load(run.folder, engine=options.engine)
    content = {**run.summary, "warnings": list(run.points.warnings)}
    return predictor, {**content, "points": measure_points(predictor, test, run.points.disagreements)}


def calibration(predictor: Predictor, rows: Rows) -> tuple[CalibrationContext, Any]:
    """Return rows that the full model has labelled, and the recording of their exits."""
    context = CalibrationContext(predictor.network, predictor.model.method, Data(rows, predictor.prepare(rows)))
    labelled = label_by_full_model(predictor.network, rows, context)
    context = replace(context, data=Data(labelled, context.data.encoded))
    return context, context.record()


def measure_wrong_texts(options: argparse.Namespace, test: Rows, folder: Path) -> dict[str, Any]:
    """Return the points of exits that learned texts of another domain, and the same exits with repaired points."""
    predictor, wrong = attach_and_measure(options, options.wrong, options.rows, test, folder / "wrong")
    right = read_rows(options.text, limit=options.rows)
    right = right[: max(1, len(right) // 5)]
    points, _ = find_disagreement_points(*calibration(predictor, right))
    return {"wrong": wrong, "repaired": {"texts": len(right), "points": measure_points(predictor, test, points)}}


def measure_violations(predictor: Predictor, test: Rows, options: argparse.Namespace) -> dict[str, Any]:
    """Return how often a proven risk is broken: proven on a random half of the test rows, tested on the other."""
    check_provable(options.risk, options.confidence, len(test) // 2 - len(test) // 4)
    context, recording = calibration(predictor, test)
    rng, shares, found = np.random.default_rng(options.seed), [], []
    for _ in range(options.resample):
        order = rng.permutation(len(test))
        halves = [np.sort(order[: len(order) // 2]), np.sort(order[len(order) // 2 :])]
        (proving, proving_record), (testing, testing_record) = (split_rows(context, recording, half) for half in halves)
        proven = prove_risk(proving, proving_record, options.risk, options.confidence)
        output = testing.run(proven.settings, testing_record)
        differing = predictor.task.disagreement(testing.predictions(output), testing.predictions(testing.full_output))
        found.append(float(np.mean(differing)))
        shares.append(proven.mac_share)
    broken = sum(value > options.risk for value in found)
    return {
        "risk": options.risk,
        "confidence": options.confidence,
        "resamplings": options.resample,
        "violations": broken,
        "violation_share": broken / options.resample,
        "mean_disagreement": float(np.mean(found)),
        "mean_mac_share": float(np.mean(shares)),
    }


def study(options: argparse.Namespace) -> dict[str, Any]:
    """Run all parts that the options name and return one JSON object."""
    test = read_rows(options.test, limit=options.test_rows)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        predictor, attached = attach_and_measure(options, options.text, options.rows, test, base / "run")
        predictor.task.check_rows(test, options.test)
        content: dict[str, Any] = {
            "method": "attached",
            "model": Path(options.model).name,
            "data": "/".join(Path(options.test).parts[-2:]),
            "rows": len(test),
            "seed": options.seed,
            "engine": predictor.engine_name,
            "precision": "fp32",
            "hardware": hardware(),
            "command": command_line(),
            "version": offramp.__version__,
            "date": date.today().isoformat(),
            "attached": attached,
        }
        content["by_texts"] = [
            {"texts": count, **attach_and_measure(options, options.text, count, test, base / f"run-{count}")[1]}
            for count in options.texts
        ]
        if options.wrong:
            content["wrong_texts"] = measure_wrong_texts(options, test, base)
        if options.resample:
            content["resampled_risk"] = measure_violations(predictor, test, options)
    return content


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a plain fine-tuned model")
    parser.add_argument("--text", required=True, help="unlabelled texts (labels in the file are not read)")
    parser.add_argument("--test", required=True, help="labelled rows to report on")
    parser.add_argument("--rows", type=int, help="use only the first texts")
    parser.add_argument("--test-rows", type=int, help="use only the first test rows")
    parser.add_argument("--texts", type=lambda text: [int(n) for n in text.split(",")], default=[])
    parser.add_argument("--wrong", help="texts of another domain")
    parser.add_argument("--resample", type=int, default=0, help="how often a risk is proven and tested")
    parser.add_argument("--risk", type=float, default=0.02)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--exits", default="auto")
    parser.add_argument("--pair", help="text_a,text_b")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the numbers here; standard output if left out")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    try:
        content = study(options)
    except OfframpError as error:
        raise SystemExit(str(error)) from error
    if options.json:
        write_json(Path(options.json), content)
    else:
        print(json.dumps(content, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
