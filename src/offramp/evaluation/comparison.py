"""A comparison of methods: its plan, the rules that make it fair, and the timing of its runs.

The rules: every method starts from the same fine-tuned model of its data set, model and seed (`--init`); every stage
gets the same number of epochs, batch size and learning rate; settings are chosen on held-out training rows and
reported on other rows; compute is counted without padding and with all heads; the static baselines are always included.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from offramp import methods, tasks
from offramp.data.readers import read_rows, stream_rows
from offramp.errors import OfframpError
from offramp.evaluation.bench import BenchOutput, BenchPlan, SilentWatcher, run_bench
from offramp.evaluation.collect import ModelResult, collect_results, variant_label
from offramp.evaluation.demo_data import MINILM
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
    label: str | None = None  # what the model is called where another one of the plan has the same name

    @property
    def name(self) -> str:
        """A file name for the cell."""
        chosen = "".join(f"-{key}{value}" for key, value in sorted(self.options.items()))
        return f"{self.data.name}-{self.label or Path(self.model).name}-{self.method}{chosen}-s{self.seed}"

    @property
    def model_in_results(self) -> str:
        """The model's name in result cells and bench files."""
        return self.label or model_name(self.model)


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
        labels = names_of_models(self.models)
        listed = [
            ComparisonCell(data, model, method, options, seed, labels[model])
            for seed in self.seeds
            for data in self.sets
            for model in self.models
            for method, options in self.methods
            if method_serves(method, data)
        ]
        twice = [name for name, count in Counter(cell.name for cell in listed).items() if count > 1]
        if twice:
            fix = "give every data set and every method once, under names of their own"
            raise OfframpError("cells with different names", f"several cells named {twice[0]}", fix)
        return sorted(listed, key=lambda cell: (self.seeds.index(cell.seed), cell.method != "full"))


def names_of_models(models: Sequence[str]) -> dict[str, str | None]:
    """Return, for each model, what it is called where its usual name is another one's too; None elsewhere.

    Folders around it are put in front until the name is its own.
    """
    places = [
        str(Path(model).expanduser().resolve()) if Path(model).expanduser().exists() else model for model in models
    ]
    twice = [model for number, model in enumerate(models) if places[number] in places[:number]]
    if twice:
        raise OfframpError("models to compare", f"{twice[0]} twice", "give every model once")
    names = [_names_of(model, place) for model, place in zip(models, places, strict=True)]
    return {model: _own_name(names[n], [*names[:n], *names[n + 1 :]]) for n, model in enumerate(models)}


def _names_of(model: str, place: str) -> list[str]:
    """Return what a model may be called: its last folder, its name in results, then with more and more folders."""
    parts = [part for part in Path(place).parts if part not in ("/", "~")]
    return [Path(model).name, model_name(model), *("-".join(parts[-count:]) for count in range(2, len(parts) + 1))]


def _own_name(names: Sequence[str], others: Sequence[Sequence[str]]) -> str | None:
    """Return the shortest name that no other model may have; None if the usual ones are not shared."""
    if not any(set(names[:2]) & set(other[:2]) for other in others):
        return None
    taken = {name for other in others for name in other}
    free = [name for name in names[1:] if name not in taken]
    if not free:
        raise OfframpError("models with different names", f"{names[-1]} twice", "rename one of the folders")
    return free[0]


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
    """Return the task that the first rows of a file look like."""
    return tasks.name_for_rows(stream_rows(file))


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
    labels = names_of_models(plan.models)
    named = {labels[model] or Path(model).name: _source_in_rules(model) for model in plan.models}
    rules = {
        "training": dict(plan.training),
        "sets": {one.name: asdict(one) for one in plan.sets},
        "models": named,
    }
    path = out / RULES
    earlier = {"training": rules["training"], "sets": {}, "models": {}, **(read_json(path) if path.is_file() else {})}
    if earlier["training"] != rules["training"] or _differ(earlier["sets"], rules["sets"]):
        fix = "give the same --data, --rows, --epochs, --batch-size and --lr, or choose another --out"
        raise OfframpError(f"to continue the comparison in {out}", "cells there under other rules", fix)
    if _differ(earlier["models"], named):
        given = f"cells there of other models with the same names: {', '.join(sorted(earlier['models'].values()))}"
        raise OfframpError(f"to continue the comparison in {out}", given, "choose another --out")
    joined = {name: {**earlier[name], **rules[name]} for name in ("sets", "models")}
    write_json(path, {**rules, **joined})


def _differ(earlier: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a name that both have stands for something else."""
    return any(about != wanted[name] for name, about in earlier.items() if name in wanted)


def _source_in_rules(model: str) -> str:
    """Return where a model comes from; of the one that a package carries its name, as environments may move."""
    return MINILM if model_name(model) == MINILM else str(Path(model).expanduser())


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
    named = (*data_and_split(cell.data.report), cell.model_in_results, cell.method, variant_label(cell.options))
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
            if cell.label is not None:
                write_json(fresh, {**read_json(fresh), "model": cell.label})
            fresh.replace(keep)
        except OfframpError as error:
            broken[cell.name] = str(error)
    return broken
