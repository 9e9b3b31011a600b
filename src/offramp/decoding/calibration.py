"""Thresholds for a decoder: thousands of draws are replayed on one recording, and the best of each cost range is kept.

The recording is taken under teacher forcing: after every block, the uncertainty of each reference token and whether
the likeliest piece is the right one. From these, a draw of thresholds determines where each token would exit and
whether it would be right there. BLEU is computed over n-grams whose tokens are all right in place. That is exact
arithmetic on an approximation of decoding, so the best draw of each range is decoded for real afterwards, and only that
result is kept.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offramp.decoding.decoder import decoder_cost, halting_unit
from offramp.decoding.exits import block_uncertainties
from offramp.decoding.teacher_forcing import encode_source, teacher_force
from offramp.decoding.training import score_exits
from offramp.nn.batches import Data, build_batch
from offramp.nn.exit_oracles import MultinomialExitUnit
from offramp.nn.network import Network

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
DRAWS = 10_000
COST_RANGES = 14
RECORDED_TOKENS = 12_000  # at most
DRAWS_AT_ONCE = 100
LONGEST_NGRAM = 4


@dataclass(frozen=True)
class TokenRecording:
    """What exiting after each block means, for every recorded target token."""

    uncertainty: Array  # [blocks − 1, tokens]
    correct: Bools  # [blocks, tokens]
    position: NDArray[np.int64]  # [tokens] in its sentence, from 0
    exit_macs: Array  # [blocks] MACs of a token that exits there, its keys and values in the blocks above included
    decision_macs: float  # MACs of one exit decision

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.correct)


def record_tokens(network: Network, data: Data, size: int = 64) -> TokenRecording:
    """Record every exit on the tokens of the references, sentences in the order of their length."""
    order = sorted(range(len(data.encoded)), key=lambda i: len(data.encoded[i].ids))
    chosen = order[:: max(1, sum(len(e.target) for e in data.encoded) // RECORDED_TOKENS)]
    parts: list[tuple[Array, Bools, NDArray[np.int64]]] = []
    for start in range(0, len(chosen), size):
        rows = build_batch(network.task, data, chosen[start : start + size], seed=None).to(network.device)
        with torch.inference_mode():
            forced = teacher_force(network, rows, encode_source(network, rows))
            uncertainty = block_uncertainties(network, forced).double().cpu().numpy()
            correct = score_exits(network, forced, 0.0, range(1, network.depth + 1)).correct.cpu().numpy()
        parts.append((uncertainty, correct, np.concatenate([np.arange(n) for n in forced.lengths.tolist()])))
    uncertainty, correct, position = (np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))
    costs = decoder_cost(network)
    computed = np.cumsum([block.token for block in costs.blocks])
    copied = np.array([sum(block.copied_token for block in costs.blocks[n:]) for n in range(1, network.depth + 1)])
    decision = costs.vocabulary if halting_unit(network) is None else costs.token_unit
    return TokenRecording(uncertainty, correct, position, computed + copied, decision)


def replay_draws(recording: TokenRecording, thresholds: Array) -> tuple[Array, Array]:
    """Return MACs a token and BLEU of every draw of thresholds [draws, blocks − 1]."""
    starts = range(0, len(thresholds), DRAWS_AT_ONCE)
    parts = [_replay_some(recording, thresholds[i : i + DRAWS_AT_ONCE]) for i in starts]
    cost, bleu = (np.concatenate(column) for column in zip(*parts, strict=True))
    return cost, bleu


def _replay_some(recording: TokenRecording, thresholds: Array) -> tuple[Array, Array]:
    draws, tokens = len(thresholds), recording.uncertainty.shape[1]
    running = np.ones((draws, tokens), dtype=bool)
    correct = np.zeros((draws, tokens), dtype=bool)
    cost = np.zeros(draws)
    for block in range(recording.blocks - 1):
        threshold = thresholds[:, block, None]
        cost += recording.decision_macs * running.sum(1) * (threshold[:, 0] > 0)
        leaving = running & (recording.uncertainty[block] < threshold.astype(np.float32))  # as a run compares
        correct |= leaving & recording.correct[block]
        cost += recording.exit_macs[block] * leaving.sum(1)
        running &= ~leaving
    correct |= running & recording.correct[-1]
    mean_cost = (cost + recording.exit_macs[-1] * running.sum(1)) / tokens
    return mean_cost, in_place_bleu(correct, recording.position)


def in_place_bleu(correct: Bools, position: NDArray[np.int64]) -> Array:
    """Return BLEU, 0–100, of sentences as long as their references, counting n-grams that are right in place."""
    matched, logs = correct, np.zeros(len(correct))
    for n in range(1, LONGEST_NGRAM + 1):
        total = int((position >= n - 1).sum())
        if total == 0:
            continue
        found = matched[:, position >= n - 1].sum(1)
        logs += np.log(np.maximum(found, 0.5) / total) / LONGEST_NGRAM
        longer = np.zeros_like(correct)
        longer[:, n:] = matched[:, n:] & correct[:, :-n]
        matched = longer
    return np.asarray(100.0 * np.exp(logs))


def draw_thresholds(recording: TokenRecording, count: int, seed: int = 0) -> Array:
    """Draw thresholds [draws, blocks − 1].

    A third are uniform (as published), a third lie at uniform ranks of each block's uncertainties, and a third at the
    same rank for all blocks.
    """
    rng, blocks = np.random.default_rng(seed), recording.blocks - 1
    third = count // 3
    ranks = np.concatenate((rng.random((third, blocks)), np.repeat(rng.random((third, 1)), blocks, axis=1)))
    ordered = np.sort(recording.uncertainty, axis=1)
    index = (ranks * (ordered.shape[1] - 1)).astype(int)
    by_rank = ordered[np.arange(blocks)[None, :], index] * 1.0001
    return np.clip(np.concatenate((rng.random((count - 2 * third, blocks)), by_rank)), 0.0, 1.0)


def best_of_each_cost_range(cost: Array, bleu: Array, ranges: int = COST_RANGES) -> list[int]:
    """Return the draw of best BLEU in every one of `ranges` equal parts of the range of cost, cheapest first."""
    edges = np.linspace(cost.min(), cost.max() * (1 + 1e-9), ranges + 1)
    parts = [np.flatnonzero((cost >= low) & (cost < high)) for low, high in itertools.pairwise(edges)]
    return [int(part[np.lexsort((cost[part], -bleu[part]))[0]]) for part in parts if len(part)]


def decoder_candidates(network: Network, data: Data, draws: int = DRAWS) -> list[dict[str, Any]]:
    """Return settings worth decoding for real: the best replayed draws and the published setting."""
    recording = record_tokens(network, data)
    drawn = draw_thresholds(recording, draws)
    cost, bleu = replay_draws(recording, drawn)
    best: list[dict[str, Any]] = [
        {"thresholds": tuple(round(float(t), 6) for t in drawn[i])} for i in best_of_each_cost_range(cost, bleu)
    ]
    published = {"argmax": True} if isinstance(halting_unit(network), MultinomialExitUnit) else {"threshold": 0.5}
    return [*best, published]
