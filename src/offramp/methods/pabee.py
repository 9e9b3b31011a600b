"""PABEE (Zhou et al. 2020): patience, leave when consecutive exits agree.

What it does: all exits train together (weights i/Σi); at run time a row leaves once its answer has stayed the same at
`patience` consecutive comparisons of neighbouring exits. Numbers agree when they differ by less than `tolerance`.
Modifications from the paper: every row counts for itself (the published code waits for the whole batch); each off-ramp
has its own head instead of one shared pooler; patience 0 means the full model, as in the code; the last exit is the
model's own head; off-ramp 0 counts as an exit.
Relations: needs no distribution over answers, so it serves regression too, as BERxiT does, which learns when to leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.core.columns import PATIENCE
from offramp.core.loop import State
from offramp.core.policy import Needs, Policy
from offramp.core.rules import ExitRule
from offramp.errors import OfframpError
from offramp.methods._base import DepthMethod
from offramp.methods._shared.token_memory import note
from offramp.nn.confidence import same_answers
from offramp.nn.network import Network
from offramp.nn.setting_space import IntegerSpace


@dataclass(frozen=True)
class PABEESettings:
    """How many times in a row neighbouring exits must agree; 0 never leaves early."""

    patience: int = 0
    tolerance: float = 0.1  # regression: how close two numbers are the same

    def __post_init__(self) -> None:
        if self.patience < 0 or self.tolerance <= 0:
            given = f"patience={self.patience}, tolerance={self.tolerance}"
            raise OfframpError("a patience and a tolerance", given, "use patience 1, 2, … and a tolerance above 0")


class PABEEPolicy(Policy):
    """What the last exit said and how often it agreed travel with the row."""

    def __init__(self, network: Network, settings: PABEESettings, reads_rows: bool = False) -> None:
        self.network, self.task, self.exits = network, network.task, frozenset(network.exit_heads)
        self.settings, self.reads_rows = settings, reads_rows

    def needs(self, layer: int) -> Needs:
        reads = layer in self.exits and (self.settings.patience > 0 or self.reads_rows)
        return Needs(should_exit=reads, logits=reads)

    def rule(self) -> ExitRule | None:
        if self.task.kind != "row":
            return None
        patience, tolerance = self.settings.patience, self.settings.tolerance
        exits = tuple(sorted(self.exits))
        return ExitRule("patience", exits, patience=patience, tolerance=tolerance, by_row=self.reads_rows)

    def row_settings(self) -> dict[str, Tensor]:
        return {PATIENCE: torch.tensor(self.settings.patience)}

    def by_row(self) -> PABEEPolicy:
        return PABEEPolicy(self.network, self.settings, reads_rows=True)

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        if not self.needs(layer).should_exit:
            return None
        logits, packed = s.logits(), s.with_dropped_tokens() if s.exit_heads.per_token else s.packed
        columns = packed.tokens if s.exit_heads.per_token else packed.rows
        streak = torch.zeros(packed.count, dtype=torch.int64, device=logits.device)
        if "said" in columns:
            same = same_answers(self.task, columns["said"], logits, packed, self.settings.tolerance)
            streak = torch.where(same, s.packed.rows["streak"] + 1, 0)
        if s.exit_heads.per_token:
            note(s, "said", logits)
        else:
            s.packed = s.packed.with_rows(said=logits)
        s.packed = s.packed.with_rows(streak=streak)
        if not self.reads_rows:
            return streak >= self.settings.patience
        patience = s.packed.rows[PATIENCE]
        return (patience > 0) & (streak >= patience)

    def reason(self, layer: int, s: State) -> str:
        streak = s.packed.rows.get("streak")
        return "" if streak is None else f"agreed {int(streak[0])} of {self.settings.patience} times"


class PABEE(DepthMethod):
    """Rows exit where consecutive exits agree."""

    name = "pabee"
    settings = PABEESettings
    space = IntegerSpace("patience", full_value=0)
    needs = frozenset()

    def policy(self, network: Network, settings: PABEESettings) -> Policy:
        return PABEEPolicy(network, settings)
