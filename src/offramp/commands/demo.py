"""`offramp demo`: the main command on an embedded default, and what each budget buys on sentences it never saw.

    runs/demo-data/   the sentences as train.jsonl, dev.jsonl, test.jsonl, for every command to be tried on
    runs/demo/        the run folder, and in it demo.json (all that was measured) and curve.png

Interrupted? The same command goes on: with training from its last checkpoint, or with measuring if that was done.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from offramp.cli import console
from offramp.commands.train import TrainRequest, run_training
from offramp.errors import OfframpError
from offramp.evaluation.budgets import BATCH, Effort, bought, spots
from offramp.evaluation.curve import Curve, Spot, draw
from offramp.evaluation.demo_data import carried_model, movie_sentences
from offramp.evaluation.result_cells import Origin, hardware
from offramp.inference import run_folder as folders
from offramp.inference.predictor import Predictor
from offramp.training.schedule import Schedule
from offramp.utils.files import read_json, unwritable, write_json, write_text

Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Size:
    """How much of everything: decides how long the demo takes."""

    train: int
    dev: int
    test: int
    schedule: Schedule
    effort: Effort


FULL = Size(6000, 1000, 1000, Schedule(epochs=2, batch_size=32, lr=1e-4), Effort(timed=256, alone=48, rounds=5))
QUICK = Size(1500, 800, 400, Schedule(epochs=1, batch_size=16, lr=2e-4), Effort(timed=96, alone=16, rounds=3))


def demo(out: str, quick: bool) -> None:
    """Train (unless that is done), measure, draw, and say what to type next."""
    run, size, started = Path(out), QUICK if quick else FULL, time.monotonic()
    if (run / "demo.json").is_file():
        console.say_plainly(f"{out} holds a finished demo; this is its table. To train again, remove the folder.")
        show(read_json(run / "demo.json"), out)
        return
    data = run.with_name(run.name + "-data")
    request = TrainRequest(
        model=carried_model(),
        train=str(data / "train.jsonl"),
        out=out,
        method="branchynet",
        dev=str(data / "dev.jsonl"),
        limit=size.train,
        options={"pool": "meanmax", "exit0": True},
        schedule=size.schedule,
    )
    trained = _trained(run, request)
    test = _write_splits(data, size)
    if not trained:
        console.say_plainly("fine-tuning MiniLM (6 layers) with off-ramps on rated movie-review sentences")
        with console.TrainingConsole(out, size.schedule.epochs) as progress:
            run_training(request, say=progress.say)
    console.say_plainly(f"measuring on {len(test)} sentences that were used for nothing yet")
    found = measure(run, test, size, "offramp demo --quick" if quick else "offramp demo")
    write_json(run / "demo.json", {**found, "seconds": round(time.monotonic() - started, 1)})
    show(found, out)


def _trained(run: Path, request: TrainRequest) -> bool:
    """Whether the folder holds this demo's model already; anything else in it is left alone."""
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return False
    recipe = folders.read_recipe(run)
    if folders.is_run(run) and (recipe.get("train"), recipe.get("limit")) == (request.train, request.limit):
        return True
    raise OfframpError(f"to write the demo to {run}", "something else there", "choose another folder with --out")


def _write_splits(folder: Path, size: Size) -> Rows:
    """The sentences as files; returns the test rows."""
    splits = movie_sentences()
    parts = {"train": splits.train, "dev": splits.dev[: size.dev], "test": splits.test[: size.test]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    for name, rows in parts.items():
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return parts["test"]


def measure(run: Path, test: Rows, size: Size, command: str) -> dict[str, Any]:
    """What demo.json holds; the picture is drawn on the way."""
    predictor = Predictor.load(str(run))
    origin = Origin("movie-sentences", "test", command, folders.read_recipe(run))
    rows, curve = bought(predictor, test, origin, size.effort), spots(predictor, test)
    at = {row["budget"]: Spot(row["cell"]["macs"]["share_of_full"], row["cell"]["metrics"]["accuracy"]) for row in rows}
    title = f"MiniLM-L6 with off-ramps on {len(test)} movie-review sentences"
    draw(Curve(title, "accuracy", curve, full=at[1.0], chosen=at[None]), run / "curve.png")
    return {
        "command": command,
        "hardware": hardware(),
        "size": asdict(size),
        "rows": rows,
        "curve": [asdict(spot) for spot in curve],
    }


def show(found: dict[str, Any], out: str) -> None:
    """The table, and which commands to type next."""
    size, tested = found["size"], found["rows"][0]["cell"]["rows"]
    title = f"{tested} test sentences, after training on {size['schedule']['epochs']} × {size['train']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("budget", "accuracy", "mean\nlayers", "share\nof MACs", "ms in a\nbatch", "speed-up", "ms\nalone",
                   "speed-up"):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for row in found["rows"]:
        cell, ms, faster = row["cell"], row["ms"], row["speed_up"]
        table.add_row(
            "none" if row["budget"] is None else f"{row['budget']:g}",
            f"{cell['metrics']['accuracy']:.4f}",
            f"{cell['mean_exit_layer']:.2f}",
            f"{cell['macs']['share_of_full']:.3f}",
            f"{ms['batch']:.2f}",
            f"{faster['batch']:.2f}×",
            f"{ms['alone']:.2f}",
            f"{faster['alone']:.2f}×",
        )
    console.out.print(table)
    rounds = size["effort"]["rounds"]
    told = NEXT.format(out=out.rstrip("/"), batch=BATCH, rounds=rounds, hardware=found["hardware"])
    console.out.print(told, markup=False, highlight=False, soft_wrap=True)


NEXT = """
budget    share of the full model's compute that may be spent on average, as calibrated on the dev sentences;
          "none": the cheapest setting that loses at most half a point there
ms        a sentence from text to prediction, in batches of {batch} or alone; medians of {rounds} interleaved rounds
hardware  {hardware}
files     {out}/demo.json has all numbers, {out}/curve.png the curve

Next:
  echo 'a gem of a film' | offramp predict {out} --input - --budget 0.5
  offramp eval {out} --data {out}-data/test.jsonl --budget 0.5
  offramp info {out}
  offramp train --model minilm --train my.csv --method branchynet --out runs/mine   # columns: text, label"""
