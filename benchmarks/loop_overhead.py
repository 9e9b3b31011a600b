"""Microseconds that the loop and a policy cost at batch 1, measured with an engine and heads that compute nothing.

    python benchmarks/loop_overhead.py --json loop-overhead.json                    # 12 layers of width 384
    python benchmarks/loop_overhead.py RUN --data rows.jsonl --json overhead.json   # the shape and rows of a run

With a run, the cost of a layer is the slope between a model of its depth and one of twice its depth, so that the fixed
cost of a call is reported separately. Best of many repetitions, one thread; timings are meaningful only on an idle
machine.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offramp import __version__
from offramp.core.engine import Engine
from offramp.core.layout import AttentionScores, Layout
from offramp.core.loop import State, run
from offramp.core.packed import Packed, pack
from offramp.core.policy import Policy
from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.evaluation.result_cells import data_and_split, hardware, model_name
from offramp.inference.batching import run_packed
from offramp.inference.predictor import Predictor
from offramp.nn.batches import pack_rows
from offramp.nn.confidence import row_entropy
from offramp.tasks.classification import ClassificationTask
from offramp.utils.command_line import command_line, key_values
from offramp.utils.files import write_json

PROGRAM = "python benchmarks/loop_overhead.py"
DEPTH, WIDTH, LENGTH = 12, 384, 16
ROWS = 64  # of a run's data, timed one by one


@dataclass(frozen=True)
class NoOpEngine(Engine):
    """An engine and exit heads that compute nothing, for a model of any depth: what is left is the loop."""

    layers: int
    hidden: int
    outputs: int
    per_token: bool = False

    @property
    def depth(self) -> int:
        """The number of layers."""
        return self.layers

    def embed(self, packed: Packed) -> Tensor:
        """Return zeros."""
        return torch.zeros(packed.total, self.hidden)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, AttentionScores | None]:
        """Return the input."""
        return queries, None

    def feed(self, layer: int, x: Tensor) -> Tensor:
        """Return the input."""
        return x

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        """Return logits of zero."""
        return torch.zeros(packed.total if self.per_token else packed.count, self.outputs)

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        """Return zeros."""
        return torch.zeros(packed.count)

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        """Return zeros."""
        return torch.zeros(packed.total)


class EvaluateExitsPolicy(Policy):
    """Evaluates every exit head; no row exits."""

    def __init__(self) -> None:
        self.task = ClassificationTask(tuple("abcdef"))

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        return row_entropy(self.task, s.logits(), s.packed) < 0.0


class NeverExitPolicy(Policy):
    """Is consulted after every layer, evaluates no exit head; no row exits."""

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        return torch.zeros(s.packed.count, dtype=torch.bool)


class AfterAttentionPolicy(Policy):
    """Is consulted between attention and feed-forward of every layer; drops no token."""

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        return None


class NeverExitInHalvesPolicy(NeverExitPolicy, AfterAttentionPolicy):
    """Is consulted after the attention and after the end of every layer."""


def fastest(job: Callable[[], object], repetitions: int) -> float:
    """Return the seconds of the fastest of many calls."""
    best = float("inf")
    for _ in range(repetitions):
        started = time.perf_counter()
        job()
        best = min(best, time.perf_counter() - started)
    return best


def layer_overhead(policy: Policy, repetitions: int = 200) -> float:
    """Return microseconds a layer of one row through a model that computes nothing."""
    packed, engine = pack([list(range(LENGTH))]), NoOpEngine(DEPTH, WIDTH, 6)

    def call() -> None:
        with torch.inference_mode():
            run(engine, engine, policy, packed)

    return fastest(call, repetitions) / DEPTH * 1e6


def run_overhead(model: Predictor, rows: Sequence[Mapping[str, Any]], rounds: int) -> dict[str, Any]:
    """Return microseconds of the loop for a layer and for a call, at batch 1, in the shape of a run."""
    network, task = model.network, model.task
    batches = [pack_rows(task, [encoded]) for encoded in model.prepare(rows[:ROWS])]
    hidden, outputs = network.encoder.hidden, max(1, task.outputs)
    short, long = (NoOpEngine(n * network.depth, hidden, outputs, network.per_token) for n in (1, 2))
    layers, halves = NeverExitPolicy(), NeverExitInHalvesPolicy()

    def loop(engine: NoOpEngine, policy: Policy, packed: Packed) -> None:
        with torch.inference_mode():
            run(engine, engine, policy, packed)

    def counted(engine: NoOpEngine, policy: Policy, packed: Packed) -> None:
        run_packed(network, engine, policy, packed, engine)

    jobs = {"short": (loop, short, layers), "long": (loop, long, layers), "counted": (counted, short, layers),
            "short halves": (loop, short, halves), "long halves": (loop, long, halves)}  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _, (name, (work, engine, policy)) in itertools.product(range(10 * rounds), jobs.items()):
        started = time.perf_counter()
        for packed in batches:
            work(engine, policy, packed)
        taken[name].append(1e6 * (time.perf_counter() - started) / len(batches))
    least = {name: min(times) for name, times in taken.items()}
    return {
        "us_per_layer": round((least["long"] - least["short"]) / network.depth, 3),
        "us_per_layer_in_halves": round((least["long halves"] - least["short halves"]) / network.depth, 3),
        "us_per_call": round(2 * least["short"] - least["long"], 3),
        "us_counting": round(least["counted"] - least["short"], 3),
        "layers": network.depth,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the loop alone, or in the shape of a run."""
    if options.run is None:
        policies = {"every exit evaluated": EvaluateExitsPolicy(), "between the halves": AfterAttentionPolicy()}
        what = f"microseconds a layer around the engine at batch 1, {DEPTH} layers, best of {options.repetitions} runs"
        times = {name: round(layer_overhead(one, options.repetitions), 1) for name, one in policies.items()}
        return {"what": what, "microseconds_a_layer": times}
    model = Predictor.load(options.run, "torch")
    rows = read_rows(options.data, columns=key_values(options.column, "--column"), limit=ROWS)
    model.task.check_inputs(rows, options.data)
    about = {"model": model_name(model.model.base_model), "method": model.model.method.name}
    return {
        "what": "overhead",
        "data": "/".join(data_and_split(options.data)),
        **about,
        **run_overhead(model, rows, options.rounds),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="a folder that `offramp train` wrote")
    parser.add_argument("--data", help="rows, with a run")
    parser.add_argument("--column", action="append", metavar="NAME=COLUMN", help="rename a column")
    parser.add_argument("--rounds", type=int, default=5, help="with a run: tens of repetitions")
    parser.add_argument("--repetitions", type=int, default=2000, help="without a run")
    parser.add_argument("--json", "--out", help="write the numbers here")
    options = parser.parse_args(arguments)
    if (options.run is None) != (options.data is None):
        parser.error("give a run and --data together, or neither")
    torch.set_num_threads(1)
    try:
        found = measure(options)
    except OfframpError as error:
        sys.exit(str(error))
    source = {"hardware": hardware(), "command": command_line(PROGRAM), "version": __version__}
    result = {**found, **source, "date": datetime.date.today().isoformat()}
    if options.json:
        write_json(Path(options.json), result)
    for name, value in found.get("microseconds_a_layer", found).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
