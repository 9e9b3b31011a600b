"""A comparison of methods: its plan, the rules that make it fair, and the timing of its runs.

The rules: every method starts from the same fine-tuned model of its data set, model and seed (`--init`); every stage
gets the same number of epochs, batch size and learning rate; settings are chosen on held-out training rows and
reported on other rows; compute is counted without padding and with all heads; the static baselines are always included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from offramp import methods, tasks
from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.evaluation.bench import BenchOutput, BenchPlan, SilentWatcher, run_bench
from offramp.evaluation.collect import ModelResult, collect_results, variant_label
from offramp.evaluation.result_cells import data_and_split
from offramp.training.schedule import Schedule
from offramp.utils.command_line import model_name
from offramp.utils.files import read_json, write_json
from offramp.utils.run_paths import is_run

STATIC = ("full", "truncate:k=1", "truncate:k=2", "truncate:k=3", "layerdrop", "head_pruning", "tfidf")
TFIDF = "tfidf"
REPORTED = ("test", "dev", "validation")  # the split that is reported: the first of these that exists
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
RULES = "rules.json"
SCHEDULE = ("epochs", "batch_size", "lr")
TIMED_BUDGETS = ("1.0", "max-loss=0.01")
PEERS = ("hf", "openvino")  # timed once for each data set, beside the plain model
Key = tuple[Any, ...]


@dataclass(frozen=True)
class DataSet:
    """A data set: the file to train on and the file to report on."""

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
        """A file name for the cell."""
        chosen = "".join(f"-{key}{value}" for key, value in sorted(self.options.items()))
        return f"{self.data.name}-{Path(self.model).name}-{self.method}{chosen}-s{self.seed}"


@dataclass(frozen=True)
class ComparisonPlan:
    """All cells of a comparison."""

    sets: Sequence[DataSet]
    models: Sequence[str]
    methods: Sequence[tuple[str, Mapping[str, str]]]
    seeds: Sequence[int]
    training: Mapping[str, Any] = field(default_factory=dict)  # epochs, batch_size, lr

    def cells(self) -> list[ComparisonCell]:
        """Return the cells in the order in which they run: plain fine-tuning first, because others start from it."""
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
    """Return whether a method can be trained for the task of a data set."""
    if method == TFIDF:
        return data.task == "classification"
    return method == methods.AUTO or methods.get(method).serves(tasks.get(data.task))


def parse_methods(text: str) -> list[tuple[str, dict[str, str]]]:
    """Parse `all`, or names with options such as `truncate:k=2`; the static baselines are always added."""
    known = [*methods.names(), TFIDF]
    wanted = [name for name in known if name not in ("truncate", TFIDF)] if text == "all" else text.split(",")
    listed = [item.strip() for item in [*STATIC, *wanted] if item.split(":")[0].strip() in known or item not in STATIC]
    chosen: list[tuple[str, dict[str, str]]] = []
    for item in dict.fromkeys(listed):
        name, _, options = item.partition(":")
        if name not in (TFIDF, methods.AUTO):
            methods.get(name)  # refuses an unknown name
        chosen.append((name, dict(pair.partition("=")[::2] for pair in options.split("+") if pair)))
    return chosen


def find_data_sets(folder: str, rows: int | None) -> list[DataSet]:
    """Return the data sets of a folder: those that its compare.yaml lists, else every folder with both splits."""
    root = Path(folder)
    if not root.is_dir():
        given = f"{folder}, which is not a folder"
        raise OfframpError("a folder of data sets", given, "give a folder with NAME/train.jsonl")
    if (root / "compare.yaml").is_file():
        return [_listed(root, name, about, rows) for name, about in _read_yaml(root / "compare.yaml").items()]
    found = [_find(path, rows) for path in [root, *sorted(p for p in root.iterdir() if p.is_dir())]]
    sets = [one for one in found if one is not None]
    if not sets:
        fix = "a data set is a folder with train.jsonl and test.jsonl or dev.jsonl (.csv, .tsv, .parquet; .gz)"
        raise OfframpError(f"data sets in {folder}", "no folder with a train and a report split", fix)
    return sets


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return dict(content)
    except (yaml.YAMLError, TypeError, ValueError) as error:
        form = "write NAME: {train: FILE, report: FILE, rows: N, max_length: N, task: NAME}"
        raise OfframpError("a list of data sets", f"{path}: {error}", form) from error


def _listed(root: Path, name: str, about: Mapping[str, Any], rows: int | None) -> DataSet:
    """Return a data set as compare.yaml describes it."""
    known = {"train", "report", "rows", "max_length", "task"}
    if not isinstance(about, Mapping) or not {"train", "report"} <= about.keys() <= known:
        form = f"{name}: {{train: FILE, report: FILE}} and, if needed, rows, max_length, task"
        raise OfframpError(f"the data set {name!r} in compare.yaml", repr(about)[:120], f"write {form}")
    train, report = (str(root / about[key]) for key in ("train", "report"))
    task = about.get("task") or _task_of_file(train)
    fewer = [count for count in (about.get("rows"), rows) if count is not None]
    return DataSet(name, train, report, task, min(fewer, default=None), about.get("max_length"))


def _find(folder: Path, rows: int | None) -> DataSet | None:
    """Return the data set that a folder holds, if it has a train and a report split."""
    files = {path.name.split(".")[0]: path for path in sorted(folder.iterdir()) if path.is_file()}
    report = next((str(files[name]) for name in REPORTED if name in files), None)
    if "train" not in files or report is None:
        return None
    return DataSet(folder.resolve().name, str(files["train"]), report, _task_of_file(str(files["train"])), rows)


def _task_of_file(file: str) -> str:
    """Return the task that the first row of a file looks like."""
    return tasks.name_for(read_rows(file, limit=1)[0])


def parse_duration(text: str) -> float:
    """Return `90m`, `2h` or `45s` as seconds."""
    number, unit = text[:-1], text[-1:]
    try:
        if unit in UNITS and float(number) > 0:
            return float(number) * UNITS[unit]
    except ValueError:
        pass
    raise OfframpError("a time limit", repr(text), "write it as 90m, 2h or 45s")


def write_rules(plan: ComparisonPlan, out: Path) -> None:
    """Write the rules of a plan into its folder; refuse a folder whose cells were measured under other rules."""
    rules = {"training": dict(plan.training), "sets": {one.name: asdict(one) for one in plan.sets}}
    path = out / RULES
    earlier = read_json(path) if path.is_file() else {"training": rules["training"], "sets": {}}
    known = {name: about for name, about in earlier["sets"].items() if name in rules["sets"]}
    if earlier["training"] != rules["training"] or any(about != rules["sets"][name] for name, about in known.items()):
        fix = "give the same --data, --rows, --epochs, --batch-size and --lr, or choose another --out"
        raise OfframpError(f"to continue the comparison in {out}", "cells there under other rules", fix)
    write_json(path, {**rules, "sets": {**earlier["sets"], **rules["sets"]}})


def collected_cells(folder: str | None, plan: ComparisonPlan) -> dict[str, ModelResult]:
    """Return the cells of a plan that a folder of results already holds, trained under the same rules, by name.

    TF-IDF is never collected: it is quicker to run again.
    """
    if folder is None or not Path(folder).is_dir():
        return {}
    known = {_result_key(one): one for one in collect_results(folder).entries}
    found = {cell.name: known.get(_cell_key(cell, plan)) for cell in plan.cells() if cell.method != TFIDF}
    return {name: one for name, one in found.items() if one is not None}


def _result_key(one: ModelResult) -> Key:
    trained: Mapping[str, Any] = one.cells[0].get("trained") or {}
    schedule = trained.get("schedule") or {}
    rules = (trained.get("limit"), trained.get("max_length"), *(schedule.get(name) for name in SCHEDULE))
    return one.data, one.split, one.model, one.method, one.variant, one.seed, one.from_fine_tuned, *rules


def _cell_key(cell: ComparisonCell, plan: ComparisonPlan) -> Key:
    schedule = asdict(Schedule(**plan.training))
    rules = (cell.data.rows, cell.data.max_length, *(schedule[name] for name in SCHEDULE))
    named = (*data_and_split(cell.data.report), model_name(cell.model), cell.method, variant_label(cell.options))
    return *named, cell.seed, cell.method != "full", *rules


def time_runs(
    cells: list[ComparisonCell], out: Path, rows: int, command: str, note: Callable[[str], None] = lambda _: None
) -> dict[str, str]:
    """Time every run of a finished comparison in turn; return what could not be timed, by cell.

    Bench files are written beside the cells, and none is written twice.
    """
    broken = {}
    for cell in cells:
        run, keep = out / "runs" / cell.name, out / "cells" / f"bench-{cell.name}.json"
        if not is_run(run) or keep.is_file():
            continue
        note(f"timing {cell.name}")
        plain = cell.method == "full"
        against, budgets = (PEERS, TIMED_BUDGETS[:1]) if plain else ((), TIMED_BUDGETS)
        plan = BenchPlan((1, 32), budgets, ("auto",), against, ("fp32",), ("given",), 3, torch.get_num_threads(), False)
        fresh = keep.with_suffix(".part")
        try:
            given = read_rows(cell.data.report, limit=rows)
            with tempfile.TemporaryDirectory() as work:
                output = BenchOutput(fresh, work, command)
                run_bench(str(run), given, cell.data.report, plan, output, SilentWatcher())
            fresh.replace(keep)
        except OfframpError as error:
            broken[cell.name] = str(error)
    return broken
