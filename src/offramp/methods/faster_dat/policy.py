"""The policy that runs planned depths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offramp.core.loop import State
from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.methods.faster_dat.masked_model import masked_model_of
from offramp.methods.faster_dat.options import FasterDATSettings
from offramp.methods.faster_dat.reconstruction import Passes, count, estimate
from offramp.methods.faster_dat.word_depths import word_depths_of
from offramp.nn.network import Network
from offramp.nn.words import Words, token_and_row_depths, words_of


class FasterDATPolicy(Policy):
    """Looks depths up, lets tokens past theirs idle, and ends a row with its deepest word."""

    def __init__(self, network: Network, settings: FasterDATSettings) -> None:
        self.table, self.masked = word_depths_of(network), masked_model_of(network)
        self.cap = settings.cap or self.table.layers
        self.penalty = self.table.penalty if settings.penalty < 0.0 else settings.penalty
        if settings.penalty >= 0.0 and self.masked is None:
            given = f"penalty={settings.penalty} for depths by mutual information"
            raise OfframpError("another penalty λ", given, "use cap, or train with --set estimation=reconstruction")

    def on_embeddings(self, s: State) -> None:
        words = words_of(s.packed)
        tokens, last = token_and_row_depths(words, self.depths(words, s).clamp(max=self.cap), s.packed, self.cap)
        s.packed = s.packed.with_tokens(depth=tokens).with_rows(last=last)

    def depths(self, words: Words, s: State) -> Tensor:
        """How deep each word goes."""  # [words]
        if self.masked is None or not self.masked.stays:
            return self.table.look_up(words, self.penalty)
        penalties, note = torch.tensor([self.penalty]), partial(count, s, self.table.layers)
        return estimate(self.masked, s.packed, Passes(self.table.layers, 0), penalties, note).squeeze(1).long()

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        going = s.packed.tokens["depth"] >= layer
        if not bool(going.all()):
            s.packed = s.packed.with_tokens(gate=going.float())
        return None

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        return s.packed.rows["last"] <= layer if layer else None

    def reason(self, layer: int, s: State) -> str:
        return f"its deepest word goes through {int(s.packed.rows['last'][0])} layers" if layer else ""


def deepest_word(network: Network) -> int:
    """The largest depth that any word has."""
    table, masked = word_depths_of(network), masked_model_of(network)
    return table.layers if masked is not None and masked.stays else table.deepest


@dataclass
class _Given(FasterDATPolicy):
    """Depths of the words of one batch, estimated before."""

    network: Network
    given: Tensor  # [words]

    def __post_init__(self) -> None:
        super().__init__(self.network, FasterDATSettings())

    def depths(self, words: Words, s: State) -> Tensor:
        return self.given.to(words.key.device)
