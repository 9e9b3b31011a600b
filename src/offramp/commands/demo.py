"""`offramp demo` as a function: fine-tune a small model with plain transformers, attach exits, measure what they save.

    runs/demo-data/        the sentences as train.jsonl, texts.jsonl (unlabelled), dev.jsonl and test.jsonl
    runs/demo-model-4000/  MiniLM fine-tuned on so many sentences by plain transformers, without Offramp
    runs/demo/             the run folder with attached exits, and in it demo.json (all numbers) and curve.png

An interrupted demo is continued by the same command with the parts that are finished.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from offramp.commands.attach import AttachRequest, run_attach
from offramp.commands.train import TrainingListener, model_source
from offramp.errors import OfframpError
from offramp.evaluation.collect import CurvePoint
from offramp.evaluation.curves import (
    BATCH,
    BudgetTiming,
    CurvePicture,
    draw_curve,
    measure_budgets,
    measure_curve,
)
from offramp.evaluation.demo_data import movie_sentences
from offramp.evaluation.result_cells import Origin, hardware
from offramp.evaluation.timing import interleaved
from offramp.inference import run_folder as folders
from offramp.inference.budget import Budget
from offramp.inference.predictor import Predictor
from offramp.training.schedule import Schedule
from offramp.utils.files import atomic_replace, read_json, write_error, write_json, write_text
from offramp.utils.hardware import best_precision
from offramp.utils.hf_logging import quiet_transformers
from offramp.utils.run_paths import is_run

Rows = list[dict[str, str]]
MAX_LENGTH = 128  # tokens of a sentence
LIMITS = (0.005, 0.01, 0.02, 0.05)  # disagreements that the table shows, below the full model


@dataclass(frozen=True)
class DemoSize:
    """How many rows, epochs and rounds: they decide how long the demo takes."""

    train: int  # labelled sentences for fine-tuning
    texts: int  # other sentences, without labels, for the exits
    dev: int
    test: int
    schedule: Schedule
    effort: BudgetTiming


FULL = DemoSize(
    4000, 3500, 1000, 1000, Schedule(epochs=2, batch_size=32, lr=1e-4), BudgetTiming(timed=256, alone=48, rounds=5)
)
QUICK = DemoSize(
    2000, 3000, 400, 600, Schedule(epochs=1, batch_size=16, lr=2e-4), BudgetTiming(timed=96, alone=16, rounds=3)
)


def demo(
    out: str | None = None,
    *,
    quick: bool = False,
    listener: TrainingListener = lambda **_: None,
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Fine-tune and attach unless that is done, measure, draw the curve, and return what demo.json holds.

    `listener` receives the progress of fine-tuning, `note` a line before each part of the work.
    """
    run = Path(out or default_folder(quick))
    size, started = QUICK if quick else FULL, time.monotonic()
    if (run / "demo.json").is_file():
        note(f"{run} holds a finished demo; this is its table. To run it again, remove the folder.")
        return dict(read_json(run / "demo.json"))
    base = model_source("minilm")
    data, model = run.with_name(run.name + "-data"), run.with_name(f"{run.name}-model-{size.train}")
    request = AttachRequest(
        str(model), str(data / "texts.jsonl"), str(run), labels=str(data / "dev.jsonl"), rows=size.texts
    )
    attached = _attached(run, request)
    splits = _write_splits(data, size)
    if not attached and not (model / "config.json").is_file():
        note("fine-tuning MiniLM (6 layers) on rated movie-review sentences with plain transformers")
        fine_tune(base, splits["train"], model, size.schedule, listener)
    if not attached:
        note(f"attaching exits: one pass over {size.texts} other sentences, without labels")
        run_attach(request)
    test = splits["test"]
    note(f"measuring on {len(test)} sentences that were used for nothing yet")
    found = measure_demo(run, test, size, "offramp demo --quick" if quick else "offramp demo")
    found["seconds"] = round(time.monotonic() - started, 1)
    write_json(run / "demo.json", found)
    return found


def default_folder(quick: bool) -> str:
    """Return where the demo is written if no folder is given."""
    return "runs/demo-quick" if quick else "runs/demo"


def _attached(run: Path, request: AttachRequest) -> bool:
    """Return whether the folder holds this demo's model already; anything else in it is left alone."""
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return False
    recipe = folders.read_recipe(run)
    if is_run(run) and (recipe.get("model"), recipe.get("rows")) == (Path(request.model).name, request.rows):
        return True
    raise OfframpError(f"to write the demo to {run}", "something else there", "choose another folder with --out")


