"""PyTorch as it is: any device, differentiable, the reference for every other engine.

Precision: fp32, and on a CUDA device bf16, which computes layers in bfloat16 (attention then by torch's kernel for rows
of many lengths); between half-layers states are float32, and embeddings and exits stay in fp32.
bf16 is untested on a real GPU: where this was written there was none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.backbones import Encoder
from offramp.core.attention import AttentionScores, Layout
from offramp.core.loop import Engine
from offramp.core.packed import Packed
from offramp.engines import EngineOptions
from offramp.errors import OfframpError
from offramp.utils.cores import TURNS


@dataclass(frozen=True)
class TorchEngine(Engine):
    """Executes the backbone's half-layers directly."""

    encoder: Encoder
    half: bool = False  # layers in bfloat16

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.encoder.depth

    def running(self) -> AbstractContextManager[None]:
        """Return a turn on the cores: every step goes back to Python."""
        return TURNS.turn()

    def embed(self, packed: Packed) -> Tensor:
        """Return the embeddings of the packed tokens."""
        return self.encoder.embed(packed)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, AttentionScores | None]:
        """Run the first half of a layer (1…depth)."""
        own = self.encoder.layers[layer - 1]
        if not self.half:
            return own.attend(queries, keys, where, scores, None)
        with torch.autocast(keys.device.type, torch.bfloat16):
            out, attention = own.attend(queries, keys, where, scores, None)
        return out.float(), None if attention is None else AttentionScores(*(part.float() for part in attention))

    def feed(self, layer: int, x: Tensor) -> Tensor:
        """Run the second half of a layer."""
        if not self.half:
            return self.encoder.layers[layer - 1].feed(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.encoder.layers[layer - 1].feed(x).float()


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute."""
    return {"torch": torch.__version__}


def make(encoder: Encoder, options: EngineOptions) -> TorchEngine:
    """Create the engine over an encoder's parameters."""
    if options.precision != "fp32":
        device = next(encoder.layers[0].parameters()).device.type
        if (options.precision, device) != ("bf16", "cuda"):
            fix = "leave --precision out, or use --engine openvino on a CPU; bf16 is for CUDA devices"
            raise OfframpError("the torch engine", f"precision {options.precision} on {device}", fix)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return TorchEngine(encoder, options.precision == "bf16")
