"""Dropout on the CPU at the price of memory: torch draws its numbers one after the other, a sixth of a training step.

A seed comes from torch's global generator, so that `torch.manual_seed` decides here as everywhere; a vectorised
generator makes fifteen bits a value of it, and values are blanked by their bits, forwards and backwards. Chances are
met to 1/32768.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANCES = 1 << 15
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """As `torch.nn.functional.dropout`, in distribution."""
    if not training or p == 0.0:
        return x
    if x.device.type != "cpu" or x.dtype not in BITS or round(p * CHANCES) >= CHANCES:
        return F.dropout(x, p)
    made: Tensor = _Blank.apply(x, p)
    return made


def dropped(module: nn.Module, x: Tensor) -> Tensor:
    """What a module that drops makes of x, whatever its kind."""
    return dropout(x, module.p, module.training) if isinstance(module, nn.Dropout) else module(x)


class _Blank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.kept, ctx.factor = kept_bits(x.shape, p), 1.0 / (1.0 - p)
        return blanked(x, ctx.kept, ctx.factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return blanked(grads[0], ctx.kept, ctx.factor), None


def kept_bits(shape: torch.Size, p: float) -> Tensor:
    """All bits set for a value that stays, none for one that goes."""
    count, seed = shape.numel(), int(torch.randint(1 << 62, ()))
    drawn = np.random.SFC64(seed).random_raw((count + 3) // 4).view(np.int16)[:count]
    kept = torch.from_numpy(drawn).view(shape).bitwise_and_(CHANCES - 1)
    return kept.neg_().add_(round(p * CHANCES) - 1).bitwise_right_shift_(15)


def blanked(x: Tensor, kept: Tensor, factor: float) -> Tensor:
    """What stays, grown by a factor."""
    bits = BITS[x.dtype]
    made = x.contiguous().view(bits).bitwise_and(kept.to(bits)).view(x.dtype)
    return made.mul_(factor)
