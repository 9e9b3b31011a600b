"""The loop stays thin: what it costs beside an engine that computes nothing."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from offramp.core.engine import Engine
from offramp.core.layout import Layout, Scores
from offramp.core.loop import State, run
from offramp.core.packed import Packed, pack
from offramp.core.policy import Policy
from offramp.nn.confidence import row_entropy
from offramp.tasks.classification import Task

DEPTH, STATES, LOGITS = 12, torch.zeros(16, 64), torch.zeros(1, 6)


class Nothing(Engine):
    """An engine and heads that give the same tensors whatever they are asked."""

    per_token = False
    depth = DEPTH

    def embed(self, packed: Packed) -> Tensor:
        return STATES

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, Scores | None]:
        return queries, None

    def feed(self, layer: int, x: Tensor) -> Tensor:
        return x

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        return LOGITS

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        raise NotImplementedError

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        raise NotImplementedError


class Entropy(Policy):
    """Asks every off-ramp and lets nobody leave."""

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        return row_entropy(Task(tuple("abcdef")), s.logits(), s.packed) < 0.0


def test_the_loop_and_an_exit_rule_cost_little_per_layer() -> None:
    """60 µs is what an idle machine must reach (benchmarks/loop_overhead.py); a loaded one gets four times that."""
    packed, nothing, policy, fastest = pack([list(range(16))]), Nothing(), Entropy(), float("inf")
    with torch.inference_mode():
        for _ in range(150):
            started = time.process_time()
            run(nothing, nothing, policy, packed)
            fastest = min(fastest, time.process_time() - started)
    assert fastest / DEPTH < 240e-6
