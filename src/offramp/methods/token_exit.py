"""Token-level early exit for tagging (Li et al. 2021, TOKEE): a word stops when its neighbourhood is sure.

What it does: an off-ramp after every layer tags all words; a word halts when the largest normalised entropy among the
words of its window is below the threshold. A halted word keeps its tag, and its state is copied upward, where it still
serves as key and value; a sentence is done when all its words are.
Modifications from the paper: exact copies at every layer (the paper re-applies each layer's norm to post-norm states);
word pieces halt with their word, the first token with its sentence; any batch size; no second self-sampling stage.
Relations: the exits of BranchyNet taken word by word; Faster-DAT plans what this one decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.core.columns import EXITED_AT, SCORED
from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Needs, Policy
from offramp.errors import OfframpError
from offramp.methods._base import DepthMethod
from offramp.methods._shared.token_memory import live
from offramp.nn.confidence import normalised_entropy, tokens_of_certain_words
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace


@dataclass(frozen=True)
class TokenExitSettings:
    """A word halts when the normalised entropy of all words within `window` (itself in the middle) is below this."""

    threshold: float = 0.0
    window: int = 5

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0 or self.window < 1:
            given = f"threshold={self.threshold}, window={self.window}"
            asked = "a threshold from 0 to 1 and a window of words"
            raise OfframpError(asked, given, "use e.g. threshold=0.1, window=5")


class TokenExitPolicy(Policy):
    """Halts words, and lets a row go when none of its words is left."""

    def __init__(self, network: Network, settings: TokenExitSettings) -> None:
        self.exits, self.settings = frozenset(network.exit_heads), settings

    def needs(self, layer: int) -> Needs:
        reads = layer in self.exits and self.settings.threshold > 0.0
        return Needs(should_exit=reads, logits=reads)

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        if not self.needs(layer).should_exit:
            return None
        s.answer_tokens(self._sure(s.with_dropped_tokens(), s.logits())[live(s)])
        left = s.packed.tokens[EXITED_AT]
        going = torch.bincount(s.packed.row_of_token, weights=(left < 0).float(), minlength=s.packed.count)
        return going == 0

    def _sure(self, packed: Packed, logits: Tensor) -> Tensor:
        """Tokens of words whose whole neighbourhood is sure; a first token only with its whole row."""  # [tokens]
        words = packed.tokens[SCORED]
        uncertainty = normalised_entropy(logits)
        if EXITED_AT in packed.tokens:
            uncertainty = torch.where(packed.tokens[EXITED_AT] >= 0, 0.0, uncertainty)
        sure = _widest(uncertainty[words], packed.row_of_token[words], self.settings.window) < self.settings.threshold
        return tokens_of_certain_words(sure, packed)


def _widest(uncertainty: Tensor, row: Tensor, window: int) -> Tensor:
    """The largest doubt within each word's window, never looking into another row."""  # [words]
    most = uncertainty
    for step in range(1, window // 2 + 1):
        for here, there in ((slice(step, None), slice(None, -step)), (slice(None, -step), slice(step, None))):
            near = torch.where(row[here] == row[there], uncertainty[there], 0.0)
            most = most.clone()
            most[here] = torch.maximum(most[here], near)
    return most


class TokenExit(DepthMethod):
    """Words of a tagger halt where their neighbourhood is certain."""

    name = "token_exit"
    settings = TokenExitSettings
    space = ThresholdSpace("threshold", full_value=0.0, unit="normalised", replay=False)
    needs = frozenset({"words"})

    def policy(self, network: Network, settings: TokenExitSettings) -> Policy:
        return TokenExitPolicy(network, settings)
