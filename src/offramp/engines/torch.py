"""PyTorch as it is: any device, differentiable, the reference for every other engine.

Precision: fp32, and on a CUDA device bf16, which computes layers in bfloat16 (attention then by torch's kernel for rows
of many lengths, `core/varlen.py`); between half-layers states are float32, and embeddings and exits stay in fp32.
bf16 is untested on a real GPU: where this was written there was none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.backbones import Encoder
from offramp.core.attention import AttentionScores, Layout
from offramp.core.loop import Engine
from offramp.core.packed import Packed
from offramp.engines import How
from offramp.errors import OfframpError


@dataclass(frozen=True)
class TorchEngine(Engine):
    """Runs the backbone's half-layers directly."""

    encoder: Encoder
    half: bool = False  # layers in bfloat16

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.encoder.depth

    def embed(self, packed: Packed) -> Tensor:
        """Embeddings of the packed tokens."""
        return self.encoder.embed(packed)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, AttentionScores | None]:
        """First half of a layer (1…depth)."""
        own = self.encoder.layers[layer - 1]
        if not self.half:
            return own.attend(queries, keys, where, scores, None)
        with torch.autocast(keys.device.type, torch.bfloat16):
            out, seen = own.attend(queries, keys, where, scores, None)
        return out.float(), None if seen is None else AttentionScores(*(part.float() for part in seen))

    def feed(self, layer: int, x: Tensor) -> Tensor:
        """Second half of a layer."""
        if not self.half:
            return self.encoder.layers[layer - 1].feed(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.encoder.layers[layer - 1].feed(x).float()


def versions() -> dict[str, str]:
    """What computes."""
    return {"torch": torch.__version__}


def make(encoder: Encoder, how: How) -> TorchEngine:
    """The engine over an encoder's own parameters."""
    if how.precision != "fp32":
        device = next(encoder.layers[0].parameters()).device.type
        if (how.precision, device) != ("bf16", "cuda"):
            fix = "leave --precision out, or use --engine openvino on a CPU; bf16 is for CUDA devices"
            raise OfframpError("the torch engine", f"precision {how.precision} on {device}", fix)
    if how.threads is not None:
        torch.set_num_threads(how.threads)
    return TorchEngine(encoder, how.precision == "bf16")
