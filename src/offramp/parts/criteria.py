"""How sure a head is, as one number a row. Rows with several answers are as sure as their least sure one."""

from __future__ import annotations

import torch
from torch import Tensor

from offramp.core.packed import Packed
from offramp.tasks import Task


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of each distribution, stable for any logits (impossible outcomes are −∞)."""  # [n, C] → [n]
    log = logits.float().log_softmax(-1)
    return -(log.exp() * log.masked_fill(torch.isneginf(log), 0.0)).sum(-1)


def row_entropy(task: Task, logits: Tensor, packed: Packed) -> Tensor:
    """The largest entropy among a row's answers, in nats."""  # [rows]
    spread, owner = task.distributions(logits, packed.lengths.to(logits.device), packed.tokens.get("scored"))
    return worst(entropy(spread), owner, packed.count)


def worst(values: Tensor, owner: Tensor | None, rows: int) -> Tensor:
    """Largest value per row; a row without any answer counts as sure."""
    if owner is None:
        return values
    return values.new_zeros(rows).scatter_reduce(0, owner, values, "amax", include_self=True)
