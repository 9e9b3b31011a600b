"""Exit policies as plain data: an engine that understands a rule runs a whole batch without returning to Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offramp.core.columns import ORIGIN
from offramp.core.cost import Event
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

    @property
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
