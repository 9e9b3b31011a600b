"""Variable-length attention by torch's own kernel, on CUDA devices in half precision, without rectangles.

Untested on a real GPU: written against `torch.nn.attention.varlen` of torch 2.13, which has no CPU kernel; tests use a
CPU function in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offramp.core.layout import AttentionOptions, Ints, Layout


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """Return the kernel, if this torch has one whose order of additions does not depend on the batch."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "num_splits" in signature(varlen_attn).parameters else None


def serves(query: Tensor, plan: AttentionOptions) -> bool:
    """Return whether the kernel supports the options: no scores, bias or window (it counts places, not positions)."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16) or plan.dropout:
        return False
    plain = not plan.scores and plan.window is None and plan.key_bias is None and plan.relative is None
    return plain and varlen_kernel() is not None


def attend_packed(query: Tensor, key: Tensor, value: Tensor, where: Layout, plan: AttentionOptions) -> Tensor:
    """Return the mixture of each row's values for its queries."""  # [queries, hidden]
    kernel = varlen_kernel()
    assert kernel is not None, "checked by `serves`"
    if "offsets" not in where.cache:
        both = (where.query_lengths, where.key_lengths)
        where.cache["offsets"] = [_offsets(lengths, query.device) for lengths in both]
    q, k, v = (x.unflatten(-1, (plan.heads, -1)) for x in (query, key, value))  # [tokens, heads, width]
    longest = (int(where.query_lengths.max()), int(where.key_lengths.max()))
    out: Tensor = kernel(q, k, v, *where.cache["offsets"], *longest, num_splits=1)
    return out.flatten(1)


def _offsets(lengths: Ints, device: torch.device) -> Tensor:
    ends = np.concatenate(([0], np.cumsum(lengths)))
    return torch.from_numpy(ends).to(device, torch.int32)
