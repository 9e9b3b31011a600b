"""What a method may say while the loop runs: four moments, each doing nothing by default; two more while decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from offramp.core.attention import Scores

if TYPE_CHECKING:
    from offramp.core.loop import State


class Policy:
    """Consulted by the loop. Keeps no memory of its own: what must survive a layer goes into columns of `s.packed`."""

    beams: int = 0  # hypotheses a decoder follows; 0: as many as the model's own configuration says
    free: ClassVar[bool] = False  # what it says while decoding costs nothing: nobody was asked

    def begin(self, s: State) -> None:
        """Sees the embeddings; planned depths are written into columns here."""

    def enter(self, layer: int, s: State) -> Tensor | None:
        """Before attention: which tokens go on ([tokens] bool, None = all). May set the token column `gate`."""

    def wants_scores(self, layer: int) -> bool:
        """Whether `attended` needs attention scores at this layer; only those layers pay for them."""
        return False

    def attended(self, layer: int, s: State, scores: Scores | None) -> Tensor | None:
        """Between attention and feed-forward: which tokens go on ([tokens] bool, None = all)."""

    def leave(self, layer: int, s: State) -> Tensor | None:
        """After the layer (0: after the embeddings): which rows are done ([rows] bool, None = none)."""

    def why(self, layer: int, s: State) -> str:
        """What `leave` looked at for the first row, in words, for people; asked only after `leave` was."""
        return ""

    def sentence_depths(self, source: Tensor) -> Tensor | None:
        """Decoders, before the first word, from the mean encoder state of each sentence [sentences, hidden]: how many
        blocks its words go through ([sentences], None = all)."""

    def word_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        """Decoders, after a block, of the words still going: how many blocks each goes through ([words]; a depth up to
        this block leaves now; None = as said before). `logits()` is what the exit here says, computed once, counted."""


class Both(Policy):
    """Two policies as one: a token goes on if both let it, a row is done if either says so."""

    def __init__(self, first: Policy, second: Policy) -> None:
        self.pair = (first, second)

    def begin(self, s: State) -> None:
        for policy in self.pair:
            policy.begin(s)

    def enter(self, layer: int, s: State) -> Tensor | None:
        return _merge([policy.enter(layer, s) for policy in self.pair], all_must=True)

    def wants_scores(self, layer: int) -> bool:
        return any(policy.wants_scores(layer) for policy in self.pair)

    def attended(self, layer: int, s: State, scores: Scores | None) -> Tensor | None:
        return _merge([policy.attended(layer, s, scores) for policy in self.pair], all_must=True)

    def leave(self, layer: int, s: State) -> Tensor | None:
        return _merge([policy.leave(layer, s) for policy in self.pair], all_must=False)

    def why(self, layer: int, s: State) -> str:
        return ", ".join(said for policy in self.pair if (said := policy.why(layer, s)))


def _merge(masks: list[Tensor | None], all_must: bool) -> Tensor | None:
    first, second = masks
    if first is None or second is None:
        return second if first is None else first
    return first & second if all_must else first | second
