"""Greedy and beam search over the decode loop. Each sentence ends on its own, whatever the others of its batch do.

Beam search is that of Hugging Face's `generate`: twice as many candidates as beams (more where several pieces can end
a sentence), finished hypotheses ranked by their score divided by length to the power of the length penalty, an end when
no running hypothesis can become better than the finished ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from offramp.decoding.loop import Decoding


@dataclass(frozen=True)
class GenerationRules:
    """How sentences begin and end, as the model's own generation configuration has it."""

    start: int  # the id before the first piece
    ends: frozenset[int]  # pieces that end a sentence
    banned: tuple[int, ...] = ()  # pieces that are never chosen
    forced_first: int | None = None  # the piece every sentence begins with
    forced_last: int | None = None  # the last piece of a sentence that reached its length limit
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True)
class Hypothesis:
    """A sentence: its pieces, the end included, and the exit that chose each piece."""

    pieces: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)

    def extended(self, piece: int, exit_block: int) -> Hypothesis:
        """Return the hypothesis with one more piece."""
        return Hypothesis([*self.pieces, piece], [*self.exits, exit_block])


def generate(decoding: Decoding, rules: GenerationRules, limits: Sequence[int]) -> list[Hypothesis]:
    """Return the best hypothesis of every sentence, each of at most `limits` pieces."""
    search = greedy_search if decoding.beams == 1 else beam_search
    with torch.autocast(decoding.source.device.type, enabled=False):
        return search(decoding, rules, limits)


def greedy_search(decoding: Decoding, rules: GenerationRules, limits: Sequence[int]) -> list[Hypothesis]:
    """Choose the best piece at every step."""
    hypotheses = [Hypothesis() for _ in limits]
    ids = torch.full((len(limits),), rules.start, device=decoding.source.device)
    running = list(range(len(limits)))  # the sentence of each active row
    while running:
        ids = _allowed(decoding.step(ids), rules, decoding.position).argmax(-1)
        pieces, unfinished = ids.tolist(), []
        for row, (sentence, exit_block) in enumerate(zip(running, decoding.depth.tolist(), strict=True)):
            at_limit = decoding.position == limits[sentence]
            piece = rules.forced_last if at_limit and rules.forced_last is not None else pieces[row]
            hypotheses[sentence].pieces.append(piece)
            hypotheses[sentence].exits.append(exit_block)
            if not at_limit and piece not in rules.ends:
                unfinished.append(row)
        if len(unfinished) < len(running):
            running = [running[row] for row in unfinished]
            decoding.keep_active(np.array(unfinished, dtype=np.int64))
            ids = ids[unfinished]
    return hypotheses


def beam_search(decoding: Decoding, rules: GenerationRules, limits: Sequence[int]) -> list[Hypothesis]:
    """Follow `decoding.beams` hypotheses of every sentence and return the best."""
    return _BeamSearch(decoding, rules, limits).run()


def _allowed(scores: Tensor, rules: GenerationRules, length: int) -> Tensor:
    """Return the scores with −∞ for pieces the rules exclude; `length` counts the piece being chosen."""
    if rules.forced_first is not None and length == 1:
        return _only(scores, rules.forced_first)
    if rules.banned:
        scores[:, list(rules.banned)] = -torch.inf
    return scores


def _only(scores: Tensor, piece: int) -> Tensor:
    """Return scores that leave this piece as the only choice, with probability 1."""
    forced = torch.full_like(scores, -torch.inf)
    forced[:, piece] = 0.0
    return forced


@dataclass
class _Beams:
    """The hypotheses of one sentence."""

    sentence: int
    running: list[Hypothesis]
    scores: list[float]
    finished: list[tuple[float, Hypothesis]] = field(default_factory=list)  # best first
    done: bool = False


class _BeamSearch:
    """Beam search over a batch."""

    def __init__(self, decoding: Decoding, rules: GenerationRules, limits: Sequence[int]) -> None:
        self.decoding, self.rules, self.limits, self.beams = decoding, rules, limits, decoding.beams
        unused = [-1e9] * (self.beams - 1)  # all beams begin alike, so that only one of them may be extended at first
        self.all = [_Beams(i, [Hypothesis()] * self.beams, [0.0, *unused]) for i in range(len(limits))]

    def run(self) -> list[Hypothesis]:
        """Step until every sentence is done."""
        running = list(self.all)
        ids = torch.full((len(running) * self.beams,), self.rules.start, device=self.decoding.source.device)
        while running:
            scores = self._accumulated(self.decoding.step(ids).float().log_softmax(-1), running)
            rows = self.decoding.active.reshape(-1, self.beams)  # [sentences, beams] rows of the caches
            best, index = scores.topk((1 + len(self.rules.ends)) * self.beams, dim=1)
            vocabulary, depth = scores.shape[1] // self.beams, self.decoding.depth.reshape(-1, self.beams)
            chosen: list[int] = []
            for row, beams in enumerate(running):
                found = zip(best[row].tolist(), index[row].tolist(), strict=True)
                candidates = [(score, *divmod(place, vocabulary)) for score, place in found]
                parents = self._extend(beams, candidates, depth[row].tolist())
                chosen += [] if beams.done else rows[row][parents].tolist()
            running = [beams for beams in running if not beams.done]
            if running:
                self.decoding.select_rows(np.array(chosen, dtype=np.int64))
                last_pieces = [hypothesis.pieces[-1] for beams in running for hypothesis in beams.running]
                ids = torch.tensor(last_pieces, device=ids.device)
        return [beams.finished[0][1] for beams in self.all]

    def _accumulated(self, scores: Tensor, running: list[_Beams]) -> Tensor:
        """Add the score of each hypothesis so far: [rows, vocabulary] → [sentences, beams · vocabulary]."""
        scores = _allowed(scores, self.rules, self.decoding.position)
        if self.rules.forced_last is not None:
            sentences = [beams.sentence for beams in running for _ in beams.running]
            for row, sentence in enumerate(sentences):
                if self.limits[sentence] == self.decoding.position:
                    scores[row] = _only(scores[row : row + 1], self.rules.forced_last)[0]
        before = torch.tensor([score for beams in running for score in beams.scores], device=scores.device)
        return (scores + before[:, None]).view(len(running), -1)

    def _extend(self, beams: _Beams, candidates: list[tuple[float, int, int]], depth: list[int]) -> list[int]:
        """Turn candidates (score, beam, piece), best first, into finished or running hypotheses.

        Returns the beam that each running hypothesis continues.
        """
        length = self.decoding.position
        at_limit = length == self.limits[beams.sentence]
        running: list[Hypothesis] = []
        scores, parents = [], []
        for rank, (score, beam, piece) in enumerate(candidates):
            hypothesis = beams.running[beam].extended(piece, depth[beam])
            if at_limit or piece in self.rules.ends:
                if rank < self.beams and not (self.rules.early_stopping and len(beams.finished) == self.beams):
                    beams.finished.append((score / length**self.rules.length_penalty, hypothesis))
            elif len(running) < self.beams:
                running.append(hypothesis)
                scores.append(score)
                parents.append(beam)
        beams.finished = sorted(beams.finished, key=lambda pair: -pair[0])[: self.beams]
        beams.running, beams.scores = running, scores
        beams.done = at_limit or self._cannot_improve(beams)
        return parents

    def _cannot_improve(self, beams: _Beams) -> bool:
        """Return whether no running hypothesis can become better than the worst finished one."""
        if len(beams.finished) < self.beams:
            return False
        if self.rules.early_stopping:
            return True
        possible = beams.scores[0] / self.decoding.position**self.rules.length_penalty
        return possible <= beams.finished[-1][0]
