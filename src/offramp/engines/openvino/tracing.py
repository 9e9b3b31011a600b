"""Stand-ins for layouts and batches while a layer or a head is traced: the same answers in forms compilers know."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.core.attention.distances import add_mask, distance_scores
from offramp.core.layout import AttentionOptions, AttentionScores, Ints, Layout
from offramp.core.packed import Packed

Named = dict[str, Tensor]
IDS: tuple[str, ...] = ("id", "type", "position")
NOBODY: Ints = np.zeros(0, dtype=np.int64)  # lengths that nobody reads while a layer is traced


@dataclass(frozen=True)
class Side:
    pad: Tensor  # [lines, places]
    unpad: Tensor  # [tokens]


def even(position: Tensor) -> Layout:
    """Rows of one length, tokens in lines already; positions as [rows, length]."""
    sides = position[:, None, :, None], position[:, None, None, :]
    return Layout(NOBODY, NOBODY, position, position, True, mix=Mix(None, None, sides))


def ragged(given: Named, same: bool = True) -> Layout:
    """Rows of any lengths; positions go into lines too, should a layer have a window."""
    key = Side(given["key_pad"], given["key_unpad"])
    query = key if same else Side(given["query_pad"], given["query_unpad"])
    asks = given["position"] if same else given["query_position"]
    sides = _gather(asks, query.pad)[:, None, :, None], _gather(given["position"], key.pad)[:, None, None, :]
    mix = Mix(query, key, sides, given["mask"], given["real"])
    return Layout(NOBODY, NOBODY, asks, given["position"], same, mix=mix)


@dataclass(frozen=True)
class Mix:
    """Attention in a form that compilers know; stands in for `core.attention.attend` while a layer is traced."""

    query: Side | None  # None: in lines already
    key: Side | None
    position: tuple[Tensor, Tensor]  # [lines, 1, queries, 1] and [lines, 1, 1, keys]
    mask: Tensor | None = None
    real: Tensor | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionOptions
    ) -> tuple[Tensor, AttentionScores | None]:
        q = _lines(query, self.query, plan.heads)
        k, v = (_lines(x, self.key, plan.heads) for x in (key, value))
        mask = self.mask
        if plan.window is not None:
            near = (self.position[0] - self.position[1]).abs() <= plan.window
            far = torch.zeros((), dtype=q.dtype) if mask is None else mask
            mask = torch.where(near, far, float("-inf"))
        if plan.relative is not None:
            at = self.position[0][:, 0, :, 0], self.position[1][:, 0, 0]
            mask = add_mask(distance_scores((q, k), plan.relative, at), mask)
        if not plan.scores:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self._packed(out, query), None
        logits = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
        weights = (logits if mask is None else logits + mask).softmax(-1)  # [lines, heads, queries, keys]
        mean = weights.mean(1) if self.real is None else (weights.mean(1) * self.real)
        own = mean * (self.position[0] == self.position[1]).squeeze(1)  # a row holds a position once
        return self._packed(weights @ v, query), AttentionScores(self._keys(mean.sum(1)), self._keys(own.sum(1)))

    def _packed(self, out: Tensor, like: Tensor) -> Tensor:
        out = out.transpose(1, 2)  # [lines, queries, heads, width]
        if self.query is None:
            return out.reshape(like.shape)
        return out.reshape(-1, like.shape[-1]).index_select(0, self.query.unpad)

    def _keys(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        return flat if self.key is None else flat.index_select(0, self.key.unpad)


@dataclass(frozen=True)
class Rows(Packed):
    """A packed batch of traced tensors, pooled without scattering."""

    line: Tensor | None = None  # [rows, longest]
    weight: Tensor | None = None  # [rows, longest], 1 / length or 0

    @classmethod
    def of(cls, given: Named) -> Rows:
        tokens = {name: given[name] for name in IDS if name in given}
        made = cls(given["x"], given["lengths"], {}, tokens, given["line"], given["weight"])
        derived = {"layout": ragged(given), "row_of_token": given["row"], "starts": given["line"][:, 0]}
        made.__dict__.update(derived, total=given["x"].shape[0])
        return made

    def with_states(self, states: Tensor) -> Packed:
        return self._same(type(self)(states, self.lengths, self.rows, self.tokens, self.line, self.weight))

    def first(self) -> Tensor:
        return self.states.index_select(0, self._line[:, 0])

    def mean(self) -> Tensor:
        assert self.weight is not None
        return (self.weight[:, None] @ _gather(self.states, self._line)).squeeze(1)

    def sums(self, values: Tensor) -> Tensor:
        assert self.weight is not None
        real = (self.weight > 0).to(values.dtype)
        return (real[:, None] @ _gather(values, self._line)).squeeze(1)

    def max(self) -> Tensor:
        return _gather(self.states, self._line).amax(1)

    @property
    def _line(self) -> Tensor:
        assert self.line is not None
        return self.line


@dataclass(frozen=True)
class Block(Packed):
    """Traced rows of one length, as exits want them."""

    shape: tuple[int, int] = (0, 0)  # rows, length

    @classmethod
    def of(cls, x: Tensor, given: Named) -> Block:
        rows, length = x.shape[0], x.shape[1]
        inner = even(given["position"]).mix

        def mix(
            query: Tensor, key: Tensor, value: Tensor, plan: AttentionOptions
        ) -> tuple[Tensor, AttentionScores | None]:
            assert inner is not None
            q, k, v = (t.view(rows, length, t.shape[-1]) for t in (query, key, value))
            out, scores = inner(q, k, v, plan)
            return out.reshape(-1, out.shape[-1]), scores

        tokens = {name: given[name].reshape(-1) for name in IDS if name in given}
        flat = tokens["position"]
        made = cls(x.reshape(-1, x.shape[-1]), x.new_zeros(0), {}, tokens, (rows, length))
        made.__dict__["layout"] = Layout(NOBODY, NOBODY, flat, flat, True, mix=mix)
        return made

    def with_states(self, states: Tensor) -> Packed:
        return self._same(type(self)(states, self.lengths, self.rows, self.tokens, self.shape))

    def first(self) -> Tensor:
        return self._rows[:, 0]

    def mean(self) -> Tensor:
        return self._rows.mean(1)

    def sums(self, values: Tensor) -> Tensor:
        return values.view(*self.shape, values.shape[-1]).sum(1)

    def max(self) -> Tensor:
        return self._rows.amax(1)

    @property
    def _rows(self) -> Tensor:
        return self.states.view(*self.shape, self.states.shape[-1])


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Tokens put into lines."""  # [tokens, …], [lines, places] → [lines, places, …]
    return x.index_select(0, index.reshape(-1)).view(index.shape[0], index.shape[1], *x.shape[1:])


def _lines(x: Tensor, side: Side | None, heads: int) -> Tensor:
    """Tokens as attention wants them."""  # [lines, heads, places, width]
    x = x if side is None else _gather(x, side.pad)
    return x.view(x.shape[0], x.shape[1], heads, x.shape[-1] // heads).transpose(1, 2)
