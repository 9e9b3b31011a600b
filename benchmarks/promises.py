"""How often `max_loss` is broken on rows that calibration did not use, and what keeping it costs.

    python benchmarks/promises.py --data DATA --work WORK --json results/house/promises.json --figure docs/promises.svg

Six data sets (`DATA/<set>/<split>.jsonl.gz`), every method whose settings replay. The rows of each set are shuffled
once: some train, the rest are held out and recorded in float32 at every exit. Trainings are short on purpose (MiniLM,
some hundred rows, bfloat16): the study is about choosing a setting, not about the best model. `deebert`, `fastbert`
and `attached` train exit heads on one fine-tuned model and are recorded in one pass; `pabee`, started from that model,
trains exactly as `branchynet` does and reads the same recording.

Each trial draws some of the held-out rows, calibrates on them as `offramp calibrate` does, chooses a point for each
loss by its confidence bound and, for comparison, by its estimate, and measures both on the other rows, paired with the
full model. A bound with confidence 0.9 may be broken in one trial of ten. A rule that always answers with the full
model is never broken: the share of MACs stands beside the violations. The search for a threshold per exit is shorter
than that of `offramp calibrate` (`search` in the result), because every trial repeats it on six sets of rows: points
may be costlier, bounds are neither tighter nor looser. What is in WORK already is not computed again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from torch import Tensor

import offramp
from offramp import __version__
from offramp import methods as known_methods
from offramp.calibration.calibrate import CalibrationContext, explore_settings, point_evaluator
from offramp.calibration.loss_bounds import CONFIDENCE, loss_bounds, stored_points
from offramp.calibration.replay import NEVER, ExitRecording, record_exits, with_outcomes
from offramp.core.loop import State
from offramp.core.policy import Policy
from offramp.data.readers import read_rows
from offramp.inference.operating_points import OperatingPoints, pareto_front
from offramp.inference.run_folder import LoadedRun, load_run
from offramp.nn.batches import Data, pack_rows
from offramp.nn.keys import EXIT_UNIT
from offramp.nn.network import Network
from offramp.utils.files import atomic_replace, read_json, write_json
from offramp.utils.hardware import hardware

PROGRAM = "python benchmarks/promises.py"
MODEL, SEED = "minilm", 7
DEV = 150  # rows that end a training; below 200 no threshold is searched on them
FULL = "full"
SHARED = ("deebert", "fastbert", "attached")  # exit heads on the frozen model of the full run
JOINT = ("branchynet", "shallow_deep", "berxit", "alberta")  # train the backbone too, from the full run
SAME_TRAINING = {"pabee": "branchynet"}  # trained alike: the other rule reads the same recording
METHODS = (*SHARED, *JOINT, *SAME_TRAINING)
LOSSES = (0.005, 0.01, 0.02)
RULES = ("bound", "estimate")
GENERATIONS, CHILDREN = 4, 150  # of the search for a threshold per exit
BLOCK = 20  # trials between two writes
ALLOWED = 1 - CONFIDENCE
COLUMNS = ("proven", "lost", "error", "mac_share")  # of a trial, for each loss and rule
COLOURS = {"bound": "#2166ac", "estimate": "#e08214"}


@dataclass(frozen=True)
class StudySet:
    """A data set of the study: its files, how many rows train and are held out, and the longest row in tokens."""

    files: tuple[str, ...]
    train: int
    held_out: int
    drawn: int  # rows of one calibration
    max_length: int = 64


SETS = {
    "trec": StudySet(("train", "test"), 400, 5000, 2000),
    "sst2": StudySet(("train",), 800, 5000, 2000),
    "mr": StudySet(("all",), 800, 5000, 2000, 48),
    "agnews": StudySet(("train",), 600, 4500, 2000, 40),
    "dbpedia": StudySet(("train_extra",), 600, 4500, 2000, 32),
    "imdb": StudySet(("train",), 800, 4000, 2000, 64),
}


def split_rows(data: Path, folder: Path, chosen: StudySet) -> None:
    """Write the rows that train, those that end a training, and the held-out ones."""
    if (folder / "held_out.jsonl").is_file():
        return
    rows = [row for name in chosen.files for row in read_rows(str(data / folder.name / f"{name}.jsonl.gz"))]
    random.Random(SEED).shuffle(rows)
    kept = {column for column in ("text", "text_a", "text_b", "label") if column in rows[0]}
    ends = (chosen.train, chosen.train + DEV, chosen.train + DEV + chosen.held_out)
    parts = {"train": rows[: ends[0]], "dev": rows[ends[0] : ends[1]], "held_out": rows[ends[1] : ends[2]]}
    with atomic_replace(folder) as fresh:
        fresh.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            lines = (json.dumps({column: row[column] for column in kept}) + "\n" for row in part)
            (fresh / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def train_runs(folder: Path, chosen: StudySet, methods: Sequence[str]) -> None:
    """Train the full model and, from it, the run of every method that is not there yet."""
    common: dict[str, Any] = {"max_length": chosen.max_length, "seed": SEED}
    train, dev = folder / "train.jsonl", folder / "dev.jsonl"
    for method in (FULL, *methods):
        out, began = folder / method, time.perf_counter()
        if out.is_dir() or method in SAME_TRAINING:
            continue
        if method == "attached":
            offramp.attach(folder / FULL, train, out, exits=range(6), **common)
        else:
            source: dict[str, Any] = {"model": MODEL} if method == FULL else {"init": folder / FULL}
            epochs = 2 if method == FULL else 1
            offramp.train(
                **source,
                train=train,
                dev=dev,
                out=out,
                method=method,
                epochs=epochs,
                precision="bf16",
                lr=1e-4,
                batch_size=16,
                **common,
            )
        sys.stdout.write(f"{folder.name} {method}: trained in {time.perf_counter() - began:.0f} s\n")
        sys.stdout.flush()


@dataclass
class _OtherExits(Policy):
    """Lets no row leave and keeps what the exits of other networks with the same encoder give."""

    networks: dict[str, Network]
    found: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        for name, network in self.networks.items():
            if layer in network.exit_heads:
                parts = self.found.setdefault(name, {})
                parts.setdefault(f"logits.{layer}", []).append(network(layer, s.packed).float())
                if EXIT_UNIT in network.added:
                    parts.setdefault(f"exit_unit.{layer}", []).append(network.exit_unit(layer, s.packed).float())
        return None


def held_out_data(run: LoadedRun, rows: Sequence[dict[str, Any]]) -> Data:
    """Return the held-out rows in the order of their lengths, which is the order of recordings."""
    encoded = run.network.task.encode(run.tokenizer, rows, run.max_length)
    order = sorted(range(len(rows)), key=lambda number: len(encoded[number].ids))
    ordered = [replace(encoded[number], example=place) for place, number in enumerate(order)]
    return Data([rows[number] for number in order], ordered)


def recording_file(folder: Path, method: str) -> Path:
    """Return where the recorded exits of a method lie."""
    return folder / "recordings" / f"{SAME_TRAINING.get(method, method)}.safetensors"


def record_runs(folder: Path, methods: Sequence[str]) -> None:
    """Record the exits of every run whose recording is not there yet."""
    missing = [name for name in methods if name not in SAME_TRAINING and not recording_file(folder, name).is_file()]
    together = [name for name in missing if name in SHARED]
    for names in [together, *([name] for name in missing if name not in SHARED)]:
        if names:
            began = time.perf_counter()
            _record_together(folder, names)
            sys.stdout.write(f"{folder.name} {' '.join(names)}: recorded in {time.perf_counter() - began:.0f} s\n")
            sys.stdout.flush()


def _record_together(folder: Path, names: Sequence[str]) -> None:
    first, *others = [load_run(folder / name) for name in names]
    for run in (first, *others):
        run.network.eval()
    data = held_out_data(first, read_rows(str(folder / "held_out.jsonl")))
    listener = _OtherExits({name: run.network for name, run in zip(names[1:], others, strict=True)})
    own = first.method.policy(first.network, first.method.settings())
    recording = record_exits(first.network, data, policy=listener if others else own)
    stored = {f"logits.{layer}": values for layer, values in recording.logits.items()}
    stored |= {f"exit_unit.{layer}": values for layer, values in recording.exit_unit.items()}
    last = f"logits.{first.network.depth}"
    for name, tensors in [
        (names[0], stored),
        *((n, _joined(p) | {last: stored[last]}) for n, p in listener.found.items()),
    ]:
        with atomic_replace(recording_file(folder, name)) as fresh:
            save_file({key: value.contiguous() for key, value in tensors.items()}, fresh)


def _joined(parts: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat(values) for key, values in parts.items()}


def read_recording(folder: Path, method: str, network: Network, data: Data) -> ExitRecording:
    """Return the recorded exits of a method."""
    stored = load_file(recording_file(folder, method))
    parts: dict[str, dict[int, Tensor]] = {"logits": {}, "exit_unit": {}}
    for key, values in stored.items():
        kind, _, layer = key.partition(".")
        parts[kind][int(layer)] = values
    packed = pack_rows(network.task, data.encoded)
    packed = packed.with_tokens(dropped_at=torch.full((packed.total,), NEVER))
    return ExitRecording(parts["logits"], parts["exit_unit"], packed)


def open_run(folder: Path, name: str) -> tuple[CalibrationContext, ExitRecording]:
    """Return the calibration context of a run on all held-out rows, and its recording with the outcomes of exits."""
    run = load_run(folder / SAME_TRAINING.get(name, name))
    run.network.eval()
    data = held_out_data(run, read_rows(str(folder / "held_out.jsonl")))
    recording = read_recording(folder, name, run.network, data)
    context = CalibrationContext(run.network, known_methods.get(name), data, generations=GENERATIONS, children=CHILDREN)
    return context, with_outcomes(run.network, recording, data)


def run_trial(context: CalibrationContext, recording: ExitRecording, drawn: int, trial: int) -> list[list[float]]:
    """Calibrate on drawn rows, measure the chosen points on the others: COLUMNS for each loss and rule."""
    task, count = context.network.task, len(context.data.rows)
    chosen = np.zeros(count, dtype=bool)
    chosen[np.random.default_rng(trial).permutation(count)[:drawn]] = True
    *tried, full = explore_settings(*context.select_rows(chosen, recording))
    points = OperatingPoints(
        task.metric,
        task.higher_is_better,
        {"name": "drawn", "rows": drawn, "fingerprint": ""},
        stored_points(pareto_front(tried, full, task.higher_is_better)),
        bounds=loss_bounds(tried, context.loss_confidence),
    )
    evaluate = point_evaluator(*context.select_rows(~chosen, recording))
    found = []
    for loss in LOSSES:
        for known in (points, replace(points, bounds=None)):
            point, unproven = known.within_loss(loss)
            measured = evaluate(point.settings)
            lost = measured.row_losses
            assert lost is not None
            error = float(lost.std() / len(lost) ** 0.5)
            found.append(
                [float(known.bounds is not None and not unproven), float(lost.mean()), error, measured.mac_share]
            )
    return found


def run_trials(folder: Path, name: str, drawn: int, trials: int) -> None:
    """Run the trials of a run that are not in its file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    target = trials_file(folder, name)
    study = {"drawn": drawn, "search": [GENERATIONS, CHILDREN]}
    stored: dict[str, Any] = read_json(target) if target.is_file() else {}
    if any(stored.get(key) != value for key, value in study.items()):
        stored = {**study, "trials": []}
    if len(stored["trials"]) >= trials:
        return
    context, recording = open_run(folder, name)
    assert recording.outcomes is not None
    stored |= {"rows": len(context.data.rows), "full": float(recording.outcomes.row_score[-1].mean())}
    while len(stored["trials"]) < trials:
        first = len(stored["trials"])
        block = range(first, min(trials, first + BLOCK))
        stored["trials"] += [run_trial(context, recording, drawn, trial) for trial in block]
        write_json(target, stored)
    sys.stdout.write(f"{folder.name} {name}: {trials} trials\n")
    sys.stdout.flush()


