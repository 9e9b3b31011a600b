"""Thresholds for a decoder: thousands of draws replayed on one recording, the best BLEU of every segment of cost.

The recording is made under teacher forcing: after every block, how doubtful each word of the references is and whether
the likeliest piece is the right one. A draw of thresholds then says where each word would leave and which would be
right; BLEU is taken over n-grams that are right in place, which is exact arithmetic on an approximation of decoding.
What wins a segment is decoded for real afterwards, and only that result is kept.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offramp.decoding.exits import uncertainties
from offramp.decoding.teacher_forcing import Lesson, prices, unit_of
from offramp.decoding.training import marks
from offramp.nn.batches import Data, build_batch
from offramp.nn.exit_oracles import MultinomialExitUnit
from offramp.nn.network import Network

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
DRAWS = 10_000
SEGMENTS = 14
WORDS = 12_000  # recorded at most
CHUNK = 100
GRAMS = 4


@dataclass(frozen=True)
class WordTable:
    """What leaving after each block means, for every recorded word."""

    uncertainty: Array  # [blocks − 1, words]
    right: Bools  # [blocks, words]
    place: NDArray[np.int64]  # [words] position in its sentence, from 0
    reach: Array  # [blocks] MACs of a word that goes so far, copies above included
    ask: float  # MACs of asking once whether to leave

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.right)


def record_words(network: Network, data: Data, size: int = 64) -> WordTable:
    """Every exit on the words of the references, sentences in order of their length."""
    order = sorted(range(len(data.encoded)), key=lambda i: len(data.encoded[i].ids))
    ordered = order[:: max(1, sum(len(e.target) for e in data.encoded) // WORDS)]
    parts: list[tuple[Array, Bools, NDArray[np.int64]]] = []
    for start in range(0, len(ordered), size):
        made = build_batch(network.task, data, ordered[start : start + size], seed=None).to(network.device)
        with torch.inference_mode():
            lesson = Lesson(network, made)
            taught = lesson.taught(lesson.source())
            uncertainty = uncertainties(network, taught).double().cpu().numpy()
            right = marks(network, taught, 0.0, range(1, network.depth + 1)).right.cpu().numpy()
        parts.append((uncertainty, right, np.concatenate([np.arange(n) for n in taught.lengths.tolist()])))
    uncertainty, right, place = (np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))
    known = prices(network)
    word = np.cumsum([block.word for block in known.blocks])
    above = np.array([sum(block.copy for block in known.blocks[n:]) for n in range(1, network.depth + 1)])
    ask = known.vocabulary if unit_of(network) is None else known.word
    return WordTable(uncertainty, right, place, word + above, ask)


def replay(table: WordTable, thresholds: Array) -> tuple[Array, Array]:
    """MACs a word and BLEU of every draw [draws, blocks − 1]."""
    parts = [_replay(table, thresholds[i : i + CHUNK]) for i in range(0, len(thresholds), CHUNK)]
    cost, bleu = (np.concatenate(column) for column in zip(*parts, strict=True))
    return cost, bleu


def _replay(table: WordTable, thresholds: Array) -> tuple[Array, Array]:
    draws, words = len(thresholds), table.uncertainty.shape[1]
    going = np.ones((draws, words), dtype=bool)
    right = np.zeros((draws, words), dtype=bool)
    cost = np.zeros(draws)
    for block in range(table.blocks - 1):
        limit = thresholds[:, block, None]
        cost += table.ask * going.sum(1) * (limit[:, 0] > 0)
        leaving = going & (table.uncertainty[block] < limit)
        right |= leaving & table.right[block]
        cost += table.reach[block] * leaving.sum(1)
        going &= ~leaving
    right |= going & table.right[-1]
    return (cost + table.reach[-1] * going.sum(1)) / words, in_place_bleu(right, table.place)


def in_place_bleu(right: Bools, place: NDArray[np.int64]) -> Array:
    """BLEU, 0–100, of sentences as long as their references, counting n-grams that are right where they stand."""
    matched, logs = right, np.zeros(len(right))
    for n in range(1, GRAMS + 1):
        total = int((place >= n - 1).sum())
        if total == 0:
            continue
        found = matched[:, place >= n - 1].sum(1)
        logs += np.log(np.maximum(found, 0.5) / total) / GRAMS
        longer = np.zeros_like(right)
        longer[:, n:] = matched[:, n:] & right[:, :-n]
        matched = longer
    return np.asarray(100.0 * np.exp(logs))


def draw(table: WordTable, count: int, seed: int = 0) -> Array:
    """Thresholds: a third uniform (as published), a third at uniform ranks of each block's doubts, a third the same
    rank for all blocks."""  # [draws, blocks − 1]
    rng, blocks = np.random.default_rng(seed), table.blocks - 1
    third = count // 3
    ranks = np.concatenate((rng.random((third, blocks)), np.repeat(rng.random((third, 1)), blocks, axis=1)))
    ordered = np.sort(table.uncertainty, axis=1)
    index = (ranks * (ordered.shape[1] - 1)).astype(int)
    by_rank = ordered[np.arange(blocks)[None, :], index] * 1.0001
    return np.clip(np.concatenate((rng.random((count - 2 * third, blocks)), by_rank)), 0.0, 1.0)


def best_per_segment(cost: Array, bleu: Array, segments: int = SEGMENTS) -> list[int]:
    """The draw of best BLEU in every equal slice of the range of cost, cheapest first."""
    edges = np.linspace(cost.min(), cost.max() * (1 + 1e-9), segments + 1)
    slices = [np.flatnonzero((cost >= low) & (cost < high)) for low, high in itertools.pairwise(edges)]
    return [int(part[np.lexsort((cost[part], -bleu[part]))[0]]) for part in slices if len(part)]


def decoder_candidates(network: Network, data: Data, draws: int = DRAWS) -> list[dict[str, Any]]:
    """Settings worth decoding for real."""
    table = record_words(network, data)
    drawn = draw(table, draws)
    cost, bleu = replay(table, drawn)
    found: list[dict[str, Any]] = [
        {"thresholds": tuple(round(float(t), 6) for t in drawn[i])} for i in best_per_segment(cost, bleu)
    ]
    published = {"argmax": True} if isinstance(unit_of(network), MultinomialExitUnit) else {"threshold": 0.5}
    return [*found, published]
