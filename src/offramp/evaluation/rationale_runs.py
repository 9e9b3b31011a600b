"""`offramp rationales` as a function: train what is needed, compare, write. Whatever is finished is not done again."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Column, Table

from offramp import __version__, methods
from offramp.commands.train import TrainRequest
from offramp.data.readers import fingerprint
from offramp.errors import OfframpError
from offramp.evaluation.rationales import Marked, Row, agreement, chosen, marked, rows_in
from offramp.evaluation.result_cells import hardware, model_name
from offramp.inference import run_folder as folders
from offramp.inference.batching import score_policy
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import LoadedRun
from offramp.nn.batches import Data
from offramp.training.schedule import Schedule
from offramp.utils.files import read_json, replacing, write_json, write_text

FULL = "full input"
STRATEGIES = ("human", "saliency", "attention from all", "attention from [CLS]")
Train = Callable[[TrainRequest], Any]


@dataclass(frozen=True)
class Study:
    """What a user asks for."""

    data: str
    out: str
    model: str
    max_length: int = 512
    limit: int | None = None  # rows of each split
    scale: float = 1.0  # at which AdapLeR's predictors are watched
    options: dict[str, Any] = field(default_factory=dict)  # of AdapLeR
    schedule: Schedule = field(default_factory=lambda: Schedule(epochs=5, batch_size=16))
    command: str = ""  # that asked for it

    def folder(self, *parts: str) -> Path:
        """A place in the study."""
        return Path(self.out).joinpath(*(part.replace(" ", "-").strip("[]").replace("[", "") for part in parts))


def check(study: Study) -> None:
    """Refuse, before anything is written or trained, what AdapLeR could not be trained or watched with."""
    method = methods.get("adapler")
    methods.configure(method.options, study.options, method.name)
    methods.configure(method.settings, {"scale": study.scale}, method.name)


def claim(study: Study) -> dict[str, list[dict[str, Any]]]:
    """The rows; a folder that holds another study is refused. Scale and command are none of it: they change no run."""
    check(study)
    rows = {split: rows_in(study.data, split, study.limit) for split in ("train", "dev")}
    made = {**asdict(replace(study, out="", data="")), "rows": {s: fingerprint(s, own) for s, own in rows.items()}}
    made["schedule"].pop("save_seconds")
    for name in ("scale", "command"):
        made.pop(name)
    path = study.folder("study.json")
    if not path.is_file():
        write_json(path, made)
    elif {name: value for name, value in read_json(path).items() if name != "scale"} != made:  # older ones have it
        fix = "choose another --out, or ask for the same again to go on"
        raise OfframpError(f"to write the study {study.out}", "a study of other rows or settings there", fix)
    return rows


def _jsonl(path: Path, rows: Sequence[Row]) -> str:
    if not path.is_file():
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def _trained(study: Study, name: str, rows: Sequence[Row], train: Train, **more: Any) -> LoadedRun:
    """A run on these rows: opened if it is there, else trained or gone on with. Held-out rows choose its epoch."""
    out = study.folder("runs", name)
    if not folders.is_run(out):
        file = _jsonl(study.folder("rows", f"{name}.jsonl"), rows)
        given = {"max_length": study.max_length, "schedule": study.schedule, **more}
        train(TrainRequest(model=study.model, train=file, out=str(out), **given))
    return folders.load_run(out)


def _texts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{"text": " ".join(row["tokens"]), "label": row["label"]} for row in rows]


def compare(study: Study, train: Train) -> dict[str, Any]:
    """Agreement of predictors, attention and saliency with people, per layer (the paper's Figure 5)."""
    rows, path = claim(study), study.folder("agreement.json")
    made: dict[str, Any] = read_json(path) if path.is_file() else {}
    if made.get("scale") == study.scale:
        return made
    full = _trained(study, "full", _texts(rows["train"]), train)
    begun = {"method": "adapler", "init": str(study.folder("runs", "full")), "options": study.options}
    adapler = _trained(study, "adapler", _texts(rows["train"]), train, **begun)
    dev = marked(full, rows["dev"])
    found = agreement(full, adapler, dev, study.scale)
    made = {**_about(study, rows, len(dev)), "scale": study.scale, "techniques": found}
    draw(found, study.folder("agreement.png"))
    write_json(path, made)
    return made


def select(study: Study, train: Train) -> dict[str, Any]:
    """Fine-tuning on the words that people, saliency or attention choose (the paper's Table 2)."""
    rows, path = claim(study), study.folder("selection.json")
    if path.is_file():
        made: dict[str, Any] = read_json(path)
        return made
    full = _trained(study, "full", _texts(rows["train"]), train)
    whole = {split: marked(full, own) for split, own in rows.items()}
    texts = {split: _kept(full, own, None) for split, own in whole.items()}
    whole_cost, table = _macs(full, texts["dev"]), {FULL: _cell(full, texts["dev"], rows["train"])}
    for strategy in STRATEGIES:
        files = {split: study.folder("rows", f"{strategy} {split}.json") for split in whole}
        for split, file in files.items():
            if not file.is_file():
                write_json(file, _kept(full, whole[split], strategy, told=split == "train"))
        own = _trained(study, strategy, read_json(files["train"]), train)
        table[strategy] = _cell(own, read_json(files["dev"]), whole["train"])
    for cell in table.values():
        cell["mac_share"] = round(cell["mac_share"] / whole_cost, 6)
    made = {**_about(study, rows, len(whole["dev"])), "strategies": table}
    write_json(path, made)
    return made


def _kept(full: LoadedRun, rows: Sequence[Marked], strategy: str | None, told: bool = True) -> list[dict[str, Any]]:
    """Texts of the chosen words; of all words that fit without a strategy. `told`: whether labels may be looked at."""
    made = []
    for row in rows:
        words = range(len(row.truth)) if strategy is None else chosen(full, row, strategy, told)
        made.append({"text": " ".join(row.tokens[word] for word in words), "label": row.label})
    return made


def _macs(model: LoadedRun, rows: Sequence[Row]) -> float:
    predictor = Predictor(model, engine="torch")
    return predictor.full_macs(predictor.prepare(rows, "rows"))


def _cell(model: LoadedRun, rows: Sequence[Row], learned: Sequence[object]) -> dict[str, Any]:
    """A model on report rows; `learned`: what it was trained on, where nobody marked a word nothing can be chosen."""
    predictor = Predictor(model, engine="torch")
    data = Data(rows, predictor.prepare(rows, "rows"))
    policy = model.method.policy(model.network, model.method.settings())
    metrics, _ = score_policy(model.network, predictor.engine, policy, data)
    return {"accuracy": round(metrics["accuracy"], 6), "mac_share": _macs(model, rows), "rows_trained_on": len(learned)}


def _about(study: Study, rows: dict[str, list[dict[str, Any]]], used: int) -> dict[str, Any]:
    return {
        "data": Path(study.data).resolve().name,
        "split": "dev",
        "rows": used,
        "rows_without_marked_words": len(rows["dev"]) - used,
        "rows_trained_on": len(rows["train"]),
        "max_length": study.max_length,
        "model": model_name(study.model),
        "seed": study.schedule.seed,
        "epochs": study.schedule.epochs,
        "lr": study.schedule.lr,
        "batch_size": study.schedule.batch_size,
        "options": study.options,
        "command": study.command,
        "hardware": hardware(),
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }


def draw(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Both measures over the layers, a line per technique."""
    figure = Figure(figsize=(7.2, 5.6), dpi=150, layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, metric, name in zip(panels, ("false_positive_rate", "average_precision"), ("FPR", "mAP"), strict=True):
        for technique, own in found.items():
            axes.plot(range(1, len(own[metric]) + 1), own[metric], "o-", markersize=4, label=technique)
        axes.set_ylabel(name)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_xlabel("layer")
    panels[0].legend(frameon=False, fontsize=8, ncols=2)
    canvas = FigureCanvasAgg(figure)
    with replacing(path) as fresh, fresh.open("wb") as file:
        canvas.print_png(file)


def agreement_table(made: dict[str, Any]) -> Table:
    """A line per technique, a column per layer: average precision / false-positive rate."""
    first = next(iter(made["techniques"].values()))["average_precision"]
    table = Table(Column("mAP / FPR by layer", no_wrap=True), *map(str, range(1, len(first) + 1)))
    for name, own in made["techniques"].items():
        pairs = zip(own["average_precision"], own["false_positive_rate"], strict=True)
        table.add_row(name, *(f"{precision:.3f} / {wrong:.3f}" for precision, wrong in pairs))
    return table


def selection_table(made: dict[str, Any]) -> Table:
    """A line per strategy."""
    table = Table("fine-tuned on", "accuracy", "share of compute")
    for name, cell in made["strategies"].items():
        table.add_row(name.replace("[", "\\["), f"{cell['accuracy']:.4f}", f"{cell['mac_share']:.3f}")
    return table
