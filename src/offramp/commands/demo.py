"""`offramp demo` as a function: train a small model with exits and measure what each budget buys on new sentences.

    runs/demo-data/   the sentences as train.jsonl, dev.jsonl, test.jsonl, to try every command on
    runs/demo/        the run folder, and in it demo.json (all numbers) and curve.png

An interrupted demo is continued by the same command, in training from its last checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offramp.commands.train import TrainingListener, TrainRequest, model_source, run_training
from offramp.errors import OfframpError
from offramp.evaluation.collect import CurvePoint
from offramp.evaluation.curves import BudgetTiming, CurvePicture, draw_curve, measure_budgets, measure_curve
from offramp.evaluation.demo_data import movie_sentences
from offramp.evaluation.result_cells import Origin, hardware
from offramp.inference import run_folder as folders
from offramp.inference.predictor import Predictor
from offramp.training.schedule import Schedule
from offramp.utils.command_line import short_path
from offramp.utils.files import read_json, write_error, write_json, write_text
from offramp.utils.run_paths import is_run

Rows = list[dict[str, str]]


@dataclass(frozen=True)
class DemoSize:
    """How many rows, epochs and rounds: they decide how long the demo takes."""

    train: int
    dev: int
    test: int
    schedule: Schedule
    effort: BudgetTiming


FULL = DemoSize(
    6000, 1000, 1000, Schedule(epochs=2, batch_size=32, lr=1e-4), BudgetTiming(timed=256, alone=48, rounds=5)
)
QUICK = DemoSize(1500, 800, 400, Schedule(epochs=1, batch_size=16, lr=2e-4), BudgetTiming(timed=96, alone=16, rounds=3))


def demo(
    out: str | None = None,
    *,
    quick: bool = False,
    listener: TrainingListener = lambda **_: None,
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train unless that is done, measure, draw the curve, and return what demo.json holds.

    `listener` receives the progress of training, `note` a line before each part of the work.
    """
    run = Path(out or default_folder(quick))
    size, started = QUICK if quick else FULL, time.monotonic()
    if (run / "demo.json").is_file():
        note(f"{run} holds a finished demo; this is its table. To train again, remove the folder.")
        return dict(read_json(run / "demo.json"))
    data = run.with_name(run.name + "-data")
    request = TrainRequest(
        model=model_source("minilm"),
        train=str(data / "train.jsonl"),
        out=str(run),
        method="branchynet",
        dev=str(data / "dev.jsonl"),
        limit=size.train,
        options={"pool": "meanmax", "exit0": True},
        schedule=size.schedule,
    )
    trained = _trained(run, request)
    test = _write_splits(data, size)
    if not trained:
        note("fine-tuning MiniLM (6 layers) with off-ramps on rated movie-review sentences")
        run_training(request, listener=listener)
    note(f"measuring on {len(test)} sentences that were used for nothing yet")
    found = measure_demo(run, test, size, "offramp demo --quick" if quick else "offramp demo")
    found["seconds"] = round(time.monotonic() - started, 1)
    write_json(run / "demo.json", found)
    return found


def default_folder(quick: bool) -> str:
    """Return where the demo is written if no folder is given."""
    return "runs/demo-quick" if quick else "runs/demo"


def _trained(run: Path, request: TrainRequest) -> bool:
    """Return whether the folder holds this demo's model already; anything else in it is left alone."""
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return False
    recipe = folders.read_recipe(run)
    if is_run(run) and (recipe.get("train"), recipe.get("limit")) == (short_path(request.train), request.limit):
        return True
    raise OfframpError(f"to write the demo to {run}", "something else there", "choose another folder with --out")


def _write_splits(folder: Path, size: DemoSize) -> Rows:
    """Write the sentences as files and return the test rows."""
    splits = movie_sentences()
    parts = {"train": splits.train, "dev": splits.dev[: size.dev], "test": splits.test[: size.test]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error
    for name, rows in parts.items():
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return parts["test"]


def measure_demo(run: Path, test: Rows, size: DemoSize, command: str) -> dict[str, Any]:
    """Measure every budget on the test rows, draw the curve, and return all numbers."""
    predictor = Predictor.load(str(run))
    origin = Origin("movie-sentences", "test", command, folders.read_recipe(run))
    rows, curve = measure_budgets(predictor, test, origin, size.effort), measure_curve(predictor, test)
    at = {
        row["budget"]: CurvePoint(row["cell"]["macs"]["share_of_full"], row["cell"]["metrics"]["accuracy"])
        for row in rows
    }
    title = f"MiniLM-L6 with off-ramps on {len(test)} movie-review sentences"
    draw_curve(CurvePicture(title, "accuracy", curve, full=at[1.0], chosen=at[None]), run / "curve.png")
    return {
        "command": command,
        "hardware": hardware(),
        "size": asdict(size),
        "rows": rows,
        "curve": [asdict(spot) for spot in curve],
    }
