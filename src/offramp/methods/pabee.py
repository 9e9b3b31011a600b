"""PABEE (Zhou et al. 2020): patience; a row exits when consecutive exits agree.

What it does: all exits are trained together (weights i/Σi); at run time a row exits once its answer has stayed the same
in `patience` consecutive comparisons of neighbouring exits. Numbers agree when they differ by less than `tolerance`.

Modifications (ours, not the paper's or its code's): every row has its own count (the published code waits for the whole
batch); each exit has its own head instead of one shared pooler; patience 0 means the full model, as in the code; the
last exit is the model's own head; exit heads read mean and maximum over tokens (`pool=first`: the first token); exit 0,
on the embeddings, counts as an exit, so that patience 1 can end after layer 1; its head also reads a bag of words
(`bag_of_words`), and it trains its own head only (`exit0=false` is without it); the model is fine-tuned before the
exits are trained with it (`mixed=false`: together from the beginning), and all exits then learn its logits beside the
labels (`distil=false`: labels alone).

Relations: needs no distribution over answers, so that it also serves regression, as BERxiT does, which learns when to
exit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offramp.core.columns import PATIENCE, Column
from offramp.core.loop import State
from offramp.core.policy import Needs, Policy
from offramp.core.rules import ExitRule
from offramp.errors import OfframpError
from offramp.methods._base import DepthMethod
from offramp.methods._shared.token_memory import remember
from offramp.nn.confidence import same_answers
from offramp.nn.exit_policies import WeightedOptions
from offramp.nn.network import Network
from offramp.nn.setting_space import IntegerSpace
from offramp.training.objectives import joint_stages
from offramp.training.stage import Stage
from offramp.utils.merged_dataclass import SINGLE_METHOD_ONLY

PREVIOUS_LOGITS = Column("previous_logits", torch.float32, None, "logits of the exit before, per row or per token")
STREAK = Column("streak", torch.int64, None, "how many consecutive comparisons of exits agreed")


@dataclass(frozen=True)
class PABEESettings:
    """How many consecutive comparisons of neighbouring exits must agree; 0 never exits early."""

    patience: int = 0
    tolerance: float = 0.1  # regression: two numbers agree when they differ by less

    def __post_init__(self) -> None:
        if self.patience < 0 or self.tolerance <= 0:
            given = f"patience={self.patience}, tolerance={self.tolerance}"
            raise OfframpError("a patience and a tolerance", given, "use patience 1, 2, … and a tolerance above 0")


class PABEEPolicy(Policy):
    """Keeps the logits of the previous exit and the number of consecutive agreements in columns."""

    def __init__(self, network: Network, settings: PABEESettings, reads_rows: bool = False) -> None:
        self.network, self.task, self.exits = network, network.task, frozenset(network.exit_heads)
        self.settings, self.reads_rows = settings, reads_rows

    def needs(self, layer: int) -> Needs:
        reads = layer in self.exits and (self.settings.patience > 0 or self.reads_rows)
        return Needs(should_exit=reads, logits=reads)

    def rule(self) -> ExitRule | None:
        if self.task.kind != "row" or "several distributions a row" in self.task.provides:
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
        if PREVIOUS_LOGITS in columns:
            same = same_answers(self.task, columns[PREVIOUS_LOGITS], logits, packed, self.settings.tolerance)
            streak = torch.where(same, s.packed.rows[STREAK] + 1, 0)
        if s.exit_heads.per_token:
            remember(s, PREVIOUS_LOGITS, logits)
        else:
            s.packed = s.packed.with_rows(previous_logits=logits)
        s.packed = s.packed.with_rows(streak=streak)
        if not self.reads_rows:
            return streak >= self.settings.patience
        patience = s.packed.rows[PATIENCE]
        return (patience > 0) & (streak >= patience)

    def reason(self, layer: int, s: State) -> str:
        streak = s.packed.rows.get(STREAK)
        return "" if streak is None else f"agreed {int(streak[0])} of {self.settings.patience} times"


@dataclass(frozen=True)
class PABEEOptions(WeightedOptions):
    """How exits are built and trained; the backbone is fine-tuned alone first."""

    mixed: bool = field(default=True, metadata=SINGLE_METHOD_ONLY)


class PABEE(DepthMethod):
    """Rows exit where consecutive exits agree."""

    name = "pabee"
    settings = PABEESettings
    options = PABEEOptions
    space = IntegerSpace("patience", full_value=0)
    needs = frozenset()

    def policy(self, network: Network, settings: PABEESettings) -> Policy:
        return PABEEPolicy(network, settings)

    def stages(self, network: Network, options: PABEEOptions) -> list[Stage]:
        """Return joint training at the full learning rate: its exits must agree, so all of them must be strong."""
        return joint_stages(network, options, later_share=1.0)
