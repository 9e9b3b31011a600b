"""Adaptive runs of the C++ engine beside static runtimes: rows a second, from ids and from text.

    python benchmarks/native_adaptive.py points  RUN --calibrate heldout.jsonl --data test.jsonl --work work/trec
    python benchmarks/native_adaptive.py measure RUN --data test.jsonl --work work/trec --threads 2 --out results/….json

`points` calibrates on rows that were not trained on, once for each precision of the engine, chooses two points for a
loss of one point (the cheapest whose bound proves it, and the cheapest whose estimate fits), and scores both, and every
static runtime, on all report rows. `measure` times them on some of the report rows, on an idle machine: contenders take
turns on the same batches. "Fastest static" is the fastest runtime of any precision that loses at most one point on all
report rows.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offramp import __version__, engines, methods
from offramp.calibration.calibrate import CalibrationEngine, find_operating_points
from offramp.data.readers import fingerprint, read_rows
from offramp.evaluation import peers
from offramp.evaluation.bench import MOST_LOST, BenchPlan, SilentWatcher, bench_entries, measure_group, package_versions
from offramp.evaluation.bench_data import BenchData, prepare_bench_data
from offramp.evaluation.contenders import FULL, Contender, Contenders, open_contender
from offramp.evaluation.peers import BenchModel
from offramp.evaluation.result_cells import data_and_split, model_name
from offramp.evaluation.timing import time_in_turns
from offramp.inference.batching import run_encoded
from offramp.inference.operating_points import OperatingPoint, OperatingPoints
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import remembered_columns
from offramp.nn.batches import Data
from offramp.utils.files import read_json, write_json
from offramp.utils.hardware import hardware

ENGINE = "native"
PRECISIONS: tuple[engines.Precision, ...] = ("fp32", "int8")
AGAINST = ("onnxruntime", "openvino", "ctranslate2")
GROUPS = ((1, "given"), (32, "given"), (32, "sorted"))
SAMPLES = 300  # rows on which OpenVINO's quantiser measures the ranges of activations


def chosen_points(points: OperatingPoints) -> dict[str, OperatingPoint]:
    """Return the cheapest point that is proven to lose at most one point, and the cheapest whose estimate says so."""
    proven = (p for p in points.points if p.loss_upper is not None and p.loss_upper <= MOST_LOST)
    estimated = (p for p in points.points if points.loss_of(p) <= MOST_LOST)
    return {"proven": next(proven, points.full_point), "estimated": next(estimated, points.full_point)}


def peer_contenders(precisions: Sequence[str] = ("fp32", "bf16", "int8")) -> list[Contender]:
    """Return the static runtimes."""
    return [Contender(*v, name) for name in AGAINST for v in peers.get(name).variants if v.precision in precisions]


def bench_model(options: argparse.Namespace, samples: Sequence[Any] = ()) -> BenchModel:
    """Return what every contender opens; converted models are kept in the work folder."""
    predictor = Predictor.load(options.run, "torch")
    folder = Path(options.work) / "converted"
    folder.mkdir(parents=True, exist_ok=True)
    return BenchModel(options.run, predictor.task.auto_class, str(folder), options.threads, tuple(samples))


def find_points(options: argparse.Namespace) -> None:
    """Calibrate each precision on held-out rows, and score points and runtimes on all report rows."""
    torch.set_num_threads(options.threads)
    names = remembered_columns(options.run)
    heldout = read_rows(options.calibrate, remembered=names)
    report = read_rows(options.data, remembered=names, limit=options.report_rows)
    exact = Predictor.load(options.run, "torch")
    samples = exact.prepare(heldout[:SAMPLES], options.calibrate)
    model, data = bench_model(options, samples), prepare_bench_data(exact, report, options.data)
    found: dict[str, Any] = {
        "run": model_name(exact.model.base_model),
        "method": exact.model.method.name,
        "metric": exact.task.metric,
        "calibration": {"data": "/".join(data_and_split(options.calibrate)), "rows": len(heldout)},
        "report": {"data": "/".join(data_and_split(options.data)), "rows": len(report)},
        "points": {},
        "static": {},
    }
    for precision in PRECISIONS:
        predictor = Predictor.load(options.run, ENGINE, precision, options.threads)
        place = CalibrationEngine(ENGINE, precision, predictor.engine)
        rows = Data(heldout, predictor.prepare(heldout, options.calibrate))
        points = find_operating_points(
            predictor.network, predictor.model.method, rows, "calibration", fingerprint(options.calibrate, heldout),
            engine=place,
        )  # fmt: skip
        full = score(predictor, data, asdict(predictor.model.method.settings()))
        found["points"][precision] = {"full": {"score": full["score"]}}
        for kind, point in chosen_points(points).items():
            entry = {"settings": point.settings, "mac_share": point.mac_share, "loss": points.loss_of(point)}
            bound = {"loss_upper": point.loss_upper, "on_report_rows": score(predictor, data, point.settings)}
            found["points"][precision][kind] = {**entry, **bound}
            print(precision, kind, {**entry, **bound}, flush=True)
    for contender in peer_contenders():
        try:
            run = open_contender(model, contender)
            outputs = [logits for row in data.data.encoded for logits in run([row]).logits]
        except Exception as error:  # a runtime that does not serve the model
            print(f"{contender} is missing: {error}", file=sys.stderr)
            continue
        predictions = data.predictions(outputs)
        found["static"][str(contender)] = data.score(outputs, predictions)[exact.task.metric]
        print(contender, found["static"][str(contender)], flush=True)
    write_json(Path(options.work) / "points.json", found)


def score(predictor: Predictor, data: BenchData, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the score and the share of MACs of a setting on all report rows."""
    method = predictor.model.method
    policy = method.policy(predictor.network, methods.configure(method.settings, dict(settings), method.name))
    output = run_encoded(predictor.network, predictor.engine, policy, data.data.encoded)
    found = data.score(output.logits, data.predictions(output.logits))
    return {
        "score": found[predictor.task.metric],
        "mac_share": round(float(output.macs.sum()) / data.full_macs, 6),
        "exits": np.bincount(output.exit_layer.astype(int), minlength=predictor.network.depth + 1).tolist(),
    }


