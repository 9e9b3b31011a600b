"""`offramp bench` as a function: saved operations against saved time, and against everybody else, on this machine.

All contenders live in one process and answer the same batches in turn. The clock runs from token ids (lists) to logits
(arrays): packing or padding, the model, and for ours the accounting of compute, are in; tokenising is the same for all
and told apart. Every number is written with what it takes to repeat it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from offramp.engines import AUTO
from offramp.errors import OfframpError
from offramp.evaluation import bench_file as benchfile
from offramp.evaluation.contenders import (
    FULL,
    Contender,
    ContenderOutput,
    Contenders,
    EveryLayer,
    full_settings,
    list_contenders,
    open_contender,
    settings_for_budget,
)
from offramp.evaluation.course import ORDERS, BenchData, Exits, Predictions, Row, prepare_bench_data
from offramp.evaluation.peers import BenchModel, EncodedBatch
from offramp.evaluation.subprocesses import run_fresh
from offramp.evaluation.timing import time_in_turns, turn_count
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe

Array = NDArray[np.float64]
Disagreement = dict[str, float | None]  # answers and exits; None: there are none to compare


@dataclass(frozen=True)
class BenchPlan:
    """What is measured; the defaults are those of the command."""

    batch_sizes: tuple[int, ...] = (1, 8, 32)
    budgets: tuple[str, ...] = (FULL, "0.5", "0.3")
    engines: tuple[str, ...] = (AUTO,)
    against: tuple[str, ...] = ("hf", "hf-compile", "onnxruntime", "openvino")
    precisions: tuple[str, ...] = ("fp32", "bf16", "int8")
    orders: tuple[str, ...] = ORDERS
    rounds: int = 5
    threads: int = 1
    memory: bool = True

    def __post_init__(self) -> None:
        wrong = [name for name in self.orders if name not in ORDERS]
        if wrong or not self.orders:
            raise OfframpError("orders of rows", ",".join(self.orders), f"use some of: {', '.join(ORDERS)}")
        if not self.batch_sizes or min(self.batch_sizes) < 1 or self.rounds < 1 or self.threads < 1:
            given = f"batch sizes {list(self.batch_sizes)}, {self.rounds} rounds, {self.threads} threads"
            raise OfframpError("how to measure", given, "give whole numbers from 1 on")
        if not self.engines or not self.precisions:
            raise OfframpError("somebody to measure", "no engine or no precision", "give e.g. --engines torch")

    def groups(self) -> list[tuple[int, str]]:
        """Batch sizes and orders, each measured for itself; single rows have but one order."""
        first = "given" if "given" in self.orders else "sorted"
        return [(size, order) for size in self.batch_sizes for order in self.orders if size > 1 or order == first]


class BenchWatcher(Protocol):
    """Who is told what happens."""

    def phase(self, name: str, total: int) -> None:
        """A new part of the work, of so many steps."""

    def tick(self) -> None:
        """One step done."""


class SilentWatcher:
    """Ignores how far a bench is."""

    def phase(self, name: str, total: int) -> None:
        """Ignore the beginning of a phase."""

    def tick(self) -> None:
        """Ignore a step."""


@dataclass(frozen=True)
class BenchMeasurement:
    """One contender on one group."""

    seconds: Array  # [calls, rounds]
    metrics: dict[str, float]
    share: float | None  # of the full model's MACs; None for peers, who spend all
    peak_mb: float | None
    disagrees: Disagreement | None = None  # with the same in fp32; None: it is, or was not measured


@dataclass(frozen=True)
class FirstPass:
    """What somebody said in the first pass."""

    metrics: dict[str, float]
    share: float | None
    answers: Predictions | None
    exits: Exits | None  # None for peers


@dataclass(frozen=True)
class BenchOutput:
    """Where a bench file goes, where conversions are kept, and what the file says of its origin."""

    keep: Path | None
    work: str
    command: str


def run_bench(
    run: str, rows: Sequence[Row], source: str, plan: BenchPlan, where: BenchOutput, watch: BenchWatcher
) -> dict[str, Any]:
    """Measure all groups; the file is written after each, and a file that was cut short is gone on with."""
    if not rows:
        raise OfframpError("rows to measure on", f"none in {source}", "give a file with labelled rows")
    torch.set_num_threads(plan.threads)
    model = Predictor.load(run, "torch")
    lane = prepare_bench_data(model, rows, source)
    ground = BenchModel(run, model.task.auto_class, where.work, plan.threads)
    budgets = plan.budgets if FULL in plan.budgets else (FULL, *plan.budgets)
    field = Contenders(ground, [(budget, settings_for_budget(model, budget)) for budget in budgets])
    if isinstance(whole := full_settings(model), EveryLayer):
        field.labels.insert(0, (whole.label, whole))
    entered = list_contenders(field, plan.engines, plan.against, plan.precisions)
    about = benchfile.bench_header(model, lane, source, where.command, {**asdict(plan), "seed": _seed(run)})
    entries = benchfile.finished_entries(where.keep, about)
    known = {(entry["batch_size"], entry["order"]) for entry in entries}
    missing = [group for group in plan.groups() if group not in known]
    if missing:
        watch.phase("opening everybody", len(entered))
        for contender in entered:
            field.enter(contender)
            watch.tick()
    made: dict[str, Any] = {}
    for place, (size, order) in enumerate([*missing, (0, "")]):
        unfinished = [list(group) for group in missing[place:]]
        failed = [asdict(one) for one in field.failed]
        made = {**about, "date": _today(), "rows": entries, "failed": failed, "unfinished": unfinished}
        if where.keep is not None:
            benchfile.write(where.keep, made)
        if unfinished:
            found = measure_group(field, lane, (size, order), plan, watch)
            entries = [*entries, *benchfile.bench_entries(found, field.labels, len(rows), (size, order))]
    return made


def _seed(run: str) -> int | None:
    seed: int | None = read_recipe(run).get("schedule", {}).get("seed")
    return seed


def _today() -> str:
    return datetime.date.today().isoformat()


def measure_group(
    field: Contenders, lane: BenchData, group: tuple[int, str], plan: BenchPlan, watch: BenchWatcher
) -> dict[Contender, BenchMeasurement]:
    """One batch size in one order: a pass to warm up and to score, interleaved rounds, then memory."""
    size, order = group
    calls = lane.calls(size, order)
    batches = [lane.batch(call) for call in calls]
    watch.phase(f"batch {size}, rows {order}: warming up", len(field.opened))
    scored = dict(_first_pass(field, lane, calls, watch))
    names = list(scored)
    watch.phase(f"batch {size}, rows {order}: measuring", turn_count(len(names), len(calls), plan.rounds))

    def work(contender: Contender, batch: EncodedBatch) -> ContenderOutput:
        return field.opened[contender](batch)

    taken = time_in_turns(work, names, batches, plan.rounds, watch.tick) if names else {}
    peaks: dict[Contender, float | None] = dict.fromkeys(names)
    if plan.memory:
        watch.phase(f"batch {size}, rows {order}: memory", len(names))
        peaks = {name: _peak(field.ground, name, lane.heaviest(calls), watch) for name in names}
    return {
        name: BenchMeasurement(taken[name], one.metrics, one.share, peaks[name], _disagrees(lane, name, scored))
        for name, one in scored.items()
    }


def _disagrees(lane: BenchData, contender: Contender, scored: Mapping[Contender, FirstPass]) -> Disagreement | None:
    """How often somebody in low precision answers or leaves otherwise than the same one in fp32."""
    one, exact = scored[contender], scored.get(replace(contender, precision="fp32"))
    if exact is None or contender.precision == "fp32":
        return None
    answers = exits = None
    if one.answers is not None and exact.answers is not None:
        answers = round(float(np.mean(lane.task.disagreement(one.answers, exact.answers))), 6)
    if one.exits is not None and exact.exits is not None:
        exits = round(lane.moved(one.exits, exact.exits), 6)
    return {"answers": answers, "exits": exits}


def _first_pass(
    field: Contenders, lane: BenchData, calls: Sequence[list[int]], watch: BenchWatcher
) -> Iterator[tuple[Contender, FirstPass]]:
    """Everybody answers every batch once, off the clock: metrics, and of ours the share of MACs and the exits."""
    for contender in list(field.opened):
        notes: list[Any] = [None] * len(lane.data.encoded)
        spent, exits = 0.0, np.zeros(len(notes))
        try:
            for call in calls:
                said = field.opened[contender](lane.batch(call))
                spent += 0.0 if said.macs is None else float(said.macs.sum())
                exits[call] = 0.0 if said.exits is None else said.exits
                for place, note in zip(call, lane.note(call, said.logits), strict=True):
                    notes[place] = note
        except Exception as error:  # a graph that converts may still not run
            field.drop(contender, error)
        else:
            answers = lane.answers(notes)
            share, left = (None, None) if contender.peer else (spent / lane.full_macs, exits)
            yield contender, FirstPass(lane.score(notes, answers), share, answers, left)
        watch.tick()


def _peak(
    ground: BenchModel, contender: Contender, batches: Sequence[EncodedBatch], watch: BenchWatcher
) -> float | None:
    watch.tick()
    try:
        return run_fresh(run_alone, ground, contender, batches, library=contender.peer or contender.engine).peak_mb
    except (OfframpError, RuntimeError):  # it ran in this process: its memory stays unknown, its times do not
        return None


def run_alone(ground: BenchModel, contender: Contender, batches: Sequence[EncodedBatch]) -> None:
    """What a fresh process does to show its memory."""
    torch.set_num_threads(ground.threads)
    answer = open_contender(ground, contender)
    for batch in batches:
        answer(batch)
