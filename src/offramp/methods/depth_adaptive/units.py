"""Halting units of encoders."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from offramp.nn.exit_oracles import GeometricExitUnit, MultinomialExitUnit
from offramp.nn.keys import PREDICTORS
from offramp.nn.network import Network

Form = Literal["multinomial", "geometric", "threshold"]


class HaltingUnits(nn.ModuleDict):
    """Units by layer: one after layer 1 that plans, or one at every exit but the last that decides whether to stop."""

    def __init__(self, form: Form, by_word: bool, hidden: int, depth: int) -> None:
        super().__init__()
        self.form, self.by_word = form, by_word  # by_word: every word has a depth of its own, else every row
        if form == "multinomial":
            self["1"] = MultinomialExitUnit(hidden, depth)
        elif form == "geometric":
            self.update({str(layer): GeometricExitUnit(hidden, exits=2) for layer in range(1, depth)})

    def unit_logits(self, layer: int, states: Tensor) -> Tensor:
        """Return logits over all exits [n, exits], or of stopping after this layer [n]."""
        unit = self[str(layer)]
        logits: Tensor = unit(states) if self.form == "multinomial" else unit(0, states)
        return logits


def halting_units(network: Network) -> HaltingUnits:
    """Return the halting units of a network."""
    return network.added[PREDICTORS]  # type: ignore[return-value]  # a ModuleDict