def measure(options: argparse.Namespace) -> None:
    """Time all contenders on some of the report rows."""
    torch.set_num_threads(options.threads)
    known = read_json(Path(options.work) / "points.json")
    rows = read_rows(options.data, remembered=remembered_columns(options.run), limit=options.rows)
    exact = Predictor.load(options.run, "torch")
    data, method = prepare_bench_data(exact, rows, options.data), exact.model.method
    labels: list[tuple[str, Any]] = [(FULL, method.settings())]
    for precision, kind in ((p, k) for p in PRECISIONS for k in ("proven", "estimated")):
        settings = methods.configure(method.settings, known["points"][precision][kind]["settings"], method.name)
        labels.append((f"{kind} {precision}", settings))
    contenders = Contenders(bench_model(options), labels)
    wanted = [Contender(ENGINE, p, None, s) for p in PRECISIONS for name, s in labels if name == FULL or p in name]
    for contender in [*dict.fromkeys(wanted), *peer_contenders()]:
        contenders.open(contender)
    plan = BenchPlan(threads=options.threads, rounds=options.rounds, memory=False)
    allowed = known["points"]["fp32"]["full"]["score"] - MOST_LOST * exact.task.scale - 1e-9
    entries: list[dict[str, Any]] = []
    for group in GROUPS:
        tokenising = tokenising_seconds(exact, rows, data, group, options.rounds)
        found = measure_group(contenders, data, group, plan, SilentWatcher())
        own = bench_entries(found, labels, len(rows), group, exact.task)
        own = [e for e in own if e["peer"] or e["budget"] == 1.0 or e["budget"].endswith(e["precision"])]
        for entry in own:
            seconds = len(rows) / entry["rows_per_second"]
            entry["rows_per_second_from_text"] = round(len(rows) / (seconds + tokenising), 3)
        usable = [e for e in own if e["peer"] and known["static"][f"{e['engine']} {e['precision']}"] >= allowed]
        fastest = max(usable, key=lambda e: float(e["rows_per_second"]))
        for entry in own:
            entry["fastest_static"] = f"{fastest['engine']} {fastest['precision']}"
            for name in ("", "_from_text"):
                ratio = entry[f"rows_per_second{name}"] / fastest[f"rows_per_second{name}"]
                entry[f"over_fastest_static{name}"] = round(ratio, 3)
        entries += own
        show(group, own, 1e6 * tokenising / len(rows))
        for entry in own:
            entry["tokenise_us_per_row"] = round(1e6 * tokenising / len(rows), 2)
    lengths = [len(row.ids) for row in data.data.encoded]
    content = {
        "what": f"Adaptive runs of the C++ engine beside static runtimes on {known['report']['data']}, "
        f"{options.threads} thread{'s' * (options.threads > 1)}",
        "hardware": hardware(),
        "threads": options.threads,
        "timed_rows": len(rows),
        "rounds": options.rounds,
        "seed": None,
        "tokens": {"mean": round(float(np.mean(lengths)), 2), "p95": float(np.percentile(lengths, 95))},
        **known,
        "rows": entries,
        "failed": [asdict(one) for one in contenders.failed],
        "command": f"python benchmarks/native_adaptive.py measure RUN --data {known['report']['data']} --work WORK "
        f"--threads {options.threads} --rows {options.rows} --rounds {options.rounds}",
        "version": __version__,
        "versions": {**package_versions(), **engines.versions(ENGINE)},
        "date": datetime.date.today().isoformat(),
    }
    if options.out:
        write_json(Path(options.out), content)


