"""From scores to sentences: greedy and beam search over the step loop. Every sentence ends by itself.

Beam search is that of Hugging Face's `generate`: twice as many candidates as beams (more where several pieces end
a sentence), finished ones ranked by their score
divided by length to the power of the length penalty, an end when no running hypothesis can do better any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from offramp.decoding.loop import Decoding


@dataclass(frozen=True)
class Rules:
    """How sentences begin and end; read from a model's own generation configuration."""

    start: int
    ends: frozenset[int]
    never: tuple[int, ...] = ()  # pieces that are never said
    first: int | None = None  # the piece every sentence begins with
    last: int | None = None  # the piece a sentence ends with when it has become too long
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True)
class Said:
    """A sentence: its pieces with the end among them, and the exit that said each."""

    pieces: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)

    def plus(self, piece: int, block: int) -> Said:
        """One piece more."""
        return Said([*self.pieces, piece], [*self.exits, block])


def speak(decoding: Decoding, rules: Rules, limits: Sequence[int]) -> list[Said]:
    """Every sentence of the batch, each of at most so many pieces."""
    with torch.autocast(decoding.source.device.type, enabled=False):
        return _greedy(decoding, rules, limits) if decoding.beams == 1 else _Beams(decoding, rules, limits).run()


def _greedy(decoding: Decoding, rules: Rules, limits: Sequence[int]) -> list[Said]:
    said = [Said() for _ in limits]
    ids = torch.full((len(limits),), rules.start, device=decoding.source.device)
    going = list(range(len(limits)))  # sentences
    while going:
        scores = _ruled(decoding.advance(ids), rules, decoding.time)
        ids = scores.argmax(-1)
        pieces, stay = ids.tolist(), []
        for row, (sentence, block) in enumerate(zip(going, decoding.depth.tolist(), strict=True)):
            full = decoding.time == limits[sentence]
            piece = rules.last if full and rules.last is not None else pieces[row]
            said[sentence].pieces.append(piece)
            said[sentence].exits.append(block)
            if not full and piece not in rules.ends:
                stay.append(row)
        if len(stay) < len(going):
            going = [going[row] for row in stay]
            decoding.keep(np.array(stay, dtype=np.int64))
            ids = ids[stay]
    return said


def _ruled(scores: Tensor, rules: Rules, time: int) -> Tensor:
    """Scores without what may not be said. `time` counts the pieces with the one being chosen."""
    if rules.first is not None and time == 1:
        return _only(scores, rules.first)
    if rules.never:
        scores[:, list(rules.never)] = -torch.inf
    return scores


def _only(scores: Tensor, piece: int) -> Tensor:
    """Nothing but this piece, for sure."""
    forced = torch.full_like(scores, -torch.inf)
    forced[:, piece] = 0.0
    return forced


@dataclass
class _Sentence:
    """The hypotheses of one sentence."""

    number: int
    running: list[Said]
    scores: list[float]
    done: list[tuple[float, Said]] = field(default_factory=list)  # best first
    over: bool = False


class _Beams:
    """Beam search over a batch."""

    def __init__(self, decoding: Decoding, rules: Rules, limits: Sequence[int]) -> None:
        self.decoding, self.rules, self.limits, self.beams = decoding, rules, limits, decoding.beams
        unused = [-1e9] * (self.beams - 1)  # all beams begin alike: only one of them may bear children
        self.all = [_Sentence(i, [Said()] * self.beams, [0.0, *unused]) for i in range(len(limits))]

    def run(self) -> list[Said]:
        """All sentences to their ends."""
        going = list(self.all)
        ids = torch.full((len(going) * self.beams,), self.rules.start, device=self.decoding.source.device)
        while going:
            scores = self._scores(self.decoding.advance(ids).float().log_softmax(-1), going)
            base = self.decoding.going.reshape(-1, self.beams)  # rows of each sentence in memory
            best, index = scores.topk((1 + len(self.rules.ends)) * self.beams, dim=1)
            vocabulary, depth = scores.shape[1] // self.beams, self.decoding.depth.reshape(-1, self.beams)
            chosen: list[int] = []
            for row, sentence in enumerate(going):
                found = zip(best[row].tolist(), index[row].tolist(), strict=True)
                candidates = [(score, *divmod(place, vocabulary)) for score, place in found]
                parents = self._extend(sentence, candidates, depth[row].tolist())
                chosen += [] if sentence.over else base[row][parents].tolist()
            going = [sentence for sentence in going if not sentence.over]
            if going:
                self.decoding.take(np.array(chosen, dtype=np.int64))
                ids = torch.tensor([said.pieces[-1] for s in going for said in s.running], device=ids.device)
        return [sentence.done[0][1] for sentence in self.all]

    def _scores(self, scores: Tensor, going: list[_Sentence]) -> Tensor:
        """Accumulated over each hypothesis: [rows, vocabulary] → [sentences, beams · vocabulary]."""
        scores = _ruled(scores, self.rules, self.decoding.time)
        if self.rules.last is not None:
            full = [s.number for s in going for _ in s.running]
            for row, number in enumerate(full):
                if self.limits[number] == self.decoding.time:
                    scores[row] = _only(scores[row : row + 1], self.rules.last)[0]
        before = torch.tensor([score for s in going for score in s.scores], device=scores.device)
        return (scores + before[:, None]).view(len(going), -1)

    def _extend(self, sentence: _Sentence, candidates: list[tuple[float, int, int]], depth: list[int]) -> list[int]:
        """Candidates (score, beam, piece), best first, become finished or running; the beams that go on."""
        full, time = self.decoding.time == self.limits[sentence.number], self.decoding.time
        running: list[Said] = []
        scores, parents = [], []
        for rank, (score, beam, piece) in enumerate(candidates):
            made = sentence.running[beam].plus(piece, depth[beam])
            if full or piece in self.rules.ends:
                if rank < self.beams and not (self.rules.early_stopping and len(sentence.done) == self.beams):
                    sentence.done.append((score / time**self.rules.length_penalty, made))
            elif len(running) < self.beams:
                running.append(made)
                scores.append(score)
                parents.append(beam)
        sentence.done = sorted(sentence.done, key=lambda pair: -pair[0])[: self.beams]
        sentence.running, sentence.scores = running, scores
        sentence.over = full or self._settled(sentence)
        return parents

    def _settled(self, sentence: _Sentence) -> bool:
        """Whether no running hypothesis can beat the worst finished one."""
        if len(sentence.done) < self.beams:
            return False
        if self.rules.early_stopping:
            return True
        possible = sentence.scores[0] / self.decoding.time**self.rules.length_penalty
        return possible <= sentence.done[-1][0]
