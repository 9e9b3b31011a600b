"""What a bench of speed does not show: time against rows, the second start, and what the loop costs by itself."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offramp.commands.predict import predict_stream
from offramp.core.attention import Layout, Scores
from offramp.core.engine import Engine
from offramp.core.loop import State, run
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.evaluation.contenders import buy, predictor
from offramp.evaluation.peers import Ground, Variant
from offramp.evaluation.subprocesses import fresh
from offramp.inference.batching import run_packed
from offramp.inference.predictor import Predictor
from offramp.nn.batches import pack_rows
from offramp.utils.files import write_text

Row = Mapping[str, Any]
SIZES = (1000, 2000, 4000, 8000, 16000)
WARM = 64  # rows that the loop alone is timed on


@dataclass(frozen=True)
class Setup:
    """Whom to look at, and how often."""

    ground: Ground
    variant: Variant
    budget: str = "1.0"
    batch_size: int = 32
    rounds: int = 3


def growth(setup: Setup, rows: Sequence[Row], sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Seconds and memory of `offramp predict` over files of growing length, each in a process that has read it before.

    What the first time takes is told beside it: compiled graphs meet numbers of tokens for the first time there.
    """
    first: dict[int, list[float]] = {size: [] for size in sizes}
    again: dict[int, list[float]] = {size: [] for size in sizes}
    peaks: dict[int, list[float]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as folder:
        files = {size: _write(Path(folder) / f"{size}.jsonl", rows, size) for size in sizes}
        for _, size in itertools.product(range(setup.rounds), sizes):
            given = (setup, [files[size]] * 2, str(Path(folder) / "out"))
            (opening, seconds), peak = fresh(_stream, *given, library=setup.variant.engine)
            first[size].append(opening)
            again[size].append(seconds)
            peaks[size] += [] if peak is None else [peak]
    seconds_, cold = ({size: min(times) for size, times in taken.items()} for taken in (again, first))
    memory = {size: statistics.median(found) if found else None for size, found in peaks.items()}
    return {"what": "growth", "sizes": list(sizes), "seconds": list(seconds_.values()), **linear(seconds_),
            "seconds_each_round": list(again.values()), "peak_mb": list(memory.values()), **_flat(memory),
            "seconds_first_time": list(cold.values())}  # fmt: skip


def linear(seconds: Mapping[int, float]) -> dict[str, float]:
    """A straight line through what was measured (least relative squares), and how far from it anything is."""
    sizes, took = np.array(list(seconds), dtype=np.float64), np.array(list(seconds.values()))
    design = np.stack([sizes, np.ones_like(sizes)], axis=1) / took[:, None]
    (rate, start), *_ = np.linalg.lstsq(design, np.ones_like(took), rcond=None)
    left = np.abs((rate * sizes + start) / took - 1.0)
    return {
        "ms_per_row": round(1000 * float(rate), 5),
        "departure_from_line": round(float(left.max()), 5),
        "per_row_last_over_first": round(float((took[-1] / sizes[-1]) / (took[0] / sizes[0])), 5),
    }


def _flat(memory: Mapping[int, float | None]) -> dict[str, Any]:
    first, *_, last = memory.values()
    return {"memory_last_over_first": None if first is None or last is None else round(last / first, 4)}


def _write(path: Path, rows: Sequence[Row], size: int) -> str:
    chosen = itertools.islice(itertools.cycle(rows), size)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen))
    return str(path)


def _stream(setup: Setup, sources: Sequence[str], output: str) -> list[float]:
    """In a fresh process: the whole command but its start, for one file after the other."""
    torch.set_num_threads(setup.ground.threads)
    model = predictor(setup.ground, setup.variant)
    settings, taken = buy(model, setup.budget), []
    for source in sources:
        started = time.perf_counter()
        predict_stream(model, source, output, settings, setup.batch_size, {})
        taken.append(time.perf_counter() - started)
    return taken


