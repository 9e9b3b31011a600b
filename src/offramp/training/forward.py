"""Differentiable passes over the packed layers that keep the states after every layer: what objectives read.

`forward_all_layers` keeps every token in every layer; methods weigh tokens softly through `ForwardHooks`. In their
limits, gates and key biases do what the run-time loop does: gate 1 is the layer, gate 0 an exact copy of its input, and
a key bias of −∞ is a token that was dropped. `forward_with_dropping` runs the real loop under a policy, so that tokens
are really dropped and later layers cost less. In both cases `after(layer)` is what an exit head reads there, so one
objective serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from offramp import engines
from offramp.backbones import Encoder
from offramp.core.attention import AttentionScores, Layout
from offramp.core.loop import Engine, State, run
from offramp.core.packed import Packed
from offramp.core.policy import PairPolicy, Policy
from offramp.nn.network import Network


@dataclass
class LayerStates:
    """States after the embeddings (0) and after every layer (1…L)."""

    packed: Packed
    states: list[Tensor]  # each [tokens, hidden]
    scores: dict[int, AttentionScores] = field(default_factory=dict)
    present: dict[int, Tensor] = field(default_factory=dict)  # layer → [tokens], 0 dropped … 1 present

    def after(self, layer: int) -> Packed:
        """Return the batch as it was after a layer; pooling weighs tokens by how much they were present."""
        packed = self.packed.with_states(self.states[layer])
        return packed.with_tokens(present=self.present[layer]) if layer in self.present else packed

    def detached(self) -> LayerStates:
        """Return the same states cut off from the graph, so that no gradient reaches the backbone."""
        present = {layer: weights.detach() for layer, weights in self.present.items()}
        return replace(self, states=[states.detach() for states in self.states], present=present)


@dataclass
class RaggedLayerStates(LayerStates):
    """Layer states whose tokens differ from layer to layer."""

    layers: list[Packed] = field(default_factory=list)

    def after(self, layer: int) -> Packed:
        """Return what an exit head reads after a layer: the tokens that are left, or, for answers per token, all of
        them, with dropped tokens in the state they had last."""
        return self.layers[layer]

    def detached(self) -> RaggedLayerStates:
        """Return the same states cut off from the graph, so that no gradient reaches the backbone."""
        layers = [batch.with_states(batch.states.detach()) for batch in self.layers]
        return replace(self, states=[batch.states for batch in layers], layers=layers)


@dataclass(frozen=True)
class ForwardHooks:
    """What a method changes in a training pass; each hook is called before or in a layer with the states so far."""

    gate: Callable[[int, LayerStates], Tensor | None] | None = None  # [tokens] in 0…1
    key_bias: Callable[[int, LayerStates], Tensor | None] | None = None  # [tokens], added to attention logits
    scores: Callable[[int], bool] | None = None  # layers whose attention scores are kept
    skip: Callable[[int], bool] | None = None  # layers that are left out entirely
    equilibrium: bool = False  # every layer gets the mean of the gradients of the exits above it, not their sum
    after_attention: Callable[[int, LayerStates, Tensor], Tensor] | None = (
        None  # states after attention → states to feed
    )


def forward_all_layers(encoder: Encoder, packed: Packed, hooks: ForwardHooks | None = None) -> LayerStates:
    """Run all layers over all tokens of all rows and keep the states after each."""
    hooks, depth = hooks or ForwardHooks(), encoder.depth
    result = LayerStates(packed, [_scale_gradient(encoder.embed(packed), 1 / (depth + 1), hooks)])
    for number, layer in enumerate(encoder.layers, start=1):
        x = _scale_gradient(result.states[-1], float(depth - number + 1), hooks)
        if hooks.skip and hooks.skip(number):
            result.states.append(x)
            continue
        gate = hooks.gate(number, result) if hooks.gate else None
        bias = hooks.key_bias(number, result) if hooks.key_bias else None
        needs_scores = hooks.scores(number) if hooks.scores else False
        y, scores = layer.attend(x, x, packed.layout, needs_scores, bias)
        if scores is not None:
            result.scores[number] = scores
        y = _gated(x, y, gate)
        y = hooks.after_attention(number, result, y) if hooks.after_attention else y
        result.states.append(_scale_gradient(_gated(y, layer.feed(y), gate), 1 / (depth - number + 1), hooks))
    return result


def forward_with_dropping(
    network: Network, packed: Packed, policy: Policy, skip: frozenset[int] = frozenset()
) -> RaggedLayerStates:
    """Run the loop under a policy that drops tokens and keep the batch after every layer.

    Layers in `skip` are left out entirely. No row exits early.
    """
    recorder = _LayerRecorder(network)
    engine = _SkippingEngine(engines.make("torch", network.encoder), skip)
    run(engine, recorder, PairPolicy(policy, recorder), packed)
    return RaggedLayerStates(packed, [batch.states for batch in recorder.layers], layers=recorder.layers)


@dataclass
class _LayerRecorder(Policy):
    """Keeps what the exit head after every layer would read. As the loop's exit heads it computes no logits, because
    objectives compute those they need."""

    network: Network
    layers: list[Packed] = field(default_factory=list)

    @property
    def per_token(self) -> bool:
        return self.network.per_token

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        self.layers.append(s.with_dropped_tokens() if self.per_token else s.packed)
        return None

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        self.layers.append(packed)
        return packed.states.new_zeros(packed.total if self.per_token else packed.count, 1)

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        raise NotImplementedError("no row exits in forward_with_dropping, so no exit unit is evaluated")

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        return self.network.predictor(layer, packed)


@dataclass(frozen=True)
class _SkippingEngine(Engine):
    """An engine in which some layers return their input."""

    engine: Engine
    skip: frozenset[int]

    @property
    def depth(self) -> int:
        return self.engine.depth

    def embed(self, packed: Packed) -> Tensor:
        return self.engine.embed(packed)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, AttentionScores | None]:
        if layer in self.skip:
            return queries, None
        return self.engine.attend(layer, queries, keys, where, scores)

    def feed(self, layer: int, x: Tensor) -> Tensor:
        return x if layer in self.skip else self.engine.feed(layer, x)


def _scale_gradient(x: Tensor, factor: float, hooks: ForwardHooks) -> Tensor:
    """Return the same values; under `equilibrium` their gradient is scaled by `factor`."""
    return x * factor + (x * (1.0 - factor)).detach() if hooks.equilibrium else x


def _gated(before: Tensor, after: Tensor, gate: Tensor | None) -> Tensor:
    return after if gate is None else before + gate.to(before.dtype)[:, None] * (after - before)
