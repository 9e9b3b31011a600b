"""Encoded rows as packed batches with targets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from offramp.core.packed import Packed, joined, pack
from offramp.data.tokenization import Encoded
from offramp.tasks import Task

TYPICAL_LENGTH = 64  # tokens of a row that batch sizes assume
LARGEST_FACTOR = 8  # how many times more rows a batch of short rows may have
SMALLEST_SHARE = 0.25  # of the full model's work that a row counts as at least, which bounds the tokens of a batch
FOLDS = 4  # of the training rows: what is fitted to rows and then learned from is fitted without a row's own fold


@dataclass(frozen=True)
class Batch:
    """What a training step gets."""

    packed: Packed
    targets: Tensor  # empty where rows have no labels
    indices: list[int]  # of the encoded rows: artifacts such as saliencies are looked up by them
    teacher: Tensor | None = None  # logits that exits learn beside the labels, one for each row or token

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return replace(self, packed=self.packed.to(device), targets=self.targets.to(device))


@dataclass(frozen=True)
class Data:
    """Rows with their encoding: `encoded[i].example` is an index into `rows`."""

    rows: Sequence[Mapping[str, Any]]
    encoded: list[Encoded]
    labelled: bool = True

    def subset(self, chosen: Sequence[bool]) -> Data:
        """Return the chosen rows, numbered as if the others did not exist."""
        number = {old: new for new, old in enumerate(i for i, wanted in enumerate(chosen) if wanted)}
        encoded = [replace(e, example=number[e.example]) for e in self.encoded if chosen[e.example]]
        return Data([self.rows[i] for i in number], encoded, self.labelled)

    @property
    def truncated_rows(self) -> int:
        """How many rows were longer than the model allows."""
        return len({e.example for e in self.encoded if e.cut})


def pack_rows(task: Task, encoded: Sequence[Encoded]) -> Packed:
    """Return encoded rows as a packed batch for the loop, without targets."""
    return _with_word_columns(pack([e.ids for e in encoded], [e.types for e in encoded]), task, encoded)


def build_batch(task: Task, data: Data, indices: Sequence[int], seed: int | None) -> Batch:
    """Return the encoded rows of these indices with their targets.

    Random masking depends on the seed and the row's index, never on the other rows of the batch; without a seed it
    depends on the row's own tokens alone.
    """
    chosen = [data.encoded[i] for i in indices]
    if not data.labelled:
        return Batch(pack_rows(task, chosen), torch.empty(0), list(indices))
    rngs = [None if seed is None else random.Random(f"{seed}:{i}") for i in indices]
    pairs = [task.inputs_and_targets(e, data.rows[e.example], rng) for e, rng in zip(chosen, rngs, strict=True)]
    packed = _with_word_columns(pack([p[0] for p in pairs], [e.types for e in chosen]), task, chosen)
    packed = packed.with_rows(fold=torch.tensor([fold_of(e.ids) for e in chosen]))
    return Batch(packed, task.stack_targets([p[1] for p in pairs]), list(indices))


def fold_of(ids: Sequence[int]) -> int:
    """Return the fold of the training rows that a row belongs to, by its tokens: equal rows are in the same fold."""
    return sum(ids) % FOLDS


def epoch_batches(task: Task, data: Data, size: int, seed: int) -> list[list[int]]:
    """Return the indices of the encoded rows of an epoch in batches of `size`, in an order drawn from the seed.

    The number of batches is the same for every seed. Target sentences are padded in training, so rows of sequence tasks
    are grouped by length: a batch holds `size` rows of mean length, more short rows or fewer long ones.
    """
    total, generator = len(data.encoded), torch.Generator().manual_seed(seed)
    order = torch.randperm(total, generator=generator).tolist()
    if task.kind != "sequence":
        return [order[start : start + size] for start in range(0, total, size)]
    weight = [len(e.ids) + len(e.target) for e in data.encoded]
    order.sort(key=weight.__getitem__)  # stable: the draw decides among equals
    capacity = max(1, size * sum(weight) // max(1, total))
    groups: list[list[int]] = [[]]
    for row in order:
        if groups[-1] and (len(groups[-1]) + 1) * weight[row] > capacity:
            groups.append([])
        groups[-1].append(row)
    return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]


def batches_by_length(
    lengths: Sequence[int], batch_size: int, expected_share: Callable[[int], float] | None = None
) -> Iterator[list[int]]:
    """Yield the indices of rows to run together, shortest first.

    A batch has as many tokens as `batch_size` rows of `TYPICAL_LENGTH`, so short rows come in larger batches
    (`LARGEST_FACTOR` times as many rows at most) and long ones in smaller; 1 is one row at a time. With an
    `expected_share` of the full model's work by length, tokens count by the work that they are predicted to take.
    """
    most_rows = batch_size * LARGEST_FACTOR if batch_size > 1 else 1
    index: list[int] = []
    work = 0.0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        own = lengths[i] * (1.0 if expected_share is None else max(SMALLEST_SHARE, expected_share(lengths[i])))
        work += own
        if index and (len(index) == most_rows or work > batch_size * TYPICAL_LENGTH):
            yield index
            index, work = [], own
        index.append(i)
    if index:
        yield index


def _with_word_columns(packed: Packed, task: Task, encoded: Sequence[Encoded]) -> Packed:
    """Add the word of each token and, where words have answers, mark each word's first piece, where its answer is."""
    packed = packed.with_tokens(word=torch.from_numpy(joined([e.words for e in encoded])))
    if task.kind != "token":
        return packed
    pairs = (pair for e in encoded for pair in zip([-1, *e.words], e.words, strict=False))
    return packed.with_tokens(scored=torch.tensor([word >= 0 and word != before for before, word in pairs]))
