"""`offramp demo`: the main job on an embedded default, and what each budget buys on sentences it never saw.

    runs/demo-data/   the sentences as train.jsonl, dev.jsonl, test.jsonl, for every command to be tried on
    runs/demo/        the run folder, and in it demo.json (all that was measured) and curve.png

Interrupted? The same command goes on: with training from its last checkpoint, or with measuring if that was done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from offramp import methods
from offramp.budget.calibrate import record, replay
from offramp.errors import OfframpError
from offramp.model import folder as folders
from offramp.model.files import read_json, write_json, write_text
from offramp.model.points import Points
from offramp.model.predictor import Predictor
from offramp.parts.batch import Data
from offramp.study import console
from offramp.study.curve import Curve, Spot, draw
from offramp.study.evaluate import Origin, evaluate, hardware
from offramp.study.moviedata import carried_model, movie_sentences
from offramp.study.timing import Times, interleaved
from offramp.training.job import Job, train
from offramp.training.trainer import Schedule

BUDGETS = (1.0, 0.7, 0.5, 0.35, 0.25, None)  # None: no budget given, within half a point of the full model on dev
BATCH = 32
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Size:
    """How much of everything: decides how long the demo takes."""

    train: int
    dev: int
    test: int
    epochs: int
    timed: int  # sentences timed in batches
    alone: int  # sentences timed one at a time
    rounds: int


FULL = Size(train=6000, dev=1000, test=1000, epochs=3, timed=256, alone=48, rounds=5)
QUICK = Size(train=1500, dev=400, test=400, epochs=1, timed=128, alone=24, rounds=3)


def demo(out: str, quick: bool) -> None:
    """Train (unless that is done), measure, draw, and say what to type next."""
    run, size, started = Path(out), QUICK if quick else FULL, time.monotonic()
    if (run / "demo.json").is_file():
        console.err.print(f"{out} holds a finished demo; this is its table. To train again, remove the folder.")
        show(read_json(run / "demo.json"), out)
        return
    data = run.with_name(run.name + "-data")
    job = Job(
        model=carried_model(),
        train=str(data / "train.jsonl"),
        out=out,
        method="branchynet",
        dev=str(data / "dev.jsonl"),
        limit=size.train,
        options={"pool": "meanmax", "ramp0": True},
        schedule=Schedule(epochs=size.epochs, batch_size=BATCH),
    )
    trained = _trained(run, job)
    test = _write_splits(data, size)
    if not trained:
        console.err.print("fine-tuning MiniLM (6 layers) with off-ramps on rated movie-review sentences")
        with console.TrainingConsole(out, size.epochs) as progress:
            train(job, say=progress.say)
    console.err.print(f"measuring on {len(test)} sentences that were used for nothing yet")
    found = measure(Predictor.load(out), test, size, "offramp demo --quick" if quick else "offramp demo")
    write_json(run / "demo.json", {**found, "seconds": round(time.monotonic() - started, 1)})
    show(found, out)


def _trained(run: Path, job: Job) -> bool:
    """Whether the folder holds this demo's model already; anything else in it is left alone."""
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return False
    if folders.is_run(run):
        recipe = _recipe(run)
        if (recipe["train"], recipe["limit"]) == (job.train, job.limit):
            return True
    raise OfframpError(f"to write the demo to {run}", "something else there", "choose another folder with --out")


def _recipe(run: Path) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    return made


