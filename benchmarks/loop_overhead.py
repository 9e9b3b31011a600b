"""Microseconds a layer that the loop and a policy cost at batch 1, beside an engine and heads that compute nothing.

    python benchmarks/loop_overhead.py --out results/trec/bench/loop-overhead.json

Best of many runs, one thread; timings count only on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from offramp import __version__
from offramp.core.engine import Engine
from offramp.core.layout import Layout, Scores
from offramp.core.loop import run
from offramp.core.packed import Packed, pack
from offramp.core.policy import Policy
from offramp.evaluation.result_cells import hardware
from offramp.nn.confidence import row_entropy
from offramp.tasks.classification import Task
from offramp.utils.files import write_json

DEPTH, WIDTH, LENGTH = 12, 384, 16
STATES, LOGITS = torch.zeros(LENGTH, WIDTH), torch.zeros(1, 6)


@dataclass(frozen=True)
class Nothing(Engine):
    """An engine and heads that give the same tensors whatever they are asked."""

    per_token = False

    @property
    def depth(self) -> int:
        return DEPTH

    def embed(self, packed: Packed) -> Tensor:
        return STATES

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, Scores | None]:
        return queries, None

    def feed(self, layer: int, x: Tensor) -> Tensor:
        return x

    def whole(self, layers: range, x: Tensor, where: Layout) -> Tensor:
        return x

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        return LOGITS

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        raise NotImplementedError

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        raise NotImplementedError


class Entropy(Policy):
    """Asks every off-ramp and lets nobody leave."""

    def __init__(self) -> None:
        self.task = Task(tuple("abcdef"))

    def should_exit(self, layer: int, s: object) -> Tensor | None:
        return row_entropy(self.task, s.logits(), s.packed) < 0.0  # type: ignore[attr-defined]


class Halves(Policy):
    """Looks between the halves of every layer."""

    def after_attention(self, layer: int, s: object, scores: Scores | None) -> Tensor | None:
        return None


def per_layer(policy: Policy, rounds: int = 200) -> float:
    """Microseconds a layer, best of many runs."""
    packed, nothing = pack([list(range(LENGTH))]), Nothing()

    def once() -> None:
        with torch.inference_mode():
            run(nothing, nothing, policy, packed)

    return best(once, rounds) / DEPTH * 1e6


def best(job: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of many calls."""
    fastest = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        job()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    policies = {"every exit asked": Entropy(), "between the halves": Halves()}
    result = {
        "what": f"microseconds a layer around the engine at batch 1, {DEPTH} layers, best of 2000 runs",
        "microseconds_a_layer": {name: round(per_layer(policy, 2000), 1) for name, policy in policies.items()},
        "hardware": hardware(),
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }
    write_json(Path(args.out), result)
    print(result["microseconds_a_layer"])


if __name__ == "__main__":
    main()
