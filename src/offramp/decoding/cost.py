"""Multiply-accumulates of decoding, from what the step loop really did: copied projections and exit units included.

A word passes blocks 1…depth. In each it projects itself (and is fed forward), meets the words before it and the source.
The keys and values of words that left below are projected only where a later word asks for them, and the source's only
in blocks that some word of the sentence reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BlockCost:
    """MACs of one decoder block as coefficients."""

    word: float  # a word that passes: all projections of its own and the feed-forward
    copy: float  # a word that left below: its key and value
    near: float  # per pair of words
    source: float  # per token of the source: its key and value
    far: float  # per pair of a word and a token of the source


@dataclass(frozen=True)
class DecoderPrices:
    """What a decoder's parts and a method's exit units cost."""

    blocks: Sequence[BlockCost]
    vocabulary: float  # scoring the vocabulary once
    sentence: float = 0.0  # a unit that reads the source once
    word: float = 0.0  # a unit that reads a word each time it is asked


@dataclass
class Account:
    """What was computed for a batch of sentences."""

    source: Ints  # [sentences] tokens
    copied: Ints  # [blocks, sentences] keys and values of words that had left
    met: Ints  # [blocks, sentences] hypotheses (1 where there are no beams) that projected the source
    asked: NDArray[np.bool_]  # [blocks] whether the exit unit was asked there
    scored: NDArray[np.bool_]  # [blocks] whether the vocabulary was scored there for everybody who came
    planned: bool = False  # whether a unit read the source
    steps: list[tuple[int, Ints, Ints]] = field(default_factory=list)  # position, sentence of each word, its depth

    @classmethod
    def empty(cls, source: Ints, blocks: int) -> Account:
        """Nothing done yet."""
        zeros = np.zeros((blocks, len(source)), dtype=np.int64)
        return cls(source, zeros, zeros.copy(), np.zeros(blocks, dtype=bool), np.zeros(blocks, dtype=bool))

    @property
    def words(self) -> tuple[Ints, Ints, Ints]:
        """Position, sentence and depth of every word computed."""
        if not self.steps:
            return (np.zeros(0, dtype=np.int64),) * 3
        time = np.concatenate([np.full(len(owner), position) for position, owner, _ in self.steps])
        owners, depths = (np.concatenate([step[i] for step in self.steps]) for i in (1, 2))
        return time, owners, depths

    def word_blocks(self) -> Floats:
        """Blocks that each sentence's words went through together."""  # [sentences]
        _, owner, depth = self.words
        return np.bincount(owner, depth, len(self.source)).astype(np.float64)


def decoder_macs(account: Account, prices: DecoderPrices) -> Floats:
    """MACs of the decoder for every sentence."""
    time, owner, depth = account.words
    count = len(account.source)
    total = np.full(count, float(prices.sentence) if account.planned else 0.0)
    ever = np.zeros(len(owner), dtype=bool)  # words whose last answer came from a vocabulary scored on the way
    for block, cost in enumerate(prices.blocks, 1):
        here = depth >= block
        words = np.bincount(owner[here], minlength=count)
        pairs = np.bincount(owner[here], time[here] + 1, count)
        total += cost.word * words + cost.near * pairs + cost.far * words * account.source
        total += cost.copy * account.copied[block - 1] + cost.source * account.source * account.met[block - 1]
        total += words * (prices.word * account.asked[block - 1] + prices.vocabulary * account.scored[block - 1])
        ever |= (depth == block) & account.scored[block - 1]
    return np.asarray(total + prices.vocabulary * np.bincount(owner[~ever], minlength=count))


def full_decoder_macs(account: Account, prices: DecoderPrices) -> Floats:
    """What the full model would have spent on the same words: every block, one look at the vocabulary a word."""
    blocks = len(prices.blocks)
    fresh = Account.empty(account.source, blocks)
    fresh.met[:] = account.met.max(axis=0, initial=0)
    fresh.steps = [(position, owner, np.full_like(depth, blocks)) for position, owner, depth in account.steps]
    return decoder_macs(fresh, prices)