def tokenising_seconds(
    model: Predictor, rows: Sequence[Mapping[str, Any]], data: BenchData, group: tuple[int, str], rounds: int
) -> float:
    """Return the seconds that tokenising the rows takes in these batches: the sum of medians."""
    calls = [[rows[i] for i in call] for call in data.calls(*group)]
    taken = time_in_turns(lambda _, call: model.prepare(call), ["tokenise"], calls, rounds + 1)
    return float(np.median(taken["tokenise"], axis=1).sum())


def show(group: tuple[int, str], entries: Sequence[Mapping[str, Any]], tokenising: float) -> None:
    """Print one batch size and order."""
    print(f"batch {group[0]} {group[1]}; tokenising {tokenising:.1f} us a row")
    for e in sorted(entries, key=lambda one: float(one["rows_per_second"])):
        name = f"{e['engine']} {e['precision']} {e['budget'] or ''}"
        ratios = f"{e['over_fastest_static']:7.2f} {e['over_fastest_static_from_text']:7.2f}"
        share = f"{e['mac_share']:.3f} {e['realised_over_promised'] or 0:.2f}"
        print(f"  {name:36} {e['rows_per_second']:9.1f} {ratios} {share} {e['metrics']}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse options and run one of the two parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("points", "measure"))
    parser.add_argument("run", help="run folder")
    parser.add_argument("--calibrate", help="points: rows that were not trained on")
    parser.add_argument("--data", required=True, help="report rows, other ones")
    parser.add_argument("--work", required=True, help="folder for points and converted models")
    parser.add_argument("--report-rows", type=int, help="points: score the first rows only")
    parser.add_argument("--rows", type=int, default=320, help="measure: time the first rows only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="measure: JSON file")
    options = parser.parse_args(arguments)
    (find_points if options.part == "points" else measure)(options)


if __name__ == "__main__":
    main()
