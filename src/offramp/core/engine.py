"""What the loop asks of whoever executes layers and exits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from offramp.core.layout import Layout, Scores
from offramp.core.packed import Packed


class Engine(Protocol):
    """How a half-layer is executed."""

    @property
    def depth(self) -> int:
        """Number of layers."""

    def embed(self, packed: Packed) -> Tensor:
        """Embeddings of the packed tokens."""  # [tokens, hidden]

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, Scores | None]:
        """First half of a layer (1…depth)."""

    def feed(self, layer: int, x: Tensor) -> Tensor:
        """Second half of a layer."""

    def whole(self, layers: range, x: Tensor, where: Layout) -> Tensor:
        """Both halves of neighbouring layers between which nobody looks; by default one after the other."""
        for layer in layers:
            x = self.feed(layer, self.attend(layer, x, x, where, False)[0])
        return x

    def opened(self, heads: ExitHeads, packed: Packed) -> tuple[Tensor, Tensor | None]:
        """Embeddings and what the exit on them says, where both together are cheaper; by default embeddings alone."""
        return self.embed(packed), None

    def answered(self, layer: int, heads: ExitHeads, packed: Packed) -> tuple[Tensor, Tensor | None]:
        """A whole layer and what its exit says, where both together are cheaper; by default the layer alone."""
        return self.whole(range(layer, layer + 1), packed.states, packed.layout), None

    def straight(self, heads: ExitHeads, packed: Packed) -> Tensor:
        """Embeddings, all layers and the last exit, where nobody looks at all: logits; by default one after another."""
        states = self.whole(range(1, self.depth + 1), self.embed(packed), packed.layout)
        return heads(self.depth, packed.with_states(states))

    def room(self) -> AbstractContextManager[None]:
        """Held while a batch runs: an engine with threads of its own keeps torch's out of their way."""
        return nullcontext()

    def exits(self, heads: ExitHeads) -> ExitHeads:
        """The same exits as this engine runs them; by default as they are."""
        return heads


class ExitHeads(Protocol):
    """The exits: what the model would answer after a layer."""

    @property
    def per_token(self) -> bool:
        """Whether answers are per token."""

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        """Logits per row or per token."""

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        """How unsure a learned unit is of each row's answer, or of each layer above being needed, 0…1."""

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        """What a method's own predictor before `layer` says of each token."""
