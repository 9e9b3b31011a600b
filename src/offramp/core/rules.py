"""Exit policies as plain data: an engine that understands a rule runs a whole batch without returning to Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offramp.core.columns import ORIGIN
from offramp.core.cost import CostModel, Event, SummedTrace
from offramp.core.packed import Packed

Measure = Literal["entropy", "normalised_entropy", "least_confidence", "exit_unit", "patience"]


@dataclass(frozen=True)
class ExitRule:
    """Exit at the first exit whose measure is below its threshold; for patience, after enough equal answers in a row.

    Measures of one distribution per row: entropy in nats, entropy as a share of the largest possible, one minus the
    largest probability, or the output of a learned unit. Patience counts comparisons of neighbouring exits that agree.
    """

    measure: Measure
    exits: tuple[int, ...]  # layers with an exit head that the rule may consult, ascending; 0: on the embeddings
    thresholds: tuple[float, ...] = ()  # one for each exit; 0: never exits there and does not consult it
    temperatures: tuple[float, ...] = ()  # what each exit's logits are divided by; empty: 1
    patience: int = 0  # agreeing comparisons that are needed; 0: never exits
    tolerance: float = 0.0  # numbers (regression) agree when they differ by less
    by_row: bool = False  # thresholds (or patience) come from the row columns THRESHOLDS (or PATIENCE)

    @cached_property
    def consulted(self) -> tuple[int, ...]:
        """Exits that are evaluated for every row that reaches them."""
        if self.measure == "patience":
            return self.exits if self.patience > 0 or self.by_row else ()
        if self.by_row:
            return self.exits
        return tuple(layer for layer, limit in zip(self.exits, self.thresholds, strict=True) if limit > 0.0)


def rule_trace(rule: ExitRule, packed: Packed, exit_layer: Tensor, depth: int) -> list[Event]:
    """Return the events of rows that left at these layers under a rule: what stepping through them would record."""
    layers, origin, lengths = exit_layer.to(torch.int64), packed.rows[ORIGIN], packed.lengths
    kind: Literal["head", "exit_unit"] = "exit_unit" if rule.measure == "exit_unit" else "head"
    trace = [Event("embed", 0, origin, lengths, lengths)]

    def record(what: Literal["attend", "feed", "head", "exit_unit"], layer: int, rows: Tensor) -> None:
        if bool(rows.any()):
            own = origin[rows.to(origin.device)]
            trace.append(Event(what, layer, own, lengths[rows], lengths[rows]))

    for layer in range(depth + 1):
        reached, leaving = layers >= layer, layers == layer
        if layer:
            record("attend", layer, reached)
            record("feed", layer, reached)
        if layer in rule.consulted and layer < depth:
            record(kind, layer, reached)
        if layer == depth or kind == "exit_unit":
            record("head", layer, leaving)  # a learned unit decides; only rows that leave need the head itself
    return trace


class RuleTrace(SummedTrace):
    """The trace of rows that left under a rule: sums follow from their lengths and exit layers, equal to counted ones.

    `macs[row]` is a sum over the layers below the row's exit, so the costs of all rows are read off cumulated
    coefficients instead of being added event by event.
    """

    def __init__(self, rule: ExitRule, packed: Packed, exit_layer: Tensor, depth: int) -> None:
        self.rule, self.packed, self.exit_layer, self.depth = rule, packed, exit_layer, depth

    @cached_property
    def events(self) -> list[Event]:
        """The events that stepping through the layers would record."""
        return rule_trace(self.rule, self.packed, self.exit_layer, self.depth)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        return self.events[index]

    def __len__(self) -> int:
        return len(self.events)

    def macs(self, costs: CostModel, rows: int) -> Tensor:
        spent = rule_macs(self.rule, costs, self.depth, self.packed.lengths.numpy(), self.exit_layer.numpy())
        return self._by_origin(spent, rows)

    def tokens_fed(self, depth: int) -> Tensor:
        return torch.from_numpy(rule_tokens_fed(depth, self.packed.lengths.numpy(), self.exit_layer.numpy()))

    def tokens_kept(self, depth: int, rows: int) -> Tensor:
        return self._by_origin(self.packed.lengths.numpy() * self.exit_layer.numpy() / depth, rows)

    def _by_origin(self, values: NDArray[np.float64], rows: int) -> Tensor:
        if rows == 1:
            return torch.from_numpy(values)
        placed = np.zeros(rows)
        placed[self.packed.rows[ORIGIN].numpy(force=True)] = values
        return torch.from_numpy(placed)


def rule_macs(
    rule: ExitRule, costs: CostModel, depth: int, lengths: NDArray[np.int64], exit_layer: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the MACs of rows of these lengths that left at these layers under a rule."""  # [rows]
    if len(lengths) == 1:  # plain numbers are quicker than columns of one
        length, layer = int(lengths[0]), int(exit_layer[0])
        row, token, pair = _cumulated(rule, costs, depth, layer)[-1]
        return np.array([row + token * length + pair * length * length])
    rows, tokens, pairs = np.array(_cumulated(rule, costs, depth, int(exit_layer.max()))).T
    spent: NDArray[np.float64] = rows[exit_layer] + tokens[exit_layer] * lengths + pairs[exit_layer] * lengths * lengths
    return spent


def rule_tokens_fed(depth: int, lengths: NDArray[np.int64], exit_layer: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the number of tokens that each layer computed, summed over rows."""  # [layers]
    if len(lengths) == 1:
        total = np.zeros(depth)
        total[: int(exit_layer[0])] = int(lengths[0])
        return total
    by_exit = np.bincount(exit_layer, lengths, depth + 1)
    return by_exit[::-1].cumsum()[::-1][1:].copy()  # a layer computes rows that leave after it


def _cumulated(rule: ExitRule, costs: CostModel, depth: int, deepest: int) -> list[list[float]]:
    """Return the MACs of a row that leaves after each layer: per row, per token, per pair of tokens."""
    embed, unit_decides = costs.embed_cost(), rule.measure == "exit_unit"
    reached, left = [embed.row, embed.token, embed.pair], []
    for layer in range(deepest + 1):
        if layer:
            own = costs.layer_cost(layer)
            reached[1] += own.query + own.key + own.feed
            reached[2] += own.pair
        if layer in rule.consulted and layer < depth:
            head = costs.exit_unit_cost(layer) if unit_decides else costs.exit_cost(layer)
            reached = [a + b for a, b in zip(reached, head, strict=True)]
        leaving = layer == depth or (unit_decides and layer in rule.consulted)
        left.append([a + b for a, b in zip(reached, costs.exit_cost(layer), strict=True)] if leaving else reached[:])
    return left
