"""Losses on packed tokens [tokens, C]: rows lie one after the other, and `lengths` [rows] holds their lengths."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.tasks import IGNORED_TARGET, Reduction
from offramp.utils.vocabulary_loss import vocabulary_loss

VOCABULARY = 1024  # classes from which passes over the logits are most of the time


def concatenate_targets(targets: Iterable[list[int]]) -> Tensor:
    """Return per-token targets of several rows as one tensor, in the order of packed tokens."""
    return torch.tensor([target for row in targets for target in row], dtype=torch.int64)  # [tokens]


def row_of_token(lengths: Tensor) -> Tensor:
    """Return the row of each packed token."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)  # [tokens]


def token_distributions(logits: Tensor, lengths: Tensor, scored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return one choice per scored token, and the row it belongs to (`Task.distributions` of token tasks)."""
    rows = row_of_token(lengths)
    return (logits, rows) if scored is None else (logits[scored], rows[scored])


def reduce_rows(losses: Tensor, reduction: Reduction) -> Tensor:
    """Return losses [rows] as they are, or their mean."""
    return losses.mean() if reduction == "mean" else losses


def token_loss(logits: Tensor, targets: Tensor, lengths: Tensor, reduction: Reduction) -> Tensor:
    """Return the cross-entropy of the labelled tokens: their mean, or the mean of each row (0 if it has none).

    Only labelled tokens are cast to float32 and normalised: with a vocabulary of outputs that is most of the time.
    """
    labelled = (targets != IGNORED_TARGET).nonzero().squeeze(1)  # [labelled]
    if reduction == "mean" and logits.shape[1] >= VOCABULARY and labelled.numel():
        return vocabulary_loss(logits[labelled], targets[labelled], 0.0)[0]
    losses = F.cross_entropy(logits[labelled].float(), targets[labelled], reduction="none")
    if reduction == "mean":
        return losses.sum() / max(1, labelled.numel())
    row = row_of_token(lengths)[labelled]  # [labelled]
    zeros = losses.new_zeros(len(lengths))
    counts = zeros.index_add(0, row, torch.ones_like(losses))
    return zeros.index_add(0, row, losses) / counts.clamp(min=1)  # [rows]


def pad_rows(packed: Tensor, lengths: Tensor) -> Tensor:
    """Return packed float logits [tokens, C] as [rows, longest, C], with −∞ where a row has no token."""
    rows = row_of_token(lengths)
    starts = lengths.cumsum(0) - lengths
    places = torch.arange(len(packed), device=packed.device) - starts[rows]
    padded = packed.new_full((len(lengths), int(lengths.max()), packed.shape[1]), float("-inf"))
    return padded.index_put((rows, places), packed)