def _write_splits(folder: Path, size: Size) -> Rows:
    """The sentences as files; returns the test rows."""
    splits = movie_sentences()
    parts = {"train": splits.train, "dev": splits.dev[: size.dev], "test": splits.test[: size.test]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return parts["test"]


def measure(predictor: Predictor, test: Rows, size: Size, command: str) -> dict[str, Any]:
    """Accuracy, compute and time of every budget on the test rows; draws the curve on the way."""
    points, run = predictor.points, predictor.model.folder
    assert points is not None and run is not None  # `train` wrote them
    origin = Origin("movie-sentences", "test", command, _recipe(run))
    chosen = {budget: predictor.settings(budget) for budget in BUDGETS}
    distinct = list(dict.fromkeys(chosen.values()))  # two budgets may buy the same point: measured once
    cells = {settings: evaluate(predictor, test, settings, origin, BATCH) for settings in distinct}
    batched = _times(predictor, [test[: size.timed]], distinct, size.rounds)
    alone = _times(predictor, [[row] for row in test[: size.alone]], distinct, size.rounds)
    rows = [
        {
            "budget": budget,
            **_times_of(batched, settings, chosen[1.0], size.timed, ""),
            **_times_of(alone, settings, chosen[1.0], size.alone, "_alone"),
            "cell": cells[settings],
        }
        for budget, settings in chosen.items()
    ]
    curve = _curve(predictor, points, test)
    full, default = (Spot(cell["macs"]["share_of_full"], cell["metrics"]["accuracy"]) for cell in
                     (cells[chosen[1.0]], cells[chosen[None]]))  # fmt: skip
    title = f"MiniLM-L6 with off-ramps on {len(test)} movie-review sentences"
    draw(Curve(title, "accuracy", curve, full, default), run / "curve.png")
    return {
        "command": command,
        "hardware": hardware(),
        "size": asdict(size),
        "rows": rows,
        "curve": [asdict(spot) for spot in curve],
    }


def _times(predictor: Predictor, calls: Sequence[Rows], settings: Sequence[Any], rounds: int) -> Times[Any]:
    """Seconds from text to prediction, call by call."""

    def answer(made: Any) -> None:
        for rows in calls:
            encoded = predictor.prepare(rows)
            predictor.finish(rows, encoded, predictor.run(encoded, made, BATCH))

    return interleaved({made: partial(answer, made) for made in settings}, rounds)


def _times_of(times: Times[Any], settings: Any, full: Any, sentences: int, ending: str) -> dict[str, float]:
    """Milliseconds a sentence and how much faster than the full model that is."""
    ms, faster = 1000 * times.seconds(settings) / sentences, times.speed_up(settings, full)
    return {f"ms_a_sentence{ending}": round(ms, 4), f"speed_up{ending}": round(faster, 3)}


def _curve(predictor: Predictor, points: Points, test: Rows) -> list[Spot]:
    """Every operating point on the test rows: one pass, then replays."""
    network, method, task = predictor.network, predictor.model.method, predictor.task
    data = Data(test, predictor.prepare(test))
    recording, full = record(network, data), predictor.full_macs(data.encoded)
    spots = []
    for point in points.points:
        settings = methods.configure(method.settings, point.settings, method.name)
        outcome = replay(network, recording, method.policy(network, settings))
        scores = task.metrics(test, task.predictions(test, data.encoded, outcome.logits))
        spots.append(Spot(float(outcome.macs.sum()) / full, scores[task.metric]))
    return spots


def show(found: dict[str, Any], out: str) -> None:
    """The table, and which commands to type next."""
    cell, size = found["rows"][0]["cell"], found["size"]
    table = Table(
        title=f"{cell['rows']} test sentences after {size['epochs']} × {size['train']} training sentences",
        caption=f"times from text to prediction, medians of {size['rounds']} rounds: {found['hardware']}",
    )
    for column in ("budget", "accuracy", "mean\nlayers", "share of\nMACs", f"ms, in\nbatches of {BATCH}", "speed-up",
                   "ms, one\nat a time", "speed-up"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in found["rows"]:
        cell = row["cell"]
        table.add_row(
            "none" if row["budget"] is None else f"{row['budget']:g}",
            f"{cell['metrics']['accuracy']:.4f}",
            f"{cell['mean_exit_layer']:.2f}",
            f"{cell['macs']['share_of_full']:.3f}",
            f"{row['ms_a_sentence']:.2f}",
            f"{row['speed_up']:.2f}×",
            f"{row['ms_a_sentence_alone']:.2f}",
            f"{row['speed_up_alone']:.2f}×",
        )
    console.out.print(table)
    told = NEXT.format(out=out, data=out.rstrip("/") + "-data")
    console.out.print(told, markup=False, highlight=False, soft_wrap=True)


NEXT = """\
The budget is the share of the full model's compute that may be spent; none means the cheapest setting within half a
point of the full model on the dev sentences. All numbers: {out}/demo.json. The curve: {out}/curve.png.

Next:
  echo 'a gem of a film' | offramp predict {out} --input - --budget 0.5
  offramp eval {out} --data {data}/test.jsonl --budget 0.5
  offramp info {out}
  offramp train --model minilm --train my.csv --method branchynet --out runs/mine   # columns: text, label"""
