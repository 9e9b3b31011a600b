"""What rows leave the loop with, and how it is put together again in the order of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offramp.core.cost import Event
from offramp.core.packed import Packed


class Answer(NamedTuple):
    """What a group of rows left with."""

    rows: Tensor  # [n] which rows of the original batch
    tokens: Tensor  # [their tokens] which tokens of it
    logits: Tensor
    layers: Tensor  # [n] float64


@dataclass(frozen=True)
class Result:
    """Answers in the order of the packed batch."""

    logits: Tensor  # [rows, outputs] or [tokens, outputs]
    exit_layer: Tensor  # [rows] float64: whole numbers, or the mean over tokens that left one by one
    trace: list[Event]


def answer(owners: Packed, logits: Tensor, layer: int) -> Answer:
    """Logits and exit layers of rows that leave; tokens that settled earlier keep what they said then."""
    layers = torch.full((owners.count,), float(layer), dtype=torch.float64)
    left = owners.tokens.get("left")
    if left is not None:
        logits = torch.where((left >= 0)[:, None], owners.tokens["answer"].to(logits.dtype), logits)
        own = torch.where(left >= 0, left, layer).double()
        layers = torch.zeros(owners.count, dtype=torch.float64).index_add(0, owners.row_of_token.cpu(), own.cpu())
        layers = layers / owners.lengths
    return Answer(owners.rows["origin"], owners.tokens["origin"], logits, layers)


def gather(answers: list[Answer], per_token: bool, trace: list[Event]) -> Result:
    """All groups together, in order."""
    if len(answers) == 1:  # everybody left together, in order
        return Result(answers[0].logits.float(), answers[0].layers, trace)
    rows = torch.cat([answer.rows for answer in answers])
    layers = torch.cat([answer.layers for answer in answers])
    owner = torch.cat([answer.tokens for answer in answers]) if per_token else rows
    logits = torch.cat([answer.logits.float() for answer in answers])
    return Result(logits[owner.argsort()], layers[rows.cpu().argsort()], trace)