def _write_splits(folder: Path, size: DemoSize) -> dict[str, Rows]:
    """Write the sentences as files and return the rows of each; no sentence is in two of them."""
    splits = movie_sentences()
    parts = {
        "train": splits.train[: size.train],
        "texts": [{"text": row["text"]} for row in splits.train[size.train :]],
        "dev": splits.dev[: size.dev],
        "test": splits.test[: size.test],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error
    for name, rows in parts.items():
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return parts


def fine_tune(base: str, rows: Rows, folder: Path, schedule: Schedule, listener: TrainingListener) -> None:
    """Fine-tune a classifier with plain transformers and save it: what users have before they know Offramp."""
    torch.manual_seed(schedule.seed)
    labels = sorted({row["label"] for row in rows})
    index = {label: number for number, label in enumerate(labels)}
    names = {"num_labels": len(labels), "id2label": dict(enumerate(labels)), "label2id": index}
    with quiet_transformers():
        tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, **names)
    steps = -(-len(rows) // schedule.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.lr, weight_decay=schedule.weight_decay)
    total = steps * schedule.epochs
    decay = transformers.get_linear_schedule_with_warmup(optimizer, total // 10, total)
    bf16 = best_precision() == "bf16"
    listener(rows=len(rows), dev=0, cut=0, max_length=MAX_LENGTH, epochs=schedule.epochs)
    model.train()
    for epoch in range(schedule.epochs):
        for step, batch in enumerate(_batches(rows, schedule.batch_size, schedule.seed + epoch)):
            texts = [row["text"] for row in batch]
            inputs = tokenizer(texts, truncation=True, max_length=MAX_LENGTH, padding=True, return_tensors="pt")
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**inputs, labels=torch.tensor([index[row["label"]] for row in batch])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            decay.step()
            optimizer.zero_grad()
            listener(stage="fine-tuning", epoch=epoch, step=step + 1, steps=steps, loss=float(loss.detach()))
    with quiet_transformers(), atomic_replace(folder) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)


def _batches(rows: Rows, size: int, seed: int) -> list[Rows]:
    """Return the rows in random batches of similar length, so that little is padded (`group_by_length` of Trainer)."""
    rng = random.Random(seed)
    order = sorted(rng.sample(rows, len(rows)), key=lambda row: len(row["text"]))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return rng.sample(batches, len(batches))


def measure_demo(run: Path, test: Rows, size: DemoSize, command: str) -> dict[str, Any]:
    """Measure every disagreement on the test rows, draw the curve, and return all numbers."""
    predictor = Predictor.load(str(run))
    recipe = folders.read_recipe(run)
    origin = Origin("movie-sentences", "test", command, recipe)
    budgets = [Budget.share(1.0), *(Budget.disagreement(limit) for limit in LIMITS)]
    rows, curve = measure_budgets(predictor, test, origin, size.effort, budgets), measure_curve(predictor, test)
    for row, budget, found in zip(rows, budgets, _disagreements(predictor, test, budgets), strict=True):
        row["disagreement"] = {"allowed": 0.0 if budget.kind == "share" else budget.value, "found": found}
    at = [CurvePoint(row["cell"]["macs"]["share_of_full"], row["cell"]["metrics"]["accuracy"]) for row in rows]
    title = f"MiniLM-L6 with attached exits on {len(test)} movie-review sentences"
    chosen = at[budgets.index(Budget.disagreement(0.01))]
    draw_curve(CurvePicture(title, "accuracy", curve, full=at[0], chosen=chosen), run / "curve.png")
    return {
        "command": command,
        "hardware": hardware(),
        "engine": predictor.engine_name,
        "transformers_ms": time_transformers(run, [row["text"] for row in test], size.effort),
        "size": asdict(size),
        "attached": recipe["summary"],
        "rows": rows,
        "curve": [asdict(spot) for spot in curve],
    }


def time_transformers(folder: Path, texts: Sequence[str], effort: BudgetTiming) -> dict[str, float]:
    """Return the milliseconds of a sentence with plain transformers, from text to prediction, as the budgets' are."""
    with quiet_transformers():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()

    def predict(_: str, batch: Sequence[str]) -> None:
        inputs = tokenizer(list(batch), truncation=True, max_length=MAX_LENGTH, padding=True, return_tensors="pt")
        with torch.inference_mode():
            model(**inputs).logits.softmax(-1).tolist()

    timed = texts[: effort.timed]
    calls: dict[str, list[Sequence[str]]] = {
        "batch": [timed[start : start + BATCH] for start in range(0, len(timed), BATCH)],
        "alone": [[text] for text in texts[: effort.alone]],
    }
    taken = {how: interleaved(predict, ["transformers"], own, effort.rounds) for how, own in calls.items()}
    return {how: round(1000 * seconds["transformers"] / sum(map(len, calls[how])), 4) for how, seconds in taken.items()}


def _disagreements(predictor: Predictor, test: Rows, budgets: Sequence[Budget]) -> list[float]:
    """Return how often predictions differ from the full model's, for every budget."""
    texts = [row["text"] for row in test]
    full = predictor.predict(texts, 1.0)
    return [float(np.mean(predictor.task.disagreement(predictor.predict(texts, one), full))) for one in budgets]
