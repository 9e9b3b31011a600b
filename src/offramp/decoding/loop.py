"""The decode loop: one target token of every hypothesis a step, each through as many blocks as the policy decides.

    embed ─► [ self-attention ─► cross-attention ─► feed-forward ─► policy ] × depth ─► vocabulary

A token that exits is scored by the exit where it left; the blocks above take its keys and values from its last state
(kv_cache.py). Finished sentences cost nothing more. All hypotheses are at the same position, so that only the source is
padded, and its padding is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offramp.core.decoder import StepBlock
from offramp.core.policy import Policy
from offramp.decoding.cost import DecodeTrace, Ints
from offramp.decoding.kv_cache import CrossAttentionCache, SelfAttentionCache, attend_cached, write_position

COMPACT_BELOW = 0.75  # finished rows are removed from the caches when at most this share of rows is still active


@dataclass(frozen=True)
class StepDecoder:
    """A decoder ready for one-token steps.

    `exits[n − 1]` scores the vocabulary after block n; it is the same object for all blocks that share their scoring.
    """

    embed: Callable[[Tensor, int], Tensor]  # ids [rows], their position → [rows, hidden]
    blocks: Sequence[StepBlock]
    exits: Sequence[Callable[[Tensor], Tensor]]
    heads: int


class Decoding:
    """A batch of sentences being decoded, with `beams` rows (hypotheses) in the caches for each."""

    def __init__(self, decoder: StepDecoder, policy: Policy, source: Tensor, lengths: Tensor, beams: int = 1) -> None:
        self.decoder, self.policy, self.beams, self.position = decoder, policy, beams, 0
        self.source = source  # [sentences, tokens, hidden]
        sentences, depth = source.shape[0], len(decoder.blocks)
        self.trace = DecodeTrace.empty(lengths.numpy(), depth)
        self.source_mask = _padding_mask(lengths.to(source.device), source.shape[1])
        self.self_caches = [SelfAttentionCache(sentences * beams, source, decoder.heads) for _ in range(depth)]
        self.cross_caches = [CrossAttentionCache(source, decoder.heads) for _ in range(depth)]
        positions = self.self_caches[0].kv.shape[1]
        self.states = source.new_zeros(sentences * beams, positions, source.shape[2])  # of each token where it exited
        self.sentence = np.repeat(np.arange(sentences), beams)  # [rows] the sentence of each row, of the whole batch
        self.source_row = self.sentence.copy()  # [rows] where the source of that sentence lies in `self.source`
        self.active = np.arange(sentences * beams)  # rows that are still decoded
        self.planned_depth = np.repeat(self._plan(lengths), beams)  # [rows]
        self.depth = self.planned_depth  # [active rows] blocks that the tokens of the last step went through

    def _plan(self, lengths: Tensor) -> Ints:
        """Return the depth that the policy plans for every sentence."""
        depth, count = len(self.decoder.blocks), self.source.shape[0]
        real = self.source_mask[:, 0, 0, :, None].exp() if self.source_mask is not None else 1.0
        mean = (self.source * real).sum(1) / lengths.to(self.source)[:, None]
        planned = self.policy.sentence_depths(mean)
        if planned is None:
            return np.full(count, depth)
        self.trace.sentence_unit_ran = not self.policy.free
        return np.asarray(planned.cpu().numpy().clip(1, depth))

    def to_device(self, index: Ints) -> Tensor:
        """Return an index as a tensor on the device of the states."""
        return torch.from_numpy(index).to(self.source.device)

    def step(self, ids: Tensor) -> Tensor:
        """Decode one token of every active row: the ids before it [rows] → its scores [rows, vocabulary]."""
        if self.position == self.states.shape[1]:
            self._grow()
        x = self.decoder.embed(ids, self.position)
        all_active = len(self.active) == len(self.sentence)
        step = _Step(self, x, None if all_active else self.to_device(self.active))
        step.run()
        self.depth = step.depth[self.active]
        self.trace.steps.append((self.position, self.sentence[self.active], self.depth))
        scores = step.scores()
        self.position += 1
        return scores

    def keep_active(self, index: Ints) -> None:
        """Continue with these of the active rows only; the others are finished."""
        self.active = self.active[index]
        if len(self.active) <= COMPACT_BELOW * len(self.sentence) and len(self.active):
            self.select_rows(self.active)

    def select_rows(self, rows: Ints) -> None:
        """Make the caches hold these rows, in this order: `beams` rows for each sentence that is still decoded."""
        source_rows = self.source_row[rows[:: self.beams]]
        if len(source_rows) < self.source.shape[0]:
            index = self.to_device(source_rows)
            self.source = self.source.index_select(0, index)
            self.source_mask = None if self.source_mask is None else self.source_mask.index_select(0, index)
            for cross_cache in self.cross_caches:
                cross_cache.select(index, source_rows)
        if not np.array_equal(rows, np.arange(len(self.sentence))):
            index = self.to_device(rows)
            self.states = self.states.index_select(0, index)
            for self_cache in self.self_caches:
                self_cache.select(index, rows)
        self.sentence, self.planned_depth = self.sentence[rows], self.planned_depth[rows]
        self.source_row, self.active = np.repeat(np.arange(len(source_rows)), self.beams), np.arange(len(rows))

    def _grow(self) -> None:
        self.states = torch.cat((self.states, torch.zeros_like(self.states)), dim=1)
        for cache in self.self_caches:
            cache.grow()


class _Step:
    """One position of all active rows."""

    def __init__(self, decoding: Decoding, x: Tensor, index: Tensor | None) -> None:
        self.decoding, self.x, self.rows = decoding, x, decoding.active
        self.index = index  # `rows` as a tensor on the device; None: all rows of the caches
        self.depth = decoding.planned_depth.copy()
        self.exit_scores: dict[int, Tensor] = {}  # block → vocabulary scores of the rows that exited there, if computed

    def run(self) -> None:
        """Send the tokens through the blocks; after each block those that exit are removed."""
        decoding, last = self.decoding, len(self.decoding.decoder.blocks)
        for block in range(1, last + 1):
            self._run_block(block)
            if block < last and self._exit_tokens(block):
                return
        write_position(decoding.states, decoding.position, self.rows, self.x)

    def _run_block(self, number: int) -> None:
        decoding, x, rows, total = self.decoding, self.x, self.rows, len(self.decoding.sentence)
        position, trace, hidden = decoding.position, decoding.trace, x.shape[1]
        block = decoding.decoder.blocks[number - 1]
        self_cache, cross_cache = decoding.self_caches[number - 1], decoding.cross_caches[number - 1]

        qkv = block.project_qkv(x)
        copied = self_cache.fill_missing(block, decoding.states, position, rows)
        self_cache.write(position, rows, qkv[:, hidden:])
        keys, values = self_cache.keys.narrow(2, 0, position + 1), self_cache.values.narrow(2, 0, position + 1)
        x = block.add_self_attention(x, attend_cached(qkv[:, :hidden], keys, values, self.index, total))

        new_sources = cross_cache.fill(block, decoding.source, decoding.source_row[rows])
        query, mask = block.cross_query(x), decoding.source_mask
        attended = attend_cached(query, cross_cache.keys, cross_cache.values, self.index, total, mask)
        self.x = block.add_cross_attention_and_feed(x, attended)

        if copied is not None:
            count = np.bincount(decoding.sentence[rows], copied, len(trace.source_lengths))
            trace.copied[number - 1] += count.astype(int)
        if len(new_sources):
            trace.source_projections[number - 1, decoding.sentence[new_sources * decoding.beams]] = 1

    def _exit_tokens(self, block: int) -> bool:
        """Remove the tokens that exit after this block; return whether no token is left."""
        decoding = self.decoding
        computed: list[Tensor] = []

        def scores() -> Tensor:
            if not computed:
                computed.append(decoding.decoder.exits[block - 1](self.x))
                decoding.trace.vocabulary_scored[block - 1] = True
            return computed[0]

        depths = decoding.policy.token_depths(block, self.x, scores)
        if depths is not None:
            decoding.trace.unit_ran[block - 1] = not decoding.policy.free
            self.depth[self.rows] = depths.cpu().numpy()
        stays = self.depth[self.rows] > block
        staying = np.flatnonzero(stays)
        if len(staying) == len(stays):
            return False
        # the states of tokens that stay are written too, which is faster, and written again where they exit
        write_position(decoding.states, decoding.position, self.rows, self.x)
        self.depth[self.rows[~stays]] = block
        if computed:
            leaving = np.flatnonzero(~stays)
            self.exit_scores[block] = computed[0][decoding.to_device(leaving)] if len(staying) else computed[0]
        if not len(staying):
            return True
        self.x, self.rows = self.x.index_select(0, decoding.to_device(staying)), self.rows[staying]
        self.index = decoding.to_device(self.rows)
        return False

    def scores(self) -> Tensor:
        """Return the vocabulary scores of each active row from the exit where its token left."""  # [rows, vocabulary]
        decoding, exits = self.decoding, self.decoding.decoder.exits
        active, position = decoding.active, decoding.position
        if not self.exit_scores and all(one is exits[0] for one in exits):
            rows = slice(None) if len(active) == len(decoding.sentence) else decoding.to_device(active)
            return exits[0](decoding.states[rows, position])
        depth = self.depth[active]
        result: Tensor | None = None
        for block in np.unique(depth):
            left_here = active[depth == block]
            if block in self.exit_scores:
                part = self.exit_scores[block]
            else:
                part = exits[block - 1](decoding.states[decoding.to_device(left_here), position])
            if len(left_here) == len(active):
                return part
            result = part.new_empty(len(active), part.shape[1]) if result is None else result
            result[decoding.to_device((depth == block).nonzero()[0])] = part
        assert result is not None
        return result


def _padding_mask(lengths: Tensor, longest: int) -> Tensor | None:
    """Return a mask [rows, 1, 1, longest] that is −∞ beyond each length, or None if nothing is padded."""
    real = torch.arange(longest, device=lengths.device)[None, :] < lengths[:, None]
    if bool(real.all()):
        return None
    return torch.zeros(real.shape, device=real.device).masked_fill(~real, -torch.inf)[:, None, None, :]