def trials_file(folder: Path, name: str) -> Path:
    """Return where the trials of a run lie."""
    return folder / "trials" / f"{name}.json"


def summarise(trials: Sequence[Any]) -> list[dict[str, Any]]:
    """Return, for each loss and rule, how often it was broken and the share of MACs."""
    values = np.array(trials)  # [trials, losses × rules, columns]
    pairs = [(loss, rule) for loss in LOSSES for rule in RULES]
    lines = []
    for place, (loss, rule) in enumerate(pairs):
        proven, lost, error, share = values[:, place].T
        lines.append(
            {
                "max_loss": loss,
                "rule": rule,
                "trials": len(values),
                "broken": float((lost > loss + 1e-9).mean()),
                "clearly_broken": float((lost > loss + 1.2816 * error + 1e-9).mean()),
                "proven": float(proven.mean()),
                "mean_lost": float(lost.mean()),
                "mac_share": float(share.mean()),
                "full_depth": float((share > 0.999).mean()),
            }
        )
    return lines


def collect(work: Path, sets: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """Return the summaries of all runs that have trials, and totals over them."""
    runs: dict[str, dict[str, Any]] = {}
    everything = []
    for data in sets:
        for name in names:
            target = trials_file(work / data, name)
            if target.is_file():
                stored = read_json(target)
                everything += stored["trials"]
                runs.setdefault(data, {})[name] = {
                    "full_accuracy": stored["full"],
                    "rows": stored["rows"],
                    "drawn": stored["drawn"],
                    "summary": summarise(stored["trials"]),
                }
    return {"runs": runs, "total": summarise(everything)}


def draw(study: dict[str, Any], target: Path) -> None:
    """Write the figure: violations above, the share of MACs below, one group of bars a set, for each loss."""
    sets = list(study["runs"])
    with matplotlib.rc_context({"svg.hashsalt": "offramp", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        axes = figure.subplots(2, len(LOSSES), sharex=True, sharey="row")
        for column, loss in enumerate(LOSSES):
            for rule, shift in zip(RULES, (-0.18, 0.18), strict=True):
                for place, data in enumerate(sets):
                    lines = [_line(run, loss, rule) for run in study["runs"][data].values()]
                    for axis, key in zip(axes[:, column], ("broken", "mac_share"), strict=True):
                        values = [line[key] for line in lines]
                        spread = np.linspace(-0.1, 0.1, len(values)) + place + shift
                        axis.plot(spread, values, "o", color=COLOURS[rule], markersize=3, alpha=0.75)
                        axis.hlines(np.mean(values), place + shift - 0.15, place + shift + 0.15, COLOURS[rule], lw=2)
            axes[0, column].axhline(ALLOWED, color="black", lw=0.8, ls="--", label="one trial in ten")
            axes[0, column].set_title(f"max_loss = {loss:g}")
            axes[1, column].set_xticks(range(len(sets)), sets, rotation=30)
            axes[1, column].set_ylim(0, 1.02)
        axes[0, 0].set_ylim(bottom=0)  # once all is drawn, because it fixes the top too
        axes[0, 0].set_ylabel("share of trials that lost more")
        axes[1, 0].set_ylabel("share of the full MACs")
        for rule in RULES:
            label = f"chosen by the {rule}: each method, and their mean"
            axes[0, 0].plot([], [], "o-", color=COLOURS[rule], label=label)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        FigureCanvasSVG(figure).print_figure(target, metadata={"Date": None, "Creator": None})
    sys.stdout.write(f"written: {target}\n")


def _line(run: dict[str, Any], loss: float, rule: str) -> dict[str, Any]:
    return next(one for one in run["summary"] if (one["max_loss"], one["rule"]) == (loss, rule))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trials that WORK lacks, write the summary of all and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with <set>/<split>.jsonl.gz; not needed if WORK is complete")
    parser.add_argument("--work", type=Path, required=True, help="where rows, runs, recordings and trials are kept")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--trials", type=int, default=200, help="trials of each run; 0: only collect")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path, help="where the summary is written")
    parser.add_argument("--figure", type=Path, help="where the figure is written")
    options = parser.parse_args(arguments)
    sets, names = options.sets.split(","), options.methods.split(",")
    for data in sets if options.data else ():
        split_rows(options.data, options.work / data, SETS[data])
        train_runs(options.work / data, SETS[data], names)
        record_runs(options.work / data, names)
    jobs = [(options.work / data, name, SETS[data].drawn, options.trials) for data in sets for name in names]
    if options.workers > 1:
        with ProcessPoolExecutor(options.workers) as pool:
            list(pool.map(run_trials, *zip(*jobs, strict=True)))
    else:
        for job in jobs:
            run_trials(*job)
    study = {
        "what": "How often max_loss was broken on rows that calibration did not use, over resamplings, and the MACs.",
        "confidence": CONFIDENCE,
        "sets": {data: asdict(SETS[data]) for data in sets},
        "seed": SEED,
        "model": MODEL,
        "search": {"generations": GENERATIONS, "children": CHILDREN},
        **collect(options.work, sets, names),
        "version": __version__,
        "hardware": hardware(),
        "date": datetime.date.today().isoformat(),
        "command": f"{PROGRAM} --data DATA --work WORK --sets {options.sets} --methods {options.methods}",
    }
    if options.json:
        write_json(options.json, study)
    if options.figure:
        draw(study, options.figure)
    for line in study["total"]:
        spent = f"{line['mac_share']:.3f} of the MACs"
        sys.stdout.write(
            f"max_loss {line['max_loss']:g} by {line['rule']}: broken in {100 * line['broken']:.1f} % of "
            f"{line['trials']} trials, mean loss {100 * line['mean_lost']:.2f} points, {spent}, "
            f"full depth in {100 * line['full_depth']:.1f} %\n"
        )
    for data, runs in study["runs"].items():
        for name, run in runs.items():
            shown = (_line(run, loss, rule) for loss in LOSSES for rule in RULES)
            cells = " ".join(f"{100 * one['broken']:5.1f} % {one['mac_share']:.2f}" for one in shown)
            sys.stdout.write(f"{data:8} {name:13} {cells}\n")


if __name__ == "__main__":
    main()
