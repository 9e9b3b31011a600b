"""PyTorch as it is: any device, differentiable, the reference for every other engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.backbones import Encoder
from offramp.core.attention import Layout, Scores
from offramp.core.loop import Engine
from offramp.core.packed import Packed
from offramp.engines import How
from offramp.errors import OfframpError


@dataclass(frozen=True)
class TorchEngine(Engine):
    """Runs the backbone's half-layers directly."""

    encoder: Encoder

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.encoder.depth

    def embed(self, packed: Packed) -> Tensor:
        """Embeddings of the packed tokens."""
        return self.encoder.embed(packed)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, Scores | None]:
        """First half of a layer (1…depth)."""
        return self.encoder.layers[layer - 1].attend(queries, keys, where, scores, None)

    def feed(self, layer: int, x: Tensor) -> Tensor:
        """Second half of a layer."""
        return self.encoder.layers[layer - 1].feed(x)


def make(encoder: Encoder, how: How) -> TorchEngine:
    """The engine over an encoder's own parameters."""
    if how.precision != "fp32":
        fix = "leave --precision out, or use --engine openvino on a CPU"
        raise OfframpError("the torch engine", f"precision {how.precision}", fix)
    if how.threads is not None:
        torch.set_num_threads(how.threads)
    return TorchEngine(encoder)
