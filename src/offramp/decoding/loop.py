"""The step loop of encoder–decoders: one word a sentence and step, each through as many blocks as a policy lets it.

    embed ─► [ attend to the words so far ─► attend to the source ─► feed ─► word_depths ] × depth ─► vocabulary

A word that leaves is scored by the exit where it left; its state stays for the blocks above (core/memory.py). Sentences
that are finished cost nothing more. All rows stand at the same position, so nothing but the source is ever padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from offramp.core.kv_cache import Asked, Projections, Source, Words, look, put
from offramp.core.policy import Policy
from offramp.decoding.cost import Account, Ints

CROWD = 0.75  # rows are taken out of memory when no more than this share of them still goes on


class Ready(Projections, Protocol):
    """A decoder block with its parameters at hand, in the order a word goes through it."""

    def project(self, x: Tensor) -> Tensor:
        """Query, key and value side by side: [n, hidden] → [n, 3 · hidden]."""

    def settle(self, x: Tensor, seen: Tensor) -> Tensor:
        """What was seen among the words, taken in."""

    def ask(self, x: Tensor) -> Tensor:
        """The query to the source."""

    def finish(self, x: Tensor, seen: Tensor) -> Tensor:
        """What was seen in the source, taken in, and fed forward."""


@dataclass(frozen=True)
class Speaker:
    """A decoder ready to run. `exits[n − 1]` scores the vocabulary after block n; the same object where shared."""

    embed: Callable[[Tensor, int], Tensor]  # ids [rows], their position → [rows, hidden]
    blocks: Sequence[Ready]
    exits: Sequence[Callable[[Tensor], Tensor]]
    heads: int


class Decoding:
    """A batch of sentences being decoded, `beams` rows each."""

    def __init__(self, speaker: Speaker, policy: Policy, source: Tensor, lengths: Tensor, beams: int = 1) -> None:
        self.speaker, self.policy, self.beams, self.time = speaker, policy, beams, 0
        self.source = source  # [sentences, tokens, hidden]
        sentences, depth = source.shape[0], len(speaker.blocks)
        self.account = Account.empty(lengths.numpy(), depth)
        self.mask = _padding(lengths.to(source.device), source.shape[1])
        self.words = [Words(sentences * beams, source, speaker.heads) for _ in range(depth)]
        self.seen = [Source(source, speaker.heads) for _ in range(depth)]
        self.states = source.new_zeros(sentences * beams, self.words[0].both.shape[1], source.shape[2])
        self.sentence = np.repeat(np.arange(sentences), beams)  # whose each row in memory is
        self.place = self.sentence.copy()  # where that sentence lies in memory
        self.going = np.arange(sentences * beams)  # rows in memory that still go on
        self.plan = np.repeat(self._planned(lengths), beams)
        self.depth = self.plan  # of the words of the last step, for rows still going on

    def _planned(self, lengths: Tensor) -> Ints:
        """The depth of every sentence."""
        depth, count = len(self.speaker.blocks), self.source.shape[0]
        real = self.mask[:, 0, 0, :, None].exp() if self.mask is not None else 1.0
        told = self.policy.sentence_depths((self.source * real).sum(1) / lengths.to(self.source)[:, None])
        if told is None:
            return np.full(count, depth)
        self.account.planned = not self.policy.free
        return np.asarray(told.cpu().numpy().clip(1, depth))

    def on(self, index: Ints) -> Tensor:
        """An index where the states are."""
        return torch.from_numpy(index).to(self.source.device)

    def advance(self, ids: Tensor) -> Tensor:
        """One more word of every row that goes on: the last ids [rows] → what follows, over the vocabulary."""
        if self.time == self.states.shape[1]:
            self._grow()
        x = self.speaker.embed(ids, self.time)
        everybody = len(self.going) == len(self.sentence)
        step = _Step(self, x, None if everybody else self.on(self.going))
        step.run()
        self.depth = step.depth[self.going]
        self.account.steps.append((self.time, self.sentence[self.going], self.depth))
        answers = step.answers()
        self.time += 1
        return answers

    def keep(self, going: Ints) -> None:
        """Only these (indices into the rows that went on until now) go on; the others leave the batch."""
        self.going = self.going[going]
        if len(self.going) <= CROWD * len(self.sentence) and len(self.going):
            self.take(self.going)

    def take(self, rows: Ints) -> None:
        """Memory becomes these rows, in this order; whole sentences of `beams` rows, which may follow one another."""
        places = self.place[rows[:: self.beams]]
        if len(places) < self.source.shape[0]:
            index = self.on(places)
            self.source = self.source.index_select(0, index)
            self.mask = None if self.mask is None else self.mask.index_select(0, index)
            for seen in self.seen:
                seen.take(index, places)
        if not np.array_equal(rows, np.arange(len(self.sentence))):
            index = self.on(rows)
            self.states = self.states.index_select(0, index)
            for words in self.words:
                words.take(index, rows)
        self.sentence, self.plan = self.sentence[rows], self.plan[rows]
        self.place, self.going = np.repeat(np.arange(len(places)), self.beams), np.arange(len(rows))

    def _grow(self) -> None:
        self.states = torch.cat((self.states, torch.zeros_like(self.states)), dim=1)
        for words in self.words:
            words.grow()


class _Step:
    """One position of all rows that go on."""

    def __init__(self, d: Decoding, x: Tensor, rows: Tensor | None) -> None:
        self.d, self.x, self.rows, self.index = d, x, rows, d.going
        self.depth = d.plan.copy()
        self.said: dict[int, Tensor] = {}  # depth → what the exit there said of the rows that left

    def run(self) -> None:
        """Through the blocks, fewer and fewer rows."""
        d, last = self.d, len(self.d.speaker.blocks)
        for block in range(1, last + 1):
            self._pass(block)
            if block < last and self._part(block):
                return
        put(d.states, d.time, self.index, self.x)

    def _pass(self, number: int) -> None:
        d, x, time, total = self.d, self.x, self.d.time, len(self.d.sentence)
        block, words, seen = d.speaker.blocks[number - 1], d.words[number - 1], d.seen[number - 1]
        wide = x.shape[1]
        projected = block.project(x)
        lag = words.catch_up(block, d.states, time, self.index)
        words.write(time, self.index, projected[:, wide:])
        keys, values = words.keys.narrow(2, 0, time + 1), words.values.narrow(2, 0, time + 1)
        x = block.settle(x, look(projected[:, :wide], keys, values, Asked(self.rows, total)))
        fresh = seen.meet(block, d.source, d.place[self.index])
        if lag is not None:
            d.account.copied[number - 1] += np.bincount(d.sentence[self.index], lag, len(d.account.source)).astype(int)
        if len(fresh):
            d.account.met[number - 1, d.sentence[fresh * d.beams]] = 1
        self.x = block.finish(x, look(block.ask(x), seen.keys, seen.values, Asked(self.rows, total, d.mask)))

    def _part(self, block: int) -> bool:
        """Those who leave here are put aside; whether nobody is left."""
        d = self.d
        scored: list[Tensor] = []

        def logits() -> Tensor:
            if not scored:
                scored.append(d.speaker.exits[block - 1](self.x))
                d.account.scored[block - 1] = True
            return scored[0]

        told = d.policy.word_depths(block, self.x, logits)
        if told is not None:
            d.account.asked[block - 1] = not d.policy.free
            self.depth[self.index] = told.cpu().numpy()
        stay = self.depth[self.index] > block
        kept = np.flatnonzero(stay)
        if len(kept) == len(stay):
            return False
        put(d.states, d.time, self.index, self.x)  # those who stay write again further up
        self.depth[self.index[~stay]] = block
        if scored:
            self.said[block] = scored[0][d.on(np.flatnonzero(~stay))] if len(kept) else scored[0]
        if not len(kept):
            return True
        self.x, self.index = self.x.index_select(0, d.on(kept)), self.index[kept]
        self.rows = d.on(self.index)
        return False

    def answers(self) -> Tensor:
        """Scores over the vocabulary, each row's from the exit where its word left."""  # [rows going on, vocabulary]
        d, exits = self.d, self.d.speaker.exits
        if not self.said and all(one is exits[0] for one in exits):
            return exits[0](d.states[slice(None) if len(d.going) == len(d.sentence) else d.on(d.going), d.time])
        depth = self.depth[d.going]
        made: Tensor | None = None
        for block in np.unique(depth):
            mine = d.going[depth == block]
            if block in self.said:
                part = self.said[block]
            else:
                part = exits[block - 1](d.states[self.d.on(mine), d.time])
            if len(mine) == len(d.going):
                return part
            made = part.new_empty(len(d.going), part.shape[1]) if made is None else made
            made[self.d.on((depth == block).nonzero()[0])] = part
        assert made is not None
        return made


def _padding(lengths: Tensor, wide: int) -> Tensor | None:
    real = torch.arange(wide, device=lengths.device)[None, :] < lengths[:, None]
    if bool(real.all()):
        return None
    return torch.zeros(real.shape, device=real.device).masked_fill(~real, -torch.inf)[:, None, None, :]
