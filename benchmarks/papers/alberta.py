"""ALBERTa on its own backbone: joint pretraining, fine-tuning against two controls, and the poster's ablation in small.

    python benchmarks/papers/alberta.py text DATA --out runs/alberta       # all training texts, in pieces of 90 words
    python benchmarks/papers/alberta.py pretrain DATA --out runs/alberta   # masked-LM with the predictor from step one
    python benchmarks/papers/alberta.py cells DATA --out runs/alberta      # fine-tuning and its controls
    python benchmarks/papers/alberta.py rates DATA --out runs/alberta      # learning rates of fine-tuning, on one set
    python benchmarks/papers/alberta.py ablation DATA --out runs/alberta   # no exit, γ, RevPC, positions
    python benchmarks/papers/alberta.py table DATA --out runs/alberta --json FILE --results results --png curves.png

DATA is a folder of data sets, `<name>/<split>.jsonl.gz` (or `.jsonl`, `.json.gz`). `text` takes every text column of
the training splits; a text that also stands in another split is left out, and so are rows of folds 0 and 1 of sets that
come in folds. Every part consists of cells, each a run folder and the JSON of its evaluation; what exists is not
repeated, and a training that was interrupted is continued by the same command. `--only WORD` runs the cells whose name
contains it. `torchrun --standalone --nproc-per-node 2 benchmarks/papers/alberta.py pretrain …` uses two processes.

Fine-tuning compares the pretrained backbone with gates (`gated`), the same without gates (`plain`) and the same shape
untrained (`untrained`). Operating points are chosen on a tenth of the training rows; they and the curve of all points
are reported on the dev split.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from offramp import __version__
from offramp.cli.printing.progress import TrainingDisplay
from offramp.commands.evaluate import evaluate, evaluate_points
from offramp.commands.recipes import load_recipe
from offramp.commands.train import train
from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.evaluation.result_cells import hardware
from offramp.utils.command_line import command_line
from offramp.utils.files import atomic_replace, read_json, write_json, write_text

PROGRAM = "python benchmarks/papers/alberta.py"
TEXT_COLUMNS = ("text", "text_a", "text_b", "context", "tgt", "tokens")
WORDS_IN_A_PIECE, FEWEST_WORDS, HELD_OUT = 90, 5, 1000
SHAPE = {
    "embedding_size": 128,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_hidden_groups": 3,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
}
PUBLISHED = {
    **load_recipe("alberta/published").options,
    "pool": "meanmax",
}  # only the task's loss trains; no row is cut
GAMMAS = (0.0, 0.1, 0.5, 0.9)
LEAST_RANGE = 10.0  # points that the axis of a score covers at least
RATES = ((3e-4, 3e-4), (1e-4, 1e-4), (1e-4, 2e-3))  # of the backbone and of its embeddings


@dataclass(frozen=True)
class Fine:
    """A set to fine-tune on."""

    name: str
    train: str
    dev: str
    task: str = "classification"
    metric: str = "accuracy"
    limit: int | None = None
    epochs: int = 5


SETS = (
    Fine("agnews", "train", "dev", limit=6000),
    Fine("sst2", "train_sentences", "dev"),
    Fine("mrpc", "train", "dev"),
    Fine("conll2003", "train", "dev", "tagging", "entity_f1", limit=8000),
)
KINDS = ("gated", "plain", "untrained")  # of fine-tuning
ABLATION_SETS = ("agnews", "conll2003")  # the poster's are MNLI and CoNLL-2003


@dataclass(frozen=True)
class Study:
    """Where things lie, and how long trainings are."""

    data: Path
    out: Path
    epochs: int = 3  # of pretraining
    batch_size: int = 32
    vocabulary: int = 8000
    shape: Mapping[str, Any] = field(default_factory=lambda: dict(SHAPE))
    ablation_rows: int = 40_000  # texts of each pretraining of the ablation
    only: str = ""
    limit: int | None = None  # rows of every fine-tuning and evaluation, for a trial of the script
    pieces: int | None = None  # texts of the whole pretraining; all by default
    dropout: bool = False  # in pretraining

    @property
    def text(self) -> Path:
        """The pieces to pretrain on."""
        return self.out / "text.jsonl"

    @property
    def held_out(self) -> Path:
        """The pieces whose perplexity is measured."""
        return self.out / "held-out.jsonl"


# --- texts -----------------------------------------------------------------------------------------------------------


def data_files(data: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of training rows and those of other rows; a set's sentences replace its phrases."""
    files = sorted(path for path in data.glob("*/*") if ".json" in path.name)
    sentences = {path.parent for path in files if path.name.startswith("train_sentences.")}
    phrases = {path for path in files if path.parent in sentences and path.name.startswith("train.")}
    training = [path for path in files if path.name.startswith(("train", "all.")) and path not in phrases]
    return training, [path for path in files if not path.name.startswith("train")]


