"""How sure an exit is, as one number per row. A row with several answers is as sure as its least sure answer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offramp.core.columns import SCORED
from offramp.core.packed import Packed
from offramp.tasks import Task


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats of each distribution; impossible outcomes have the logit −∞."""  # [n, C] → [n]
    return torch.special.entr(logits.float().softmax(-1)).sum(-1)


def normalised_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each distribution divided by that of a uniform one over its possible outcomes."""  # [n]
    outcomes = (~torch.isneginf(logits)).sum(-1).clamp(min=2)
    return entropy(logits) / outcomes.float().log()


def row_entropy(task: Task, logits: Tensor, packed: Packed) -> Tensor:
    """Return the largest entropy among a row's answers, in nats."""  # [rows]
    return row_uncertainty(task, logits, packed, entropy)


def row_normalised_entropy(task: Task, logits: Tensor, packed: Packed) -> Tensor:
    """Return the largest normalised entropy among a row's answers: 0 certain … 1 uniform."""  # [rows]
    return row_uncertainty(task, logits, packed, normalised_entropy)


def row_least_confidence(task: Task, logits: Tensor, packed: Packed) -> Tensor:
    """Return one minus the probability of the best answer, the largest among a row's answers."""  # [rows]
    return row_uncertainty(task, logits, packed, lambda answers: 1.0 - answers.float().softmax(-1).amax(-1))


def row_uncertainty(task: Task, logits: Tensor, packed: Packed, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the largest uncertainty among a row's answers, where `measure` maps logits [n, C] to uncertainties [n]."""
    answers, row_of_answer = _answers(task, logits, packed)
    return largest_in_row(measure(answers), row_of_answer, packed.count)


def same_answers(task: Task, before: Tensor, now: Tensor, packed: Packed, tolerance: float) -> Tensor:
    """Return whether two exits agree on all answers of a row; numbers agree within the tolerance."""  # [rows]
    if "distribution" not in task.provides:
        return (before - now).abs().amax(-1) < tolerance
    (old, row_of_answer), (new, _) = _answers(task, before, packed), _answers(task, now, packed)
    changed = (old.argmax(-1) != new.argmax(-1)).float()
    return largest_in_row(changed, row_of_answer, packed.count) == 0


def largest_in_row(values: Tensor, row_of_answer: Tensor | None, rows: int) -> Tensor:
    """Return the largest value of each row; 0 for a row without any answer."""  # [answers] → [rows]
    if row_of_answer is None:
        return values
    return values.new_zeros(rows).scatter_reduce(0, row_of_answer, values, "amax", include_self=True)


def tokens_of_certain_words(certain: Tensor, packed: Packed) -> Tensor:
    """Return the tokens, all pieces, of words that are certain; tokens before a row's first word only if the whole row
    is certain.

    `certain` [words] belongs to the tokens marked `scored`. A row without any word is certain.
    """  # [tokens]
    starts, row = packed.tokens[SCORED], packed.row_of_token
    if not bool(starts.any()):
        return torch.ones_like(starts)
    word = starts.long().cumsum(0) - 1  # the word each token belongs to
    in_word = (word >= 0) & (row[starts][word.clamp(min=0)] == row)
    uncertain = torch.bincount(row[starts], weights=(~certain).float(), minlength=packed.count)
    return torch.where(in_word, certain[word.clamp(min=0)], (uncertain == 0)[row])


def _answers(task: Task, logits: Tensor, packed: Packed) -> tuple[Tensor, Tensor | None]:
    """Return the logits of each answer, and the row that it belongs to (None: one answer per row)."""
    return task.distributions(logits, packed.lengths.to(logits.device), packed.tokens.get(SCORED))
