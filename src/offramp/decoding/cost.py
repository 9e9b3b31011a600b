"""Multiply-accumulates of decoding, from what the decode loop really did: copied projections and exit units included.

A target token passes blocks 1…depth. In each of them it is projected, attends to the tokens before it and to the
source, and goes through the feed-forward part. Keys and values of tokens that exited below a block are projected there
only when a later token reaches the block, and those of the source only in blocks that some token of the sentence
reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offramp.core.decoder import BlockCost

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DecoderCost:
    """MACs of a decoder's parts and of a method's exit unit."""

    blocks: Sequence[BlockCost]
    vocabulary: float  # scoring the vocabulary for one token
    sentence_unit: float = 0.0  # an exit unit that reads the source, per sentence
    token_unit: float = 0.0  # an exit unit that reads target tokens, per token and block


@dataclass
class DecodeTrace:
    """What was computed for a batch of sentences."""

    source_lengths: Ints  # [sentences] tokens
    copied: Ints  # [blocks, sentences] tokens that exited below and whose keys and values were projected there
    source_projections: Ints  # [blocks, sentences] 1 where the keys and values of the source were projected
    unit_ran: NDArray[np.bool_]  # [blocks] whether the exit unit read the tokens there
    vocabulary_scored: NDArray[np.bool_]  # [blocks] whether the policy scored the vocabulary for all tokens there
    sentence_unit_ran: bool = False  # whether an exit unit read the source
    steps: list[tuple[int, Ints, Ints]] = field(default_factory=list)  # position; sentence and depth of each token

    @classmethod
    def empty(cls, source_lengths: Ints, blocks: int) -> DecodeTrace:
        """Return the trace of a batch for which nothing was computed yet."""
        zeros = np.zeros((blocks, len(source_lengths)), dtype=np.int64)
        return cls(source_lengths, zeros, zeros.copy(), np.zeros(blocks, dtype=bool), np.zeros(blocks, dtype=bool))

    @property
    def tokens(self) -> tuple[Ints, Ints, Ints]:
        """Position, sentence and depth of every target token computed."""
        if not self.steps:
            return (np.zeros(0, dtype=np.int64),) * 3
        position = np.concatenate([np.full(len(sentence), step) for step, sentence, _ in self.steps])
        sentence, depth = (np.concatenate([step[i] for step in self.steps]) for i in (1, 2))
        return position, sentence, depth

    def token_blocks(self) -> Floats:
        """Return the sum of depths of each sentence's tokens."""  # [sentences]
        _, sentence, depth = self.tokens
        return np.bincount(sentence, depth, len(self.source_lengths)).astype(np.float64)


def decoder_macs(trace: DecodeTrace, cost: DecoderCost) -> Floats:
    """Return the MACs that the decoder spent on every sentence."""
    position, sentence, depth = trace.tokens
    count = len(trace.source_lengths)
    total = np.full(count, float(cost.sentence_unit) if trace.sentence_unit_ran else 0.0)
    scored = np.zeros(len(sentence), dtype=bool)  # tokens whose vocabulary scores were computed for the exit decision
    for number, block in enumerate(cost.blocks, 1):
        reached = depth >= number
        tokens = np.bincount(sentence[reached], minlength=count)
        pairs = np.bincount(sentence[reached], position[reached] + 1, count)
        total += block.token * tokens + block.self_pair * pairs + block.cross_pair * tokens * trace.source_lengths
        source_tokens = trace.source_lengths * trace.source_projections[number - 1]
        total += block.copied_token * trace.copied[number - 1] + block.source_token * source_tokens
        per_token = cost.token_unit * trace.unit_ran[number - 1] + cost.vocabulary * trace.vocabulary_scored[number - 1]
        total += tokens * per_token
        scored |= (depth == number) & trace.vocabulary_scored[number - 1]
    return np.asarray(total + cost.vocabulary * np.bincount(sentence[~scored], minlength=count))


def full_decoder_macs(trace: DecodeTrace, cost: DecoderCost) -> Floats:
    """Return what the full model would have spent on the same tokens: every block, one scoring of the vocabulary."""
    blocks = len(cost.blocks)
    full = DecodeTrace.empty(trace.source_lengths, blocks)
    full.source_projections[:] = trace.source_projections.max(axis=0, initial=0)
    full.steps = [(position, sentence, np.full_like(depth, blocks)) for position, sentence, depth in trace.steps]
    return decoder_macs(full, cost)
