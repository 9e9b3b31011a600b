"""How sure a head is, as one number a row. Rows with several answers are as sure as their least sure one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offramp.core.columns import SCORED
from offramp.core.packed import Packed
from offramp.tasks import Task


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of each distribution, stable for any logits (impossible outcomes are −∞)."""  # [n, C] → [n]
    return torch.special.entr(logits.float().softmax(-1)).sum(-1)


def row_entropy(task: Task, logits: Tensor, packed: Packed) -> Tensor:
    """The largest entropy among a row's answers, in nats."""  # [rows]
    spread, owner = _spread(task, logits, packed)
    return largest_in_row(entropy(spread), owner, packed.count)


def row_normalised_entropy(task: Task, logits: Tensor, packed: Packed) -> Tensor:
    """The largest entropy among a row's answers, as a share of the most there could be: 0 sure … 1 no idea."""
    spread, owner = _spread(task, logits, packed)
    return largest_in_row(normalised_entropy(spread), owner, packed.count)


def normalised_entropy(spread: Tensor) -> Tensor:
    """Entropy of each distribution divided by that of a uniform one over its possible outcomes."""  # [n, C] → [n]
    outcomes = (~torch.isneginf(spread)).sum(-1).clamp(min=2)
    return entropy(spread) / outcomes.float().log()


def row_least_confidence(task: Task, logits: Tensor, packed: Packed) -> Tensor:
    """One minus the probability of the best answer, the largest among a row's answers."""  # [rows]
    spread, owner = _spread(task, logits, packed)
    return largest_in_row(1.0 - spread.float().softmax(-1).amax(-1), owner, packed.count)


def row_uncertainty(task: Task, logits: Tensor, packed: Packed, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the largest uncertainty among a row's answers; `measure` is that of each distribution, [n, C] → [n]."""
    spread, owner = _spread(task, logits, packed)
    return largest_in_row(measure(spread), owner, packed.count)


def same_answers(task: Task, before: Tensor, now: Tensor, packed: Packed, tolerance: float) -> Tensor:
    """Whether two exits give a row the same answers; numbers agree when they differ by less than the tolerance."""
    if "distribution" not in task.provides:
        return (before - now).abs().amax(-1) < tolerance
    (old, owner), (new, _) = _spread(task, before, packed), _spread(task, now, packed)
    changed = (old.argmax(-1) != new.argmax(-1)).float()
    return largest_in_row(changed, owner, packed.count) == 0


def largest_in_row(values: Tensor, owner: Tensor | None, rows: int) -> Tensor:
    """Largest value per row; a row without any answer counts as sure."""
    if owner is None:
        return values
    return values.new_zeros(rows).scatter_reduce(0, owner, values, "amax", include_self=True)


def tokens_of_certain_words(sure: Tensor, packed: Packed) -> Tensor:
    """Words that are sure → their tokens, all pieces; tokens before the first word only with their whole row.

    `sure` [words] is for the tokens marked `scored`. A row without any word has nothing to wait for.
    """  # [tokens]
    words, row = packed.tokens[SCORED], packed.row_of_token
    if not bool(words.any()):
        return torch.ones_like(words)
    owner = words.long().cumsum(0) - 1  # the word each token belongs to
    mine = (owner >= 0) & (row[words][owner.clamp(min=0)] == row)
    doubtful = torch.bincount(row[words], weights=(~sure).float(), minlength=packed.count)
    return torch.where(mine, sure[owner.clamp(min=0)], (doubtful == 0)[row])


def _spread(task: Task, logits: Tensor, packed: Packed) -> tuple[Tensor, Tensor | None]:
    return task.distributions(logits, packed.lengths.to(logits.device), packed.tokens.get(SCORED))
