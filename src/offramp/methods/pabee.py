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

from offramp.core.loop import State
from offramp.core.policy import Policy
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

    def __init__(self, network: Network, settings: PABEESettings) -> None:
        self.task, self.exits, self.settings = network.task, frozenset(network.exit_heads), settings

    def wants_leave(self, layer: int) -> bool:
        return layer in self.exits and self.settings.patience > 0

    def wants_logits(self, layer: int) -> bool:
        return self.wants_leave(layer)

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        if not self.wants_leave(layer):
            return None
        logits, packed = s.logits(), s.whole() if s.heads.per_token else s.packed
        columns = packed.tokens if s.heads.per_token else packed.rows
        streak = torch.zeros(packed.count, dtype=torch.int64, device=logits.device)
        if "said" in columns:
            same = same_answers(self.task, columns["said"], logits, packed, self.settings.tolerance)
            streak = torch.where(same, s.packed.rows["streak"] + 1, 0)
        if s.heads.per_token:
            note(s, "said", logits)
        else:
            s.packed = s.packed.with_rows(said=logits)
        s.packed = s.packed.with_rows(streak=streak)
        return streak >= self.settings.patience

    def why(self, layer: int, s: State) -> str:
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