def texts_of(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a row."""
    for column in TEXT_COLUMNS:
        value = row.get(column)
        if value:
            yield value if isinstance(value, str) else " ".join(value)


def is_training_row(row: Mapping[str, Any]) -> bool:
    """Return whether a row may be trained on: sets in folds keep the first two for testing."""
    return int(row.get("fold", 2)) > 1


def pieces_of(text: str) -> list[str]:
    """Return a text in pieces of at most WORDS_IN_A_PIECE words, of equal length; short texts give none."""
    words = text.split()
    if len(words) < FEWEST_WORDS:
        return []
    count = -(-len(words) // WORDS_IN_A_PIECE)
    edges = [len(words) * number // count for number in range(count + 1)]
    return [" ".join(words[start:end]) for start, end in itertools.pairwise(edges)]


def collect_texts(study: Study) -> None:
    """Write the pieces of all training texts, in an order drawn once, and some held out."""
    training, other = data_files(study.data)
    if not training:
        raise OfframpError("texts to pretrain on", f"no training files in {study.data}", "give the folder of data sets")
    tested = {_key(text) for path in other for row in read_rows(str(path)) for text in texts_of(row)
              if not (path in training and is_training_row(row))}  # fmt: skip
    seen: set[str] = set()
    pieces: list[str] = []
    for path in training:
        for text in (text for row in read_rows(str(path)) if is_training_row(row) for text in texts_of(row)):
            if (key := _key(text)) not in seen and key not in tested:
                seen.add(key)
                pieces += pieces_of(text)
    random.Random(0).shuffle(pieces)
    held_out = min(HELD_OUT, len(pieces) // 10)
    study.out.mkdir(parents=True, exist_ok=True)
    for path, part in ((study.held_out, pieces[:held_out]), (study.text, pieces[held_out:])):
        write_text(path, "".join(f"{_row(piece)}\n" for piece in part))
    words = sum(len(piece.split()) for piece in pieces)
    print(f"{len(pieces)} pieces, {words} words of {len(training)} files; {held_out} held out")


def _key(text: str) -> str:
    """Return a text without case, spaces and punctuation."""
    return "".join(character for character in text.lower() if character.isalnum())


def _row(text: str) -> str:
    return json.dumps({"text": text}, ensure_ascii=False)


# --- cells -----------------------------------------------------------------------------------------------------------


Cell = tuple[str, Callable[[], dict[str, Any]]]  # name; what computes it


def run_cells(study: Study, cells: Sequence[Cell]) -> None:
    """Compute the cells that do not exist yet, in order."""
    for name, compute in cells:
        path = study.out / "cells" / f"{name}.json"
        if path.is_file() or study.only not in name:
            continue
        found = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
        print(f"{name}: {summary_line(found)}", flush=True)


def trained_run(study: Study, name: str, **arguments: Any) -> Path:
    """Return a run folder, trained now if it does not exist; an interrupted training continues."""
    out = study.out / name
    if not (out / "offramp.json").is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        with TrainingDisplay() as display:
            train(out=out, listener=display.report, **arguments)
    return out


def pretrained_run(study: Study, name: str = "joint", **shape: Any) -> Path:
    """Return a pretrained backbone; those of the ablation (another name) see fewer texts, one epoch."""
    whole = name == "joint"
    return trained_run(
        study,
        f"pretrained/{name}",
        model="alberta",
        from_scratch=True,
        vocabulary=study.vocabulary,
        shape={**study.shape, **shape},
        train=study.text,
        dev=study.held_out,
        task="masked_lm",
        method="alberta",
        options={**PUBLISHED, "dropout": study.dropout},
        limit=study.pieces if whole else study.ablation_rows,
        epochs=study.epochs if whole else 1,
        batch_size=study.batch_size,
        lr=1e-3,
        max_length=128,
        snapshots=4 if whole else 0,
    )


def fine_tuned_run(study: Study, one: Fine, name: str, **arguments: Any) -> Path:
    """Return a run that was fine-tuned on a set."""
    task = {"task": one.task, "epochs": one.epochs, "limit": study.limit or one.limit, "lr": 3e-4, "max_length": 128}
    path = split_path(study.data, one.name, one.train)
    return trained_run(study, f"{one.name}/{name}", train=path, dev_split=0.1, **{**task, **arguments})


def split_path(data: Path, name: str, split: str) -> Path:
    """Return the file of a split, compressed or not."""
    found = [data / name / f"{split}{ending}" for ending in (".jsonl.gz", ".jsonl")]
    return next((path for path in found if path.is_file()), found[0])


def evaluated(study: Study, one: Fine, run: Path, **chosen: Any) -> dict[str, Any]:
    """Return the result cell of a run on the dev split."""
    rows = split_path(study.data, one.name, one.dev)
    return evaluate(run, rows, engine="torch", limit=study.limit, command=cell_command(run), **chosen)


def evaluated_points(study: Study, one: Fine, run: Path) -> dict[str, Any]:
    """Return the cells of a run on the dev split: full depth with the whole curve, and the points chosen for a loss."""
    rows = split_path(study.data, one.name, one.dev)
    full, *chosen = evaluate_points(run, rows, engine="torch", limit=study.limit, command=cell_command(run))
    return {"full": full, **{f"max_loss {cell['chosen']['value']:g}": cell for cell in chosen}}


def cell_command(run: Path) -> str:
    """Return the command that computes the cell of a fine-tuned run."""
    kind, data = run.name, run.parent.name
    if kind.startswith("ablation-"):
        return f"{PROGRAM} ablation DATA --only ablation-{data}-{kind.removeprefix('ablation-')}"
    return f"{PROGRAM} {'rates' if kind.startswith('rates-') else 'cells'} DATA --only {data}-{kind}"


def pretraining_cells(study: Study) -> list[Cell]:
    """Return the pretraining, with its loss curve."""

    def compute() -> dict[str, Any]:
        run = pretrained_run(study)
        command = f"{PROGRAM} pretrain DATA"
        cell = evaluate(run, study.held_out, budget=1.0, engine="torch", limit=study.limit, command=command)
        return {"full": cell, "loss_curve": read_json(run / "losses.json")["stages"][0]}

    return [("pretrained-joint", compute)]


def fine_tuning_cells(study: Study) -> list[Cell]:
    """Return, for every set: gated and plain on the pretrained backbone, and the untrained one with gates."""

    def gated(one: Fine, name: str, **start: Any) -> dict[str, Any]:
        run = fine_tuned_run(study, one, name, method="alberta", options={"mixed": False}, **start)
        return evaluated_points(study, one, run)

    def plain(one: Fine) -> dict[str, Any]:
        run = fine_tuned_run(study, one, "plain", method="full", model=pretrained_run(study))
        return {"full": evaluated(study, one, run)}

    def untrained(one: Fine) -> dict[str, Any]:
        start = {"model": "alberta", "from_scratch": True, "tokenizer": pretrained_run(study), "shape": study.shape}
        return gated(one, "untrained", **start)

    def with_gates(one: Fine) -> dict[str, Any]:
        return gated(one, "gated", model=pretrained_run(study))

    kinds = dict(zip(KINDS, (with_gates, plain, untrained), strict=True))
    return [(f"{one.name}-{name}", partial(compute, one)) for one in SETS for name, compute in kinds.items()]


def rate_cells(study: Study) -> list[Cell]:
    """Return fine-tuning of the pretrained backbone at other rates; the scores on held-out rows are in `trained`."""
    one = next(one for one in SETS if one.name == "sst2")

    def compute(name: str, lr: float, embedding_lr: float) -> dict[str, Any]:
        rates = {"lr": lr, "embedding_lr": embedding_lr}
        start = {"method": "alberta", "options": {"mixed": False}, "model": pretrained_run(study)}
        return evaluated_points(study, one, fine_tuned_run(study, one, name, **start, **rates))

    names = {f"rates-{lr:g}-{embedding_lr:g}": (lr, embedding_lr) for lr, embedding_lr in RATES}
    return [(f"{one.name}-{name}", partial(compute, name, *rates)) for name, rates in names.items()]


def ablation_cells(study: Study) -> list[Cell]:
    """Return the poster's ablation: everything else equal, all pretrained on the same fewer texts, fine-tuned by the
    task's loss alone, as the poster states it; and, beside it, fine-tuning without gates from the same backbone.

    The poster's "without early exit" is the whole method with γ = 0: all layers run, the gates stay.
    """
    variants: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name → shape, options of the method
        "whole": ({}, {}),
        "no-revpc": ({}, {"revpc": False}),
        "no-absolute": ({"absolute_positions": False}, {}),
        "no-relative": ({"relative_positions": False}, {}),
    }

    def compute(one: Fine, name: str, shape: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        backbone = pretrained_run(study, "ablation" if not shape else f"ablation-{name}", **shape)
        run = fine_tuned_run(
            study, one, f"ablation-{name}", method="alberta", options={**PUBLISHED, **options}, model=backbone
        )
        gammas = GAMMAS if name == "whole" else (0.0, 0.5)
        return {f"gamma {gamma:g}": evaluated(study, one, run, settings={"gamma": gamma}) for gamma in gammas}

    def without_gates(one: Fine) -> dict[str, Any]:
        backbone = pretrained_run(study, "ablation")
        return {
            "full": evaluated(
                study, one, fine_tuned_run(study, one, "ablation-no-gates", method="full", model=backbone)
            )
        }

    sets = [one for one in SETS if one.name in ABLATION_SETS]
    cells = [
        (f"ablation-{one.name}-{name}", partial(compute, one, name, *parts))
        for one in sets
        for name, parts in variants.items()
    ]
    return cells + [(f"ablation-{one.name}-no-gates", partial(without_gates, one)) for one in sets]


# --- the table -------------------------------------------------------------------------------------------------------


def summary_line(cell: Mapping[str, Any]) -> str:
    """Return the metric and the share of MACs of every result in a cell."""
    results = {name: one for name, one in cell.items() if isinstance(one, Mapping)}
    parts = [f"{name} {_score(one)} at {one['macs']['share_of_full']:.2f}" for name, one in results.items()]
    return "; ".join(parts)


def _score(result: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())


def write_table(study: Study, path: Path | None) -> None:
    """Print all cells that exist, and write them to one file."""
    cells = {file.stem: read_json(file) for file in sorted((study.out / "cells").glob("*.json"))}
    for name, cell in cells.items():
        print(f"{name:32} {summary_line(cell)}")
    if path is not None:
        what = (
            "ALBERTa on its own backbone: joint pretraining, fine-tuning with and without gates and untrained, ablation"
        )
        about = {"what": what, "command": command_line(PROGRAM), "hardware": hardware(), "version": __version__}
        write_json(path, {**about, "date": datetime.date.today().isoformat(), "cells": cells})


def write_result_cells(study: Study, results: Path, folder: str) -> None:
    """Write the cells of fine-tuning among the other results, as lists with full depth first, as `offramp eval --curve`
    does."""
    model = f"alberta{study.shape['num_hidden_layers']}x{study.shape['hidden_size']}"
    for one, kind in itertools.product(SETS, KINDS):
        file = study.out / "cells" / f"{one.name}-{kind}.json"
        if file.is_file():
            cells = list(read_json(file).values())
            name = f"{kind}-{model}-s{cells[0]['seed']}.json"
            write_json(results / one.name / cells[0]["method"] / folder / name, cells)


def draw_curves(study: Study, path: Path) -> None:
    """Draw the score of all points against their cost, for every set that was fine-tuned on."""
    found = {(one.name, kind): study.out / "cells" / f"{one.name}-{kind}.json" for one in SETS for kind in KINDS}
    cells = {key: read_json(file)["full"] for key, file in found.items() if file.is_file()}
    shown = [one for one in SETS if any(name == one.name for name, _ in cells)]
    if not shown:
        raise OfframpError("curves", f"no cells of fine-tuning in {study.out}", f"run `{PROGRAM} cells DATA` first")
    figure = Figure(figsize=(3.4 * len(shown), 3.2), dpi=150, layout="constrained")
    for axes, one in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        _draw_set(axes, one, {kind: cells[one.name, kind] for kind in KINDS if (one.name, kind) in cells})
    with atomic_replace(path) as fresh, fresh.open("wb") as file:
        FigureCanvasAgg(figure).print_png(file)


def _draw_set(axes: Axes, one: Fine, cells: Mapping[str, Mapping[str, Any]]) -> None:
    for kind, colour in (("gated", "#2f6db3"), ("untrained", "#d1495b")):
        points = sorted(cells.get(kind, {}).get("curve", []), key=lambda point: point["share_of_full"])
        scores = [100 * point["metrics"][one.metric] for point in points]
        axes.plot([point["share_of_full"] for point in points], scores, "o-", color=colour, markersize=3, label=kind)
    if "plain" in cells:
        score = 100 * cells["plain"]["metrics"][one.metric]
        axes.axhline(score, color="#444444", linewidth=0.8, linestyle=(0, (4, 4)), label="plain (no gates)")
    axes.set_title(one.name, fontsize=10, loc="left")
    axes.set_xlabel("share of the full model's MACs")
    axes.set_ylabel(one.metric.replace("_", " "))
    axes.set_xlim(0, 1.04)
    low, high = axes.get_ylim()
    middle, half = (low + high) / 2, max(LEAST_RANGE, high - low) / 2  # differences by chance should not look large
    axes.set_ylim(middle - half, middle + half)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", frameon=False, fontsize=8)


def build_parser() -> argparse.ArgumentParser:
    """Return the options of all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["text", "pretrain", "cells", "rates", "ablation", "table"])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/alberta"))
    parser.add_argument("--epochs", type=int, default=Study.epochs, help="of pretraining")
    parser.add_argument("--batch-size", type=int, default=Study.batch_size, help="of pretraining")
    parser.add_argument("--vocabulary", type=int, default=Study.vocabulary)
    parser.add_argument("--ablation-rows", type=int, default=Study.ablation_rows, help="texts of each ablation")
    parser.add_argument("--pieces", type=int, help="texts of the whole pretraining (default: all)")
    parser.add_argument("--dropout", action="store_true", help="pretrain with dropout, as ALBERT is not")
    parser.add_argument("--shape", action="append", default=[], help="an entry of config.json as key=value")
    parser.add_argument("--only", default="", help="only the cells whose name contains this")
    parser.add_argument("--limit", type=int, help="rows of fine-tuning and evaluation, for a trial")
    parser.add_argument("--json", type=Path, help="table: write all cells to one file")
    parser.add_argument("--png", type=Path, help="table: draw score against cost of fine-tuned runs")
    parser.add_argument("--results", type=Path, help="table: write the cells of fine-tuning below this folder")
    parser.add_argument("--folder", default="own-backbone", help="table: their folder, in that of their method")
    return parser


def run_part(options: argparse.Namespace) -> None:
    """Run one part."""
    shape = {**SHAPE, **dict(entry.split("=", 1) for entry in options.shape)}
    study = Study(
        options.data,
        options.out,
        options.epochs,
        options.batch_size,
        options.vocabulary,
        shape,
        options.ablation_rows,
        options.only,
        options.limit,
        options.pieces,
        options.dropout,
    )
    if options.part == "text":
        collect_texts(study)
    elif options.part == "table":
        write_table(study, options.json)
        if options.results is not None:
            write_result_cells(study, options.results, options.folder)
        if options.png is not None:
            draw_curves(study, options.png)
    elif options.part == "pretrain" and int(os.environ.get("RANK", "0")) > 0:
        pretrained_run(study)  # the first of several processes evaluates
    else:
        parts = {
            "pretrain": pretraining_cells,
            "cells": fine_tuning_cells,
            "rates": rate_cells,
            "ablation": ablation_cells,
        }
        run_cells(study, parts[options.part](study))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the parts."""
    options = build_parser().parse_args(arguments)
    try:
        run_part(options)
    except OfframpError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")


if __name__ == "__main__":
    main()
