"""Encoded rows → packed batches with targets."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from offramp.core.packed import Packed, joined, pack
from offramp.data.tokenization import Encoded
from offramp.tasks import Task

FOLDS = 4  # parts of the training rows: what is made from rows and learned from is made without a row's own part


@dataclass(frozen=True)
class Batch:
    """What a training step gets."""

    packed: Packed
    targets: Tensor  # empty where rows have no labels
    indices: list[int]  # which encoded rows these are: artifacts such as saliencies are looked up by them

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(self.packed.to(device), self.targets.to(device), self.indices)


@dataclass(frozen=True)
class Data:
    """Rows and their encoding, kept together: `encoded[i].example` points into `rows`."""

    rows: Sequence[Mapping[str, Any]]
    encoded: list[Encoded]
    labelled: bool = True

    def subset(self, chosen: Sequence[bool]) -> Data:
        """Some of the rows, as if the others had never been there."""
        number = {old: new for new, old in enumerate(i for i, wanted in enumerate(chosen) if wanted)}
        encoded = [replace(e, example=number[e.example]) for e in self.encoded if chosen[e.example]]
        return Data([self.rows[i] for i in number], encoded, self.labelled)

    @property
    def truncated_rows(self) -> int:
        """How many rows were longer than the model allows."""
        return len({e.example for e in self.encoded if e.cut})


def pack_rows(task: Task, encoded: Sequence[Encoded]) -> Packed:
    """Rows ready for the loop, without targets."""
    return _columns(pack([e.ids for e in encoded], [e.types for e in encoded]), task, encoded)


def build_batch(task: Task, data: Data, ids: Sequence[int], seed: int | None) -> Batch:
    """Rows `ids` with their targets. Random masking depends on the seed and the row's number, never on batch mates;
    without a seed on the row's own words alone."""
    chosen = [data.encoded[i] for i in ids]
    if not data.labelled:
        return Batch(pack_rows(task, chosen), torch.empty(0), list(ids))
    rngs = [None if seed is None else random.Random(f"{seed}:{i}") for i in ids]
    pairs = [task.inputs_and_targets(e, data.rows[e.example], rng) for e, rng in zip(chosen, rngs, strict=True)]
    packed = _columns(pack([p[0] for p in pairs], [e.types for e in chosen]), task, chosen)
    packed = packed.with_rows(fold=torch.tensor([fold_of(e.ids) for e in chosen]))
    return Batch(packed, task.stack_targets([p[1] for p in pairs]), list(ids))


def fold_of(ids: Sequence[int]) -> int:
    """Which part of the training rows a row belongs to: by its tokens, so that rows that are alike lie together."""
    return sum(ids) % FOLDS


def epoch_batches(task: Task, data: Data, size: int, seed: int) -> list[list[int]]:
    """Encoded rows of an epoch in batches of `size`, drawn anew for every seed, always the same number of batches.

    Sentences to be said lie side by side in training, so those are grouped by length: `size` rows of mean length make a
    batch, more short ones, fewer long ones.
    """
    total, make = len(data.encoded), torch.Generator().manual_seed(seed)
    order = torch.randperm(total, generator=make).tolist()
    if task.kind != "sequence":
        return [order[start : start + size] for start in range(0, total, size)]
    weight = [len(e.ids) + len(e.target) for e in data.encoded]
    order.sort(key=weight.__getitem__)  # stable: the draw decides among equals
    room = max(1, size * sum(weight) // max(1, total))
    groups: list[list[int]] = [[]]
    for row in order:
        if groups[-1] and (len(groups[-1]) + 1) * weight[row] > room:
            groups.append([])
        groups[-1].append(row)
    return [groups[i] for i in torch.randperm(len(groups), generator=make).tolist()]


def _columns(packed: Packed, task: Task, encoded: Sequence[Encoded]) -> Packed:
    """Which word each token belongs to; where words have answers, mark their first piece: there the answer stands."""
    packed = packed.with_tokens(word=torch.from_numpy(joined([e.words for e in encoded])))
    if task.kind != "token":
        return packed
    pairs = (pair for e in encoded for pair in zip([-1, *e.words], e.words, strict=False))
    return packed.with_tokens(scored=torch.tensor([word >= 0 and word != before for before, word in pairs]))
