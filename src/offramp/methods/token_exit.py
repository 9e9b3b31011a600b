"""Token-level early exit for tagging (Li et al. 2021, TOKEE): a word halts when all words around it are certain.

What it does: exit heads after every layer (and on the embeddings) tag all words; a word halts when the largest
normalised entropy among the words of its window is below the threshold. A halted word keeps its tag, and its state is
copied to the layers above, where it still serves as key and value; a sentence is done when all its words are.

Modifications (ours, not the paper's): exact copies at every layer (the paper applies each layer's norm again to
post-norm states); word pieces halt with their word, the first token with its sentence; an exit 0 on the embeddings
(`exit0=false` is without it); any batch size; no second self-sampling stage.

Relations: the exits of BranchyNet, word by word; Faster-DAT plans depths that this method decides on the way.
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
from offramp.methods._shared.token_memory import is_live
from offramp.nn.confidence import normalised_entropy, tokens_of_certain_words
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace


@dataclass(frozen=True)
class TokenExitSettings:
    """The normalised entropy below which all words of a window must be for the word in its middle to halt."""

    threshold: float = 0.0
    window: int = 5

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0 or self.window < 1:
            given = f"threshold={self.threshold}, window={self.window}"
            asked = "a threshold from 0 to 1 and a window of words"
            raise OfframpError(asked, given, "use e.g. threshold=0.1, window=5")


class TokenExitPolicy(Policy):
    """Halts words; a row exits when all of its words have halted."""

    def __init__(self, network: Network, settings: TokenExitSettings) -> None:
        self.exits, self.settings = frozenset(network.exit_heads), settings

    def needs(self, layer: int) -> Needs:
        reads = layer in self.exits and self.settings.threshold > 0.0
        return Needs(should_exit=reads, logits=reads)

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        if not self.needs(layer).should_exit:
            return None
        s.answer_tokens(self._halts(s.with_dropped_tokens(), s.logits())[is_live(s)])
        going = (s.packed.tokens[EXITED_AT] < 0).float()
        return torch.bincount(s.packed.row_of_token, weights=going, minlength=s.packed.count) == 0

    def _halts(self, packed: Packed, logits: Tensor) -> Tensor:
        """Return the tokens of words whose window is certain; the first token halts with its whole row."""  # [tokens]
        words = packed.tokens[SCORED]
        uncertainty = normalised_entropy(logits)
        if EXITED_AT in packed.tokens:
            uncertainty = torch.where(packed.tokens[EXITED_AT] >= 0, 0.0, uncertainty)
        largest = largest_in_window(uncertainty[words], packed.row_of_token[words], self.settings.window)
        return tokens_of_certain_words(largest < self.settings.threshold, packed)


def largest_in_window(uncertainty: Tensor, row: Tensor, window: int) -> Tensor:
    """Return the largest uncertainty within each word's window, which ends at the borders of its row."""  # [words]
    largest = uncertainty
    for step in range(1, window // 2 + 1):
        for words, neighbours in ((slice(step, None), slice(None, -step)), (slice(None, -step), slice(step, None))):
            near = torch.where(row[words] == row[neighbours], uncertainty[neighbours], 0.0)
            largest = largest.clone()
            largest[words] = torch.maximum(largest[words], near)
    return largest


class TokenExit(DepthMethod):
    """Words of a tagger halt where their neighbourhood is certain."""

    name = "token_exit"
    settings = TokenExitSettings
    space = ThresholdSpace("threshold", full_value=0.0, unit="normalised", replay=False)
    needs = frozenset({"words"})

    def policy(self, network: Network, settings: TokenExitSettings) -> Policy:
        return TokenExitPolicy(network, settings)
