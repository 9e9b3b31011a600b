"""Policies that do one thing at a stated moment: the smallest users of the loop."""

from __future__ import annotations

import torch
from torch import Tensor

from offramp.core.attention import Scores
from offramp.core.loop import State
from offramp.core.policy import Policy


class Leave(Policy):
    """Rows (by their number in the batch) leave after a layer."""

    def __init__(self, plan: dict[int, list[int]]) -> None:
        self.plan = plan

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        return torch.isin(s.packed.rows["origin"], torch.tensor(self.plan.get(layer, []), dtype=torch.int64))


class Drop(Policy):
    """From a layer on each row keeps its first n tokens."""

    def __init__(self, plan: dict[int, int], moment: str) -> None:
        self.plan, self.moment = plan, moment

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        return self._keep(layer, s) if self.moment == "enter" else None

    def after_attention(self, layer: int, s: State, scores: Scores | None) -> Tensor | None:
        return self._keep(layer, s) if self.moment == "attended" else None

    def _keep(self, layer: int, s: State) -> Tensor | None:
        return s.packed.tokens["position"] < self.plan[layer] if layer in self.plan else None


class Gate(Policy):
    """Every token gets a gate by its position before each layer; the plan maps (layer, position) → gate."""

    def __init__(self, plan: dict[int, list[float]]) -> None:
        self.plan = plan

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        gates = torch.tensor(self.plan.get(layer, [1.0]))
        place = s.packed.tokens["position"].clamp(max=len(gates) - 1)
        s.packed = s.packed.with_tokens(gate=gates[place])
        return None
