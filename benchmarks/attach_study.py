"""What `offramp attach` promises and keeps: disagreement, accuracy, compute and seconds.

    python benchmarks/attach_study.py cells --model my-model --text train.jsonl --test test.jsonl --run RUN --json F
    python benchmarks/attach_study.py texts --model … --text … --test … --counts 100,300,1000,3000 --costs 0.2,0.35
    python benchmarks/attach_study.py wrong --model … --text … --test … --wrong other.jsonl
    python benchmarks/attach_study.py risk  --run RUN --test many.jsonl --skip 24000 --resamplings 200 --risk 0.01
    python benchmarks/attach_study.py seconds --model … --text … --rows 3000      (on an idle machine)

The model is a plain fine-tuned one (`benchmarks/finetune_plain.py`). Settings are chosen on held-out texts and reported
on test rows, with exact (Clopper–Pearson) intervals of the disagreement. Where only disagreement is reported, the test
rows need no labels: the full model's own answer is the truth.

- cells: a result cell for the full model and for every limit of disagreement.
- texts: the same model with fewer texts: disagreement and compute of the 1 % point, and disagreement at fixed costs.
- wrong: exits and points from texts of another domain; then the same exits with points from the right texts.
- risk: how often a proven risk is broken. A proof draws its rows from the test rows and the rows that it did not draw,
  many more, show the risk. Thresholds are found a few times; each time the proof is repeated with other rows.
- seconds: attaching beside one pass of the full model over the same texts on the torch engine.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import warnings
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import beta, binomtest

import offramp
from offramp import engines
from offramp.calibration.disagreement import find_disagreement_points, record_unlabelled
from offramp.calibration.replay import record_exits, replay
from offramp.calibration.risk import (
    check_provable,
    disagreement_evaluator,
    order_by_disagreement,
    p_value,
    risk_candidates,
    split_in_halves,
    split_rows,
)
from offramp.commands.attach import AttachedRun
from offramp.core.policy import Policy
from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.evaluation.baselines import tfidf
from offramp.evaluation.result_cells import Measurement, Origin, data_and_split, labelled_data, result_cell
from offramp.inference.batching import run_encoded
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from offramp.nn.batches import Data
from offramp.utils.command_line import command_line
from offramp.utils.files import write_json
from offramp.utils.hardware import best_precision, hardware

PROGRAM = "benchmarks/attach_study.py"
Row = dict[str, Any]
Rows = Sequence[Row]
FINDINGS = 5  # how often `risk` finds thresholds anew


def interval(differing: float, rows: int, confidence: float = 0.95) -> list[float]:
    """Return the exact two-sided interval of a share: so many of so many rows."""
    tail, count = (1 - confidence) / 2, round(differing)
    low = 0.0 if count == 0 else float(beta.ppf(tail, count, rows - count + 1))
    high = 1.0 if count == rows else float(beta.ppf(1 - tail, count + 1, rows - count))
    return [round(low, 6), round(high, 6)]


def share_and_interval(predictor: Predictor, differing: Sequence[float]) -> dict[str, Any]:
    """Return the mean disagreement and, where rows either differ or not, its exact interval."""
    found: dict[str, Any] = {"found": round(float(np.mean(differing)), 6)}
    if predictor.task.disagreement_is_binary:
        found["interval"] = interval(float(np.sum(differing)), len(differing))
    return found


class TestRows:
    """Rows to report on, whose exits are recorded in one pass; every setting is replayed on the recording."""

    def __init__(self, predictor: Predictor, rows: Rows, source: str) -> None:
        self.predictor, self.rows, self.source = predictor, rows, source
        self.encoded = predictor.prepare(rows, source)
        full_policy = predictor.model.method.policy(predictor.network, predictor.settings(1.0))
        self.recording = record_exits(
            predictor.network, Data(rows, self.encoded), engine=predictor.engine, policy=full_policy
        )
        self.full = self.run(predictor.settings(1.0))
        self.full_predictions = self.predictions(self.full)

    def run(self, settings: Any) -> Any:
        """Return logits, exits and costs of a setting."""
        policy = self.predictor.model.method.policy(self.predictor.network, settings)
        return replay(self.predictor.network, self.recording, policy)

    def predictions(self, output: Any) -> list[Row]:
        """Return the predictions of an output."""
        return self.predictor.task.predictions(self.rows, self.encoded, output.logits)

    def measure(self, settings: Any) -> dict[str, Any]:
        """Return disagreement with its interval and share of MACs of a setting."""
        output = self.run(settings)
        differing = self.predictor.task.disagreement(self.predictions(output), self.full_predictions)
        share = float(output.macs.sum()) / self.predictor.full_macs(self.encoded, output)
        return {"disagreement": share_and_interval(self.predictor, differing), "mac_share": round(share, 6)}

    def measure_limit(self, limit: float) -> dict[str, Any]:
        """Return what a disagreement point promised and what it gives on these rows."""
        points = self.predictor.points
        assert points is not None
        point = next(point for point in points.disagreements if point.limit == limit)
        promised = {"found": point.found, "upper": point.upper, "proven": point.proven, "mac_share": point.mac_share}
        return {"limit": limit, "promised": promised, **self.measure(self.predictor.settings(given=point.settings))}


def attach(options: argparse.Namespace, text: str, rows: int | None, out: Path) -> tuple[AttachedRun, Predictor]:
    """Attach with so many texts, without printing warnings (they are stored in the run's points)."""
    pair = tuple(options.pair.split(",")) if options.pair else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = offramp.attach(
            options.model,
            text,
            out,
            rows=rows,
            pair=pair,
            exits=options.exits,
            seed=options.seed,
            max_length=options.max_length,
            held_out=options.held_out,
            force=True,
        )
    return run, offramp.load(run.folder, engine=options.engine)


def read_sample(path: str, options: argparse.Namespace, folder: Path, name: str) -> str:
    """Write the texts in random order (the order of a file may not be random) and return where."""
    own = path == options.text
    rows = read_rows(path)[options.text_skip if own else 0 : options.text_end if own else None]
    random.Random(options.seed).shuffle(rows)
    rows = rows[: options.rows]
    target = folder / f"{name}.jsonl"
    target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(target)


def read_test(options: argparse.Namespace, predictor: Predictor) -> list[Row]:
    """Return the test rows with labels by the names that the model has."""
    rows = read_rows(options.test)[options.skip :][: options.test_rows]
    return [dict(predictor.task.with_known_label(row)) for row in rows]


def header(options: argparse.Namespace, predictor: Predictor, what: str) -> dict[str, Any]:
    """Return the fields that every file of a study has."""
    data, split = data_and_split(options.test)
    return {
        "what": what,
        "method": "attached",
        "model": predictor.model.base_model,
        "data": data,
        "split": split,
        "seed": options.seed,
        "engine": predictor.engine_name,
        "precision": predictor.how.precision,
        "hardware": hardware(),
        "command": command_line(PROGRAM),
        "version": offramp.__version__,
        "date": date.today().isoformat(),
    }


# --- cells -----------------------------------------------------------------------------------------------------------


def study_cells(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Attach and return result cells of the full model and of every limit on the test rows."""
    out = Path(options.run or folder / "run")
    if not (out / "offramp.json").is_file():
        attach(options, read_sample(options.text, options, folder, "texts"), None, out)
    predictor = offramp.load(out, engine=options.engine)
    test = TestRows(predictor, read_test(options, predictor), options.test)
    summary = read_recipe(out)["summary"]
    origin = Origin(*data_and_split(options.test), command_line(PROGRAM), {"schedule": {"seed": options.seed}})
    labelled_data(predictor, test.rows, origin)
    assert predictor.points is not None
    cells = []
    for limit in [None, *(point.limit for point in predictor.points.disagreements)]:
        found = {} if limit is None else test.measure_limit(limit)
        points = {point.limit: point.settings for point in predictor.points.disagreements}
        settings = predictor.settings(1.0) if limit is None else predictor.settings(given=points[limit])
        output = test.full if limit is None else test.run(settings)
        metrics = predictor.task.metrics(test.rows, test.predictions(output))
        measured = Measurement(Data(test.rows, test.encoded), settings, metrics, output, 32)
        cell = {**result_cell(predictor, measured, origin), "trained": _trained(options, summary, predictor)}
        if limit is not None:
            cell["chosen"] = {"kind": "disagreement", "value": limit}
            cell["disagreement"] = {"promised": found["promised"], **found["disagreement"]}
        cells.append(cell)
    return [*cells, *_tfidf(options, predictor, test.rows)]


def _trained(options: argparse.Namespace, summary: dict[str, Any], predictor: Predictor) -> dict[str, Any]:
    assert predictor.points is not None
    return {
        "attached_to": predictor.model.base_model,
        "fine_tuned_by": options.fine_tuned_by,
        "texts_from": "/".join(Path(options.text).parts[-2:]),
        "held_out_from": "/".join(Path(options.held_out).parts[-2:]) if options.held_out else None,
        **summary,
        "warnings": list(predictor.points.warnings),
    }


def _tfidf(options: argparse.Namespace, predictor: Predictor, test: Rows) -> list[dict[str, Any]]:
    """Return the cell of TF-IDF with logistic regression, where the task is to classify single texts."""
    if not options.train or predictor.task.name != "classification" or predictor.task.input_columns != ("text",):
        return []
    train = [dict(predictor.task.with_known_label(row)) for row in read_rows(options.train)[: options.train_rows]]
    return [tfidf(train, test, (options.train, options.test), command_line(PROGRAM))]


# --- texts -----------------------------------------------------------------------------------------------------------


def study_texts(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return disagreement and compute on the test rows for exits from fewer and fewer texts."""
    text, entries, content = read_sample(options.text, options, folder, "texts"), [], {}
    for count in sorted(options.counts, reverse=True):
        run, predictor = attach(options, text, count, folder / f"run-{count}")
        test = TestRows(predictor, read_test(options, predictor), options.test)
        content = content or header(options, predictor, "disagreement at fixed cost, by the number of texts")
        at_cost = [{"cost": cost, **test.measure(_within(predictor, cost))} for cost in options.costs]
        summary = {name: run.summary[name] for name in ("texts", "held_out", "exits")}
        limits = [test.measure_limit(limit) for limit in (0.01, 0.02, 0.05)]
        entries.insert(0, {"given": count, **summary, "at_cost": at_cost, "at_limit": limits})
        content["rows"], content["by_texts"] = len(test.rows), entries
    return {**content, "costs": "budgets as shares of the full model's MACs; mac_share is what the rows took"}


def _within(predictor: Predictor, cost: float) -> Any:
    """Return the settings of the point with the best agreement within a cost."""
    return predictor.settings(cost)


# --- wrong -----------------------------------------------------------------------------------------------------------


def study_wrong(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return points of exits that learned texts of another domain, then those of the same exits, calibrated again."""
    runs = {}
    for name, path in (("right", options.text), ("wrong", options.wrong)):
        _, predictor = attach(options, read_sample(path, options, folder, name), None, folder / f"run-{name}")
        test = TestRows(predictor, read_test(options, predictor), options.test)
        runs[name] = [test.measure_limit(limit) for limit in options.limits]
    texts = read_rows(str(folder / "right.jsonl"))[: options.repair]
    recorded = record_unlabelled(predictor.network, predictor.model.method, Data(texts, predictor.prepare(texts)))
    halves = [split_rows(*recorded, rows) for rows in split_in_halves(len(texts), seed=options.seed)]
    points, _ = find_disagreement_points(halves[0], halves[1], options.limits)
    repaired = [
        {
            "limit": point.limit,
            "promised": {"found": point.found, "upper": point.upper, "proven": point.proven},
            **test.measure(predictor.settings(given=point.settings)),
        }
        for point in points
    ]
    return {
        **header(options, predictor, "attach with texts of another domain: what the promise is worth, and its repair"),
        "rows": len(test.rows),
        "texts": options.rows,
        "wrong_texts_from": "/".join(Path(options.wrong).parts[-2:]),
        "attached_with_right_texts": runs["right"],
        "attached_with_wrong_texts": runs["wrong"],
        "wrong_exits_calibrated_on_right_texts": {"texts": len(texts), "points": repaired},
    }


# --- risk ------------------------------------------------------------------------------------------------------------


def study_risk(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return how often a proven risk is broken: the rows that a proof did not draw show the true risk."""
    predictor = offramp.load(options.run, engine="torch")
    rows = read_test(options, predictor)
    proving = options.proof_rows
    check_provable(options.risk, options.confidence, proving)
    recorded = record_unlabelled(predictor.network, predictor.model.method, Data(rows, predictor.prepare(rows)))
    rng, method = np.random.default_rng(options.seed), predictor.model.method
    trials: list[dict[str, float]] = []
    for _ in range(FINDINGS):
        order = rng.permutation(len(rows))
        finding = split_rows(*recorded, order[: options.find_rows])
        others = split_rows(*recorded, order[options.find_rows :])
        candidates = order_by_disagreement(method, disagreement_evaluator(*finding), risk_candidates(*finding))
        evaluate = disagreement_evaluator(*others)
        measured = [evaluate(settings) for settings in candidates]
        losses = np.stack([np.zeros(len(measured[0][0])), *(values for values, _ in measured)])
        shares = [1.0, *(share for _, share in measured)]
        binary = predictor.task.disagreement_is_binary
        for _ in range(options.resamplings // FINDINGS):
            trials.append(_prove_once(losses, shares, proving, options, rng, binary))
    broken = sum(trial["true"] > options.risk for trial in trials)
    within = [trial["true"] for trial in trials]
    return {
        **header(
            options, predictor, "a proven risk over random proofs; the rows that were not drawn show the true risk"
        ),
        "rows": len(rows),
        "finding_rows": options.find_rows,
        "proof_rows": proving,
        "rows_that_show_the_risk": len(rows) - options.find_rows - proving,
        "risk": options.risk,
        "confidence": options.confidence,
        "resamplings": len(trials),
        "violations": broken,
        "violation_share": broken / len(trials),
        "p_value_that_violations_are_at_most_allowed": float(
            binomtest(broken, len(trials), 1 - options.confidence, alternative="greater").pvalue
        ),
        "violations_beyond_noise": sum(trial["beyond_noise"] for trial in trials),
        "true_risk": {name: round(float(value), 6) for name, value in _quantiles(within).items()},
        "mac_share": {n: round(float(v), 6) for n, v in _quantiles([t["share"] for t in trials]).items()},
        "cheaper_than_full": int(sum(trial["share"] < 1.0 for trial in trials)),
    }


def _prove_once(
    losses: Any, shares: Sequence[float], proving: int, options: argparse.Namespace, rng: Any, binary: bool
) -> dict[str, float]:
    """Prove on drawn rows; return the disagreement of the proven setting on all other rows, and its cost."""
    drawn = np.zeros(losses.shape[1], dtype=bool)
    drawn[rng.choice(losses.shape[1], proving, replace=False)] = True
    last = 0
    for number in range(1, len(losses)):
        if p_value(losses[number, drawn], options.risk, binary) > 1 - options.confidence:
            break
        last = number
    others = losses[last, ~drawn]
    beyond = binary and binomtest(round(others.sum()), len(others), options.risk, alternative="greater").pvalue < 0.05
    return {"true": float(others.mean()), "share": shares[last], "beyond_noise": float(beyond)}


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    return {"mean": float(np.mean(values)), "p05": low, "p50": middle, "p95": high}


# --- seconds ---------------------------------------------------------------------------------------------------------


def study_seconds(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the seconds of attaching and of one pass of the full model over the same texts, in turns."""
    text, rounds = read_sample(options.text, options, folder, "texts"), []
    for number in range(options.rounds):
        started = time.perf_counter()
        run, predictor = attach(options, text, None, folder / f"run-{number}")
        attached = time.perf_counter() - started
        encoded = predictor.prepare(read_rows(text))
        rounds.append({"attach": attached, **{f"of_{k}": v for k, v in run.summary["seconds"].items()}})
        for precision in ("fp32", "bf16") if best_precision() == "bf16" else ("fp32",):
            rounds[-1][f"pass_{precision}"] = _seconds_of_pass(predictor, encoded, precision)
    middle = {name: round(float(np.median([one[name] for one in rounds])), 4) for name in rounds[0]}
    passes = {name: middle["attach"] / value for name, value in middle.items() if name.startswith("pass")}
    return {
        **header(options, predictor, "seconds of attaching beside one pass of the full model over the same texts"),
        "texts": len(encoded),
        "tokens": sum(len(one.ids) for one in encoded),
        "rounds": options.rounds,
        "seconds": middle,
        "attach_over_pass": {name.removeprefix("pass_"): round(ratio, 3) for name, ratio in passes.items()},
        "training_precision": best_precision(),
    }


def _seconds_of_pass(predictor: Predictor, encoded: Any, precision: str) -> float:
    """Return the seconds of one pass at full depth on the torch engine, batches of 32 rows sorted by length."""
    engine, network = engines.make("torch", predictor.network.encoder), predictor.network
    ordered = sorted(encoded, key=lambda one: len(one.ids))
    started = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        run_encoded(network, engine, Policy(), ordered, 32)
    return time.perf_counter() - started


STUDIES = {
    "cells": study_cells,
    "texts": study_texts,
    "wrong": study_wrong,
    "risk": study_risk,
    "seconds": study_seconds,
}


def numbers(kind: type) -> Any:
    """Return a reader of numbers that are separated by commas."""
    return lambda text: [kind(one) for one in text.split(",")]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("--model", help="a plain fine-tuned model")
    parser.add_argument("--fine-tuned-by", help="the command that fine-tuned it, for the result file")
    parser.add_argument("--text", help="unlabelled texts (labels in the file are not read)")
    parser.add_argument("--text-skip", type=int, default=0, help="leave out the first rows of --text")
    parser.add_argument("--text-end", type=int, help="leave out the rows of --text from this one on")
    parser.add_argument("--rows", type=int, help="use only so many texts, drawn at random")
    parser.add_argument("--held-out", help="texts for the operating points, instead of a fifth of --text")
    parser.add_argument("--test", help="rows to report on; `cells` needs their labels")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first rows of --test")
    parser.add_argument("--test-rows", type=int, help="use only so many rows of --test")
    parser.add_argument("--train", help="cells: labelled rows for TF-IDF with logistic regression")
    parser.add_argument("--train-rows", type=int)
    parser.add_argument("--run", help="the run folder: cells writes it (and keeps one that is there), risk reads it")
    parser.add_argument("--counts", type=numbers(int), default=[100, 300, 1000], help="texts: how many")
    parser.add_argument("--costs", type=numbers(float), default=[0.2, 0.35, 0.5], help="texts: shares of the MACs")
    parser.add_argument("--wrong", help="wrong: texts of another domain")
    parser.add_argument("--repair", type=int, default=1000, help="wrong: right texts to calibrate on")
    parser.add_argument("--limits", type=numbers(float), default=[0.01, 0.02, 0.05], help="wrong: of disagreement")
    parser.add_argument("--resamplings", type=int, default=200, help="risk: proofs")
    parser.add_argument("--find-rows", type=int, default=500, help="risk: rows that thresholds are found on")
    parser.add_argument("--proof-rows", type=int, default=1500, help="risk: rows of a proof")
    parser.add_argument("--risk", type=float, default=0.01)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=1, help="seconds: repetitions")
    parser.add_argument("--exits", default="auto")
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--pair", help="text_a,text_b")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the numbers here; standard output if left out")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one study and write its numbers."""
    options = parse(arguments)
    options.test = options.test or options.text
    try:
        with tempfile.TemporaryDirectory() as folder:
            content = STUDIES[options.study](options, Path(folder))
    except OfframpError as error:
        raise SystemExit(str(error)) from error
    if options.json:
        write_json(Path(options.json), content)
    else:
        print(json.dumps(content, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
