"""Sums, softmaxes and ranks within rows of a packed batch, without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from offramp.core.columns import POSITION
from offramp.core.packed import Packed


def sum_by_row(values: Tensor, packed: Packed) -> Tensor:
    """Return the sum of each row's values."""  # [tokens] → [rows]
    return values.new_zeros(packed.count).index_add(0, packed.row_of_token, values)


def log_softmax_by_row(logits: Tensor, packed: Packed) -> Tensor:
    """Return log-softmax within each row."""  # [tokens] → [tokens]
    row = packed.row_of_token
    largest = logits.new_zeros(packed.count).scatter_reduce(0, row, logits.detach(), "amax", include_self=False)
    shifted = logits - largest[row]
    return shifted - sum_by_row(shifted.exp(), packed).log()[row]


def rank_by_row(values: Tensor, packed: Packed) -> Tensor:
    """Return each token's rank in its row by falling value, from 0; of equals the earlier first."""  # [tokens]
    order = values.argsort(descending=True, stable=True)
    order = order[packed.row_of_token[order].argsort(stable=True)]  # row by row, falling within each row
    ranks = torch.arange(packed.total, device=values.device) - packed.starts.to(values.device)[packed.row_of_token]
    return torch.empty_like(ranks).index_copy(0, order, ranks)


def first_tokens(packed: Packed) -> Tensor:
    """Return which tokens are the first of their row, the one that classification heads read."""  # [tokens] bool
    return packed.tokens[POSITION] == 0
