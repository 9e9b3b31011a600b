"""What a method decides while the loop runs: four moments, each doing nothing by default; two more while decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from offramp.core.layout import AttentionScores
from offramp.core.rules import ExitRule
from offramp.errors import OfframpError

if TYPE_CHECKING:
    from offramp.core.loop import State


class Needs(NamedTuple):
    """What a policy needs around one layer; where it needs nothing, engines may run several layers at once."""

    before_layer: bool = False  # the moment before the layer is used
    after_attention: bool = False  # the moment between the layer's halves is used
    scores: bool = False  # `after_attention` reads attention scores
    should_exit: bool = False  # the moment after the layer is used
    logits: bool = False  # `should_exit` always reads the exit's logits, so they may be computed with the layer

    def union(self, other: Needs) -> Needs:
        """Return what either of two policies needs."""
        return Needs(*(a or b for a, b in zip(self, other, strict=True)))


NOTHING = Needs()


class Policy:
    """Decisions of a method, consulted by the loop.

    A policy object keeps no memory of a batch: what must survive a layer goes into columns of `s.packed`.
    """

    beams: int = 0  # hypotheses a decoder follows; 0: as many as the model's own configuration says
    free: ClassVar[bool] = False  # its decisions while decoding cost nothing, because no unit computes them

    def needs(self, layer: int) -> Needs:
        """Return what this policy needs around a layer (0: after the embeddings); by default what it overrides."""
        return overridden(type(self), Policy)

    def acts(self, depth: int) -> bool:
        """Return whether any moment is used; where none is, an engine may run the whole model at once."""
        inside = any(any(self.needs(layer)) for layer in range(1, depth))
        last = self.needs(depth)._replace(should_exit=False, logits=False)  # every row leaves after the last layer
        return inside or any(last) or self.needs(0).should_exit or type(self).on_embeddings is not Policy.on_embeddings

    def rule(self) -> ExitRule | None:
        """Return the whole policy as plain data, if it is nothing but a rule over exit outputs; None otherwise."""
        return None

    def row_settings(self) -> dict[str, Tensor]:
        """Return this policy's settings as columns of one row, for `by_row`; empty if rows cannot bring their own."""
        return {}

    def by_row(self) -> Policy:
        """Return a policy that reads its settings from row columns, so that rows with different ones share a batch."""
        given = "a policy whose settings are no columns of rows"
        raise OfframpError("settings of each row", given, "run rows with different settings in batches of their own")

    def on_embeddings(self, s: State) -> None:
        """See the embeddings; planned depths are written into columns here."""

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        """Before attention: return which tokens go on ([tokens] bool, None = all). May set the column `GATE`."""

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        """Between attention and feed-forward: return which tokens go on ([tokens] bool, None = all)."""

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        """After the layer (0: after the embeddings): return which rows exit ([rows] bool, None = none)."""

    def reason(self, layer: int, s: State) -> str:
        """Describe for people what `should_exit` compared for the first row; called only after `should_exit`."""
        return ""

    def sentence_depths(self, source: Tensor) -> Tensor | None:
        """Decoders, before the first token: return how many blocks the tokens of each sentence go through.

        `source` is the mean encoder state of each sentence [sentences, hidden]; returns [sentences], None = all blocks.
        """

    def token_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        """Decoders, after a block: return how many blocks each token that has not exited goes through.

        Returns [tokens]; a depth up to this block exits now; None = no change. `logits()` computes the exit's logits
        once and counts them.
        """


def overridden(kind: type[Policy], base: type[Policy]) -> Needs:
    """Return the moments that a policy class overrides, as needs of every layer."""
    return Needs(
        before_layer=kind.before_layer is not base.before_layer,
        after_attention=kind.after_attention is not base.after_attention,
        should_exit=kind.should_exit is not base.should_exit,
    )


class PolicyWrapper(Policy):
    """A policy that forwards to another one; subclasses override the moments they observe or change."""

    inner: Policy

    def needs(self, layer: int) -> Needs:
        """Return the needs of the inner policy and the moments that the wrapper overrides."""
        return self.inner.needs(layer).union(overridden(type(self), PolicyWrapper))

    def on_embeddings(self, s: State) -> None:
        """Forward."""
        self.inner.on_embeddings(s)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        """Forward."""
        return self.inner.before_layer(layer, s)

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        """Forward."""
        return self.inner.after_attention(layer, s, scores)

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        """Forward."""
        return self.inner.should_exit(layer, s)

    def reason(self, layer: int, s: State) -> str:
        """Forward."""
        return self.inner.reason(layer, s)


class PairPolicy(Policy):
    """Two policies as one: a token goes on if both keep it, a row exits if either lets it."""

    def __init__(self, first: Policy, second: Policy) -> None:
        self.pair = (first, second)

    def needs(self, layer: int) -> Needs:
        """Return what either policy needs."""
        first, second = self.pair
        return first.needs(layer).union(second.needs(layer))

    def acts(self, depth: int) -> bool:
        """Return whether either policy uses any moment."""
        return any(policy.acts(depth) for policy in self.pair)

    def rule(self) -> ExitRule | None:
        """Return the rule of one policy where the other one does nothing at all."""
        first, second = self.pair
        if type(first) is Policy:
            return second.rule()
        return first.rule() if type(second) is Policy else None

    def on_embeddings(self, s: State) -> None:
        """Let both see the embeddings."""
        for policy in self.pair:
            policy.on_embeddings(s)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        """Keep the tokens that both keep."""
        first, second = (policy.before_layer(layer, s) for policy in self.pair)
        return _both(first, second)

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        """Keep the tokens that both keep."""
        first, second = (policy.after_attention(layer, s, scores) for policy in self.pair)
        return _both(first, second)

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        """Let a row exit if either policy does."""
        first, second = (policy.should_exit(layer, s) for policy in self.pair)
        if first is None or second is None:
            return second if first is None else first
        return first | second

    def reason(self, layer: int, s: State) -> str:
        """Join the reasons of both."""
        return ", ".join(reason for policy in self.pair if (reason := policy.reason(layer, s)))


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second
