"""The policy that runs planned depths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offramp.core.columns import Column
from offramp.core.loop import State
from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.methods.faster_dat.masked_model import masked_model_of
from offramp.methods.faster_dat.options import FasterDATSettings
from offramp.methods.faster_dat.reconstruction import MaskedPasses, estimate_depths, record_cost
from offramp.methods.faster_dat.word_depths import word_depths_of
from offramp.nn.network import Network
from offramp.nn.words import Words, token_and_row_depths, words_of

WORD_DEPTH = Column("word_depth", torch.int64, None, "layers that a token goes through")
ROW_DEPTH = Column("row_depth", torch.int64, None, "layers that a row's deepest token goes through")


class FasterDATPolicy(Policy):
    """Looks up depths, makes tokens idle past their depth, and lets a row exit with its deepest word."""

    def __init__(self, network: Network, settings: FasterDATSettings) -> None:
        self.table, self.masked = word_depths_of(network), masked_model_of(network)
        self.cap = settings.cap or self.table.layers
        self.penalty = self.table.penalty if settings.penalty < 0.0 else settings.penalty
        if settings.penalty >= 0.0 and self.masked is None:
            given = f"penalty={settings.penalty} for depths by mutual information"
            raise OfframpError("another penalty λ", given, "use cap, or train with --set estimation=reconstruction")

    def on_embeddings(self, s: State) -> None:
        words = words_of(s.packed)
        tokens, rows = token_and_row_depths(words, self.depths(words, s).clamp(max=self.cap), s.packed, self.cap)
        s.packed = s.packed.with_tokens(word_depth=tokens).with_rows(row_depth=rows)

    def depths(self, words: Words, s: State) -> Tensor:
        """Return the depth of each word."""  # [words]
        if self.masked is None or not self.masked.used_at_run_time:
            return self.table.look_up(words, self.penalty)
        penalties, record = torch.tensor([self.penalty]), partial(record_cost, s, self.table.layers)
        passes = MaskedPasses(self.table.layers, 0)
        return estimate_depths(self.masked, s.packed, passes, penalties, record).squeeze(1).long()

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        going = s.packed.tokens[WORD_DEPTH] >= layer
        if not bool(going.all()):
            s.packed = s.packed.with_tokens(gate=going.float())
        return None

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        return s.packed.rows[ROW_DEPTH] <= layer if layer else None

    def reason(self, layer: int, s: State) -> str:
        return f"its deepest word goes through {int(s.packed.rows[ROW_DEPTH][0])} layers" if layer else ""


def deepest_word(network: Network) -> int:
    """Return the largest depth of any word."""
    table, masked = word_depths_of(network), masked_model_of(network)
    return table.layers if masked is not None and masked.used_at_run_time else table.deepest


@dataclass
class KnownDepthsPolicy(FasterDATPolicy):
    """Runs one batch with word depths that were estimated before."""

    network: Network
    known: Tensor  # [words]

    def __post_init__(self) -> None:
        super().__init__(self.network, FasterDATSettings())

    def depths(self, words: Words, s: State) -> Tensor:
        return self.known.to(words.key.device)
