"""Fast dropout on the CPU: torch draws random numbers one at a time, which takes a sixth of a training step.

A seed is drawn from torch's global generator, so `torch.manual_seed` decides as usual; a vectorised generator expands
it to fifteen random bits a value, and values are zeroed by a bitwise AND, forwards and backwards. Probabilities are
exact to 1/32768.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

RESOLUTION = 1 << 15
INTEGER_VIEWS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Apply dropout with the distribution of `torch.nn.functional.dropout`."""
    if not training or p == 0.0:
        return x
    if x.device.type != "cpu" or x.dtype not in INTEGER_VIEWS or round(p * RESOLUTION) >= RESOLUTION:
        return F.dropout(x, p)
    result: Tensor = _BitwiseDropout.apply(x, p)
    return result


def apply_dropout(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a dropout module, or whatever module a model has in its place."""
    return dropout(x, module.p, module.training) if isinstance(module, nn.Dropout) else module(x)


class _BitwiseDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.kept, ctx.factor = draw_keep_bits(x.shape, p), 1.0 / (1.0 - p)
        return apply_keep_bits(x, ctx.kept, ctx.factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return apply_keep_bits(grads[0], ctx.kept, ctx.factor), None


def draw_keep_bits(shape: torch.Size, p: float) -> Tensor:
    """Draw an int16 mask: all bits set for a value that is kept, none for one that is dropped."""
    count, seed = shape.numel(), int(torch.randint(1 << 62, ()))
    drawn = np.random.SFC64(seed).random_raw((count + 3) // 4).view(np.int16)[:count]
    kept = torch.from_numpy(drawn).view(shape).bitwise_and_(RESOLUTION - 1)
    return kept.neg_().add_(round(p * RESOLUTION) - 1).bitwise_right_shift_(15)


def apply_keep_bits(x: Tensor, kept: Tensor, factor: float) -> Tensor:
    """Zero the dropped values and scale the kept ones."""
    bits = INTEGER_VIEWS[x.dtype]
    return x.contiguous().view(bits).bitwise_and(kept.to(bits)).view(x.dtype).mul_(factor)
