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

    def wants_anything(self, depth: int) -> bool:
        """Whether any moment is used at all; where not, an engine may run everything at once."""
        asks = (self.wants_enter, self.wants_attended, self.wants_leave)
        looks = any(ask(layer) for layer in range(1, depth) for ask in asks)
        ends = self.wants_leave(0) or self.wants_enter(depth) or self.wants_attended(depth)
        return looks or ends or type(self).on_embeddings is not Policy.on_embeddings

    def on_embeddings(self, s: State) -> None:
        """Sees the embeddings; planned depths are written into columns here."""

    def wants_enter(self, layer: int) -> bool:
        """Whether `before_layer` does anything at this layer; where nothing is wanted, layers may be run together."""
        return type(self).before_layer is not Policy.before_layer

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        """Before attention: which tokens go on ([tokens] bool, None = all). May set the token column `gate`."""

    def wants_scores(self, layer: int) -> bool:
        """Whether `after_attention` needs attention scores at this layer; only those layers pay for them."""
        return False

    def wants_attended(self, layer: int) -> bool:
        """Whether `after_attention` does anything at this layer; where not, its halves may be run together."""
        return type(self).after_attention is not Policy.after_attention

    def after_attention(self, layer: int, s: State, scores: Scores | None) -> Tensor | None:
        """Between attention and feed-forward: which tokens go on ([tokens] bool, None = all)."""

    def wants_leave(self, layer: int) -> bool:
        """Whether `should_exit` does anything after this layer."""
        return type(self).should_exit is not Policy.should_exit

    def wants_logits(self, layer: int) -> bool:
        """Whether `should_exit` will surely ask for `s.logits()`: an engine may then compute them with the layer."""
        return False

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        """After the layer (0: after the embeddings): which rows are done ([rows] bool, None = none)."""

    def why(self, layer: int, s: State) -> str:
        """What `should_exit` looked at for the first row, in words, for people; asked only after `should_exit` was."""
        return ""

    def sentence_depths(self, source: Tensor) -> Tensor | None:
        """Decoders, before the first word, from the mean encoder state of each sentence [sentences, hidden]: how many
        blocks its words go through ([sentences], None = all)."""

    def word_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        """Decoders, after a block, of the words still going: how many blocks each goes through ([words]; a depth up to
        this block leaves now; None = as said before). `logits()` is what the exit here says, computed once, counted."""


class PairPolicy(Policy):
    """Two policies as one: a token goes on if both let it, a row is done if either says so."""

    def __init__(self, first: Policy, second: Policy) -> None:
        self.pair = (first, second)

    def wants_anything(self, depth: int) -> bool:
        return any(policy.wants_anything(depth) for policy in self.pair)

    def on_embeddings(self, s: State) -> None:
        for policy in self.pair:
            policy.on_embeddings(s)

    def wants_enter(self, layer: int) -> bool:
        return any(policy.wants_enter(layer) for policy in self.pair)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        return _merge([policy.before_layer(layer, s) for policy in self.pair], all_must=True)

    def wants_scores(self, layer: int) -> bool:
        return any(policy.wants_scores(layer) for policy in self.pair)

    def wants_attended(self, layer: int) -> bool:
        return any(policy.wants_attended(layer) for policy in self.pair)

    def after_attention(self, layer: int, s: State, scores: Scores | None) -> Tensor | None:
        return _merge([policy.after_attention(layer, s, scores) for policy in self.pair], all_must=True)

    def wants_leave(self, layer: int) -> bool:
        return any(policy.wants_leave(layer) for policy in self.pair)

    def wants_logits(self, layer: int) -> bool:
        return any(policy.wants_logits(layer) for policy in self.pair)

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        return _merge([policy.should_exit(layer, s) for policy in self.pair], all_must=False)

    def why(self, layer: int, s: State) -> str:
        return ", ".join(said for policy in self.pair if (said := policy.why(layer, s)))


def _merge(masks: list[Tensor | None], all_must: bool) -> Tensor | None:
    first, second = masks
    if first is None or second is None:
        return second if first is None else first
    return first & second if all_must else first | second
