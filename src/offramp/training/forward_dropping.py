"""The real loop as training sees it: differentiable, tokens really gone, the batch kept as it stood after every layer.

A trace keeps all tokens and lets methods weigh them; a tape lets a policy drop them, and later layers are cheaper for
it. Either way `at(layer)` is what an exit would read there, so one objective serves both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from offramp import engines
from offramp.core.attention import Layout, Scores
from offramp.core.loop import Engine, State, run
from offramp.core.packed import Packed
from offramp.core.policy import PairPolicy, Policy
from offramp.nn.network import Network
from offramp.training.forward import LayerStates


@dataclass
class RaggedLayerStates(LayerStates):
    """A trace whose layers differ in their tokens."""

    layers: list[Packed] = field(default_factory=list)

    def after(self, layer: int) -> Packed:
        """What an exit after a layer reads: the live tokens, or (answers per token) all of them put back."""
        return self.layers[layer]

    def detached(self) -> RaggedLayerStates:
        """The same states without a way back for gradients."""
        layers = [batch.with_states(batch.states.detach()) for batch in self.layers]
        return replace(self, states=[batch.states for batch in layers], layers=layers)


def forward_with_dropping(
    network: Network, packed: Packed, policy: Policy, skip: frozenset[int] = frozenset()
) -> RaggedLayerStates:
    """One run under a policy that drops tokens; layers in `skip` are left out whole. Nobody may leave."""
    noted = _Notes(network)
    run(_Without(engines.make("torch", network.encoder), skip), noted, PairPolicy(policy, noted), packed)
    return RaggedLayerStates(packed, [batch.states for batch in noted.layers], layers=noted.layers)


@dataclass
class _Notes(Policy):
    """Keeps what every exit would read. As the loop's heads it computes nothing: objectives ask for what they need."""

    network: Network
    layers: list[Packed] = field(default_factory=list)

    @property
    def per_token(self) -> bool:
        return self.network.per_token

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        self.layers.append(s.whole() if self.per_token else s.packed)
        return None

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        self.layers.append(packed)
        return packed.states.new_zeros(packed.total if self.per_token else packed.count, 1)

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        raise NotImplementedError("nobody leaves while a tape is made")

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        return self.network.predictor(layer, packed)


@dataclass(frozen=True)
class _Without(Engine):
    """An engine in which some layers do nothing."""

    engine: Engine
    skip: frozenset[int]

    @property
    def depth(self) -> int:
        return self.engine.depth

    def embed(self, packed: Packed) -> Tensor:
        return self.engine.embed(packed)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, Scores | None]:
        if layer in self.skip:
            return queries, None
        return self.engine.attend(layer, queries, keys, where, scores)

    def feed(self, layer: int, x: Tensor) -> Tensor:
        return x if layer in self.skip else self.engine.feed(layer, x)