def startup(setup: Setup, rows: Sequence[Row]) -> dict[str, Any]:
    """Load to first prediction, libraries imported, in fresh processes; the first may have had to compile."""
    times = [fresh(_first_answer, setup, rows[0], library=setup.variant.engine).result for _ in range(setup.rounds + 1)]
    helps = [_seconds([sys.executable, "-m", "offramp.cli", "--help"]) for _ in range(setup.rounds)]
    return {
        "what": "startup",
        "first_seconds": round(times[0], 4),
        "second_seconds": round(times[1], 4),
        "best_seconds": round(min(times[1:]), 4),
        "help_seconds": round(min(helps), 4),
    }


def _first_answer(setup: Setup, row: Row) -> float:
    torch.set_num_threads(setup.ground.threads)
    started = time.perf_counter()
    model = predictor(setup.ground, setup.variant)
    encoded = model.prepare([row])
    model.finish([row], encoded, model.run(encoded, buy(model, setup.budget), 1))
    return time.perf_counter() - started


def _seconds(command: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


class Looks(Policy):
    """Asks after every layer whether rows may leave, and lets nobody; between its halves too, if told to."""

    def __init__(self, halves: bool) -> None:
        self.halves = halves

    def wants_attended(self, layer: int) -> bool:
        return self.halves

    def should_exit(self, layer: int, s: State) -> torch.Tensor:
        return torch.zeros(s.packed.count, dtype=torch.bool)


@dataclass(frozen=True)
class Nothing(Engine):
    """An engine and heads that compute nothing, for a model of any depth: what is left is the loop."""

    layers: int
    hidden: int
    outputs: int
    per_token: bool

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.layers

    def embed(self, packed: Packed) -> torch.Tensor:
        """Zeros."""
        return torch.zeros(packed.total, self.hidden)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, where: Layout, scores: bool
    ) -> tuple[torch.Tensor, Scores | None]:
        """What came in."""
        return queries, None

    def feed(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """What came in."""
        return x

    def __call__(self, layer: int, packed: Packed) -> torch.Tensor:
        """No opinion."""
        return torch.zeros(packed.total if self.per_token else packed.count, self.outputs)

    def exit_unit(self, layer: int, packed: Packed) -> torch.Tensor:
        """No doubt."""
        return torch.zeros(packed.count)

    def predictor(self, layer: int, packed: Packed) -> torch.Tensor:
        """No prediction."""
        return torch.zeros(packed.total)


def overhead(model: Predictor, rows: Sequence[Row], rounds: int) -> dict[str, Any]:
    """Microseconds of the loop for a layer at batch 1, beyond the engine: the slope over two depths of nothing."""
    network, task = model.network, model.task
    packs = [pack_rows(task, [encoded]) for encoded in model.prepare(rows[:WARM])]
    wide, outputs = network.encoder.hidden, max(1, task.outputs)
    short, long = (Nothing(n * network.depth, wide, outputs, network.per_token) for n in (1, 2))

    def loop(engine: Nothing, halves: bool, packed: Packed) -> None:
        with torch.inference_mode():
            run(engine, engine, Looks(halves), packed)

    def counted(engine: Nothing, halves: bool, packed: Packed) -> None:
        run_packed(network, engine, Looks(halves), packed, engine)

    jobs = {"short": (loop, short, False), "long": (loop, long, False), "counted": (counted, short, False),
            "short halves": (loop, short, True), "long halves": (loop, long, True)}  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _, (name, (work, engine, halves)) in itertools.product(range(10 * rounds), jobs.items()):
        started = time.perf_counter()
        for packed in packs:
            work(engine, halves, packed)
        taken[name].append(1e6 * (time.perf_counter() - started) / len(packs))
    least = {name: min(times) for name, times in taken.items()}
    return {
        "what": "overhead",
        "us_per_layer": round((least["long"] - least["short"]) / network.depth, 3),
        "us_per_layer_in_halves": round((least["long halves"] - least["short halves"]) / network.depth, 3),
        "us_per_call": round(2 * least["short"] - least["long"], 3),
        "us_counting": round(least["counted"] - least["short"], 3),
        "layers": network.depth,
    }
