"""What a comparison consists of: data sets, models, methods and seeds, and the rules that make it fair.

The rules: every method starts from the same fine-tuned model of its data set, model and seed (`--init`); every stage
gets the same number of epochs, batch size and learning rate; settings are chosen on held-out training rows and
reported on other rows; compute is counted without padding and with all heads; the static baselines are always there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from offramp import methods, tasks
from offramp.data.readers import read_rows
from offramp.errors import OfframpError

STATIC = ("full", "truncate:k=1", "truncate:k=2", "truncate:k=3", "layerdrop", "head_pruning", "tfidf")
TFIDF = "tfidf"
REPORTED = ("test", "dev", "validation")  # which split is reported, the first that is there
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class DataSet:
    """A data set: where to train, where to report."""

    name: str
    train: str
    report: str
    task: str
    rows: int | None = None  # training rows
    max_length: int | None = None


@dataclass(frozen=True)
class ComparisonCell:
    """One thing to run: a method on a data set with a model and a seed."""

    data: DataSet
    model: str
    method: str
    options: Mapping[str, str]
    seed: int

    @property
    def name(self) -> str:
        """A file name for it."""
        chosen = "".join(f"-{key}{value}" for key, value in sorted(self.options.items()))
        return f"{self.data.name}-{Path(self.model).name}-{self.method}{chosen}-s{self.seed}"


@dataclass(frozen=True)
class ComparisonPlan:
    """All cells of a comparison, plain fine-tuning first because the others start from it."""

    sets: Sequence[DataSet]
    models: Sequence[str]
    methods: Sequence[tuple[str, Mapping[str, str]]]
    seeds: Sequence[int]
    training: Mapping[str, Any] = field(default_factory=dict)  # epochs, batch_size, lr

    def cells(self) -> list[ComparisonCell]:
        """In the order in which they run."""
        listed = [
            ComparisonCell(data, model, method, options, seed)
            for seed in self.seeds
            for data in self.sets
            for model in self.models
            for method, options in self.methods
            if method_serves(method, data)
        ]
        return sorted(listed, key=lambda cell: (self.seeds.index(cell.seed), cell.method != "full"))


def method_serves(method: str, data: DataSet) -> bool:
    """Whether a method serves the task of a data set."""
    if method == TFIDF:
        return data.task == "classification"
    return methods.get(method).serves(tasks.get(data.task))


def parse_methods(asked: str) -> list[tuple[str, dict[str, str]]]:
    """`all`, or names with options such as `truncate:k=2`; the static baselines are added to whatever is asked."""
    known = [*methods.names(), TFIDF]
    wanted = [name for name in known if name not in ("truncate", TFIDF)] if asked == "all" else asked.split(",")
    listed = [item.strip() for item in [*STATIC, *wanted] if item.split(":")[0].strip() in known or item not in STATIC]
    made: list[tuple[str, dict[str, str]]] = []
    for item in dict.fromkeys(listed):
        name, _, options = item.partition(":")
        if name != TFIDF:
            methods.get(name)  # refuses an unknown one
        made.append((name, dict(pair.partition("=")[::2] for pair in options.split("+") if pair)))
    return made


def find_data_sets(folder: str, rows: int | None) -> list[DataSet]:
    """The data sets of a folder: what compare.yaml there says, else every folder with a train and a report split."""
    root = Path(folder)
    if not root.is_dir():
        raise OfframpError("a folder of data sets", f"{folder}, which is none", "give a folder with NAME/train.jsonl")
    if (root / "compare.yaml").is_file():
        return [_told(root, name, about, rows) for name, about in _yaml(root / "compare.yaml").items()]
    found = [_found(place, rows) for place in [root, *sorted(p for p in root.iterdir() if p.is_dir())]]
    sets = [one for one in found if one is not None]
    if not sets:
        way = "a data set is a folder with train.jsonl and test.jsonl or dev.jsonl (.csv, .tsv, .parquet; .gz)"
        raise OfframpError(f"data sets in {folder}", "no folder with a train and a report split", way)
    return sets


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return dict(content)
    except (yaml.YAMLError, TypeError, ValueError) as error:
        form = "write NAME: {train: FILE, report: FILE, rows: N, max_length: N, task: NAME}"
        raise OfframpError("a list of data sets", f"{path}: {error}", form) from error


def _told(root: Path, name: str, about: Mapping[str, Any], rows: int | None) -> DataSet:
    known = {"train", "report", "rows", "max_length", "task"}
    if not isinstance(about, Mapping) or not {"train", "report"} <= about.keys() <= known:
        form = f"{name}: {{train: FILE, report: FILE}} and, if needed, rows, max_length, task"
        raise OfframpError(f"the data set {name!r} in compare.yaml", repr(about)[:120], f"write {form}")
    train, report = (str(root / about[key]) for key in ("train", "report"))
    task = about.get("task") or _task(train)
    fewer = [count for count in (about.get("rows"), rows) if count is not None]
    return DataSet(name, train, report, task, min(fewer, default=None), about.get("max_length"))


def _found(place: Path, rows: int | None) -> DataSet | None:
    files = {path.name.split(".")[0]: path for path in sorted(place.iterdir()) if path.is_file()}
    report = next((str(files[name]) for name in REPORTED if name in files), None)
    if "train" not in files or report is None:
        return None
    return DataSet(place.resolve().name, str(files["train"]), report, _task(str(files["train"])), rows)


def _task(file: str) -> str:
    """The task that the first row of a file looks like."""
    row = read_rows(file, limit=1)[0]
    if "tags" in row:
        return "tagging"
    if "context" in row:
        return "question_answering"
    return "regression" if isinstance(row.get("label"), float) else "classification"


def parse_duration(text: str) -> float:
    """`90m`, `2h`, `45s` as seconds."""
    number, unit = text[:-1], text[-1:]
    try:
        if unit in UNITS and float(number) > 0:
            return float(number) * UNITS[unit]
    except ValueError:
        pass
    raise OfframpError("a time limit", repr(text), "write it as 90m, 2h or 45s")
