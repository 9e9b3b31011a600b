"""A differentiable pass over the same packed layers that never compacts: what training looks at.

Keeps the states after every layer. Gates and soft token masks act as they do in the loop's limit: gate 1 is the layer,
gate 0 an exact copy; a key bias of −∞ is a token that is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from offramp.backbones import Encoder
from offramp.core.attention import Scores
from offramp.core.packed import Packed


@dataclass
class LayerStates:
    """States after the embeddings (0) and after every layer (1…L)."""

    packed: Packed
    states: list[Tensor]  # each [tokens, hidden]
    scores: dict[int, Scores] = field(default_factory=dict)
    present: dict[int, Tensor] = field(default_factory=dict)  # layer → [tokens] in 0…1: who was there in it, softly

    def after(self, layer: int) -> Packed:
        """The batch as it stood after a layer; pooling counts its tokens as far as they were present."""
        packed = self.packed.with_states(self.states[layer])
        return packed.with_tokens(present=self.present[layer]) if layer in self.present else packed

    def detached(self) -> LayerStates:
        """The same states without a way back for gradients."""
        present = {layer: there.detach() for layer, there in self.present.items()}
        return replace(self, states=[states.detach() for states in self.states], present=present)


@dataclass(frozen=True)
class ForwardHooks:
    """What a method changes while it trains, before each layer: called with the layer and the trace so far."""

    gate: Callable[[int, LayerStates], Tensor | None] | None = None  # [tokens] in 0…1
    key_bias: Callable[[int, LayerStates], Tensor | None] | None = None  # [tokens], added to attention logits
    scores: Callable[[int], bool] | None = None
    skip: Callable[[int], bool] | None = None  # layers left out whole
    equilibrium: bool = False  # every layer learns from the mean of the exits above it, not from their sum
    after_attention: Callable[[int, LayerStates, Tensor], Tensor] | None = (
        None  # states after attention → states to feed
    )


def forward_all_layers(encoder: Encoder, packed: Packed, soft: ForwardHooks | None = None) -> LayerStates:
    """All layers over all tokens of all rows."""
    soft, depth = soft or ForwardHooks(), encoder.depth
    made = LayerStates(packed, [_shared(encoder.embed(packed), 1 / (depth + 1), soft)])
    for number, layer in enumerate(encoder.layers, start=1):
        x = _shared(made.states[-1], float(depth - number + 1), soft)
        if soft.skip and soft.skip(number):
            made.states.append(x)
            continue
        gate = soft.gate(number, made) if soft.gate else None
        bias = soft.key_bias(number, made) if soft.key_bias else None
        wants = soft.scores(number) if soft.scores else False
        y, scores = layer.attend(x, x, packed.layout, wants, bias)
        if scores is not None:
            made.scores[number] = scores
        y = _gated(x, y, gate)
        y = soft.after_attention(number, made, y) if soft.after_attention else y
        made.states.append(_shared(_gated(y, layer.feed(y), gate), 1 / (depth - number + 1), soft))
    return made


def _shared(x: Tensor, factor: float, soft: ForwardHooks) -> Tensor:
    """The same values; under equilibrium their gradient is scaled."""
    return x * factor + (x * (1.0 - factor)).detach() if soft.equilibrium else x


def _gated(before: Tensor, after: Tensor, gate: Tensor | None) -> Tensor:
    return after if gate is None else before + gate.to(before.dtype)[:, None] * (after - before)
