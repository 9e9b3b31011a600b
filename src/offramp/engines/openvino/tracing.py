"""Layouts and batches of traced tensors: the same results as the real ones, in operations that compilers support.

Also records a function's operations and constant tensors: their digest names the function, so that a compiled graph
kept under that name is never stale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offramp.core.attention.distances import add_mask
from offramp.core.columns import ID, POSITION, TYPE
from offramp.core.layout import AttentionOptions, AttentionScores, Ints, Layout
from offramp.core.packed import Packed

NamedTensors = dict[str, Tensor]
IDS: tuple[str, ...] = (ID, TYPE, POSITION)
NO_LENGTHS: Ints = np.zeros(0, dtype=np.int64)  # lengths are not read while a layer is traced


@dataclass(frozen=True)
class TracedIndex:
    """Indices of a gather into lines and back, as traced tensors."""

    pad: Tensor  # [lines, places]
    unpad: Tensor  # [tokens]


def even(position: Tensor) -> Layout:
    """Return the layout of rows of one length; positions as [rows, length]."""
    sides = position[:, None, :, None], position[:, None, None, :]
    return Layout(NO_LENGTHS, NO_LENGTHS, position, position, True, mix=TracedAttention(None, None, sides))


def ragged(given: NamedTensors, same: bool = True) -> Layout:
    """Return the layout of rows of any lengths; positions are gathered into lines too, for layers with a window."""
    key = TracedIndex(given["key_pad"], given["key_unpad"])
    query = key if same else TracedIndex(given["query_pad"], given["query_unpad"])
    query_position = given[POSITION] if same else given["query_position"]
    sides = _gather(query_position, query.pad)[:, None, :, None], _gather(given[POSITION], key.pad)[:, None, None, :]
    mix = TracedAttention(query, key, sides, given["mask"], given["real"])
    return Layout(NO_LENGTHS, NO_LENGTHS, query_position, given[POSITION], same, mix=mix)


@dataclass(frozen=True)
class TracedAttention:
    """Attention in operations that compilers support; replaces `core.attention.attend` while a layer is traced."""

    query: TracedIndex | None  # None: already in lines
    key: TracedIndex | None
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
            mask = add_mask(plan.relative.logits(q, k, at), mask)
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
class RaggedRows(Packed):
    """A packed batch of traced tensors that is pooled without scattering."""

    line: Tensor | None = None  # [rows, longest]
    weight: Tensor | None = None  # [rows, longest], 1 / length or 0

    @classmethod
    def of(cls, given: NamedTensors) -> RaggedRows:
        tokens = {name: given[name] for name in IDS if name in given}
        result = cls(given["x"], given["lengths"], {}, tokens, given["line"], given["weight"])
        derived = {"layout": ragged(given), "row_of_token": given["row"], "starts": given["line"][:, 0]}
        result.__dict__.update(derived, total=given["x"].shape[0])
        return result

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
class EvenRows(Packed):
    """Traced rows of one length as a packed batch for exit heads."""

    shape: tuple[int, int] = (0, 0)  # rows, length

    @classmethod
    def of(cls, x: Tensor, given: NamedTensors) -> EvenRows:
        rows, length = x.shape[0], x.shape[1]
        inner = even(given[POSITION]).mix

        def mix(
            query: Tensor, key: Tensor, value: Tensor, plan: AttentionOptions
        ) -> tuple[Tensor, AttentionScores | None]:
            assert inner is not None
            q, k, v = (t.view(rows, length, t.shape[-1]) for t in (query, key, value))
            out, scores = inner(q, k, v, plan)
            return out.reshape(-1, out.shape[-1]), scores

        tokens = {name: given[name].reshape(-1) for name in IDS if name in given}
        flat = tokens[POSITION]
        result = cls(x.reshape(-1, x.shape[-1]), x.new_zeros(0), {}, tokens, (rows, length))
        result.__dict__["layout"] = Layout(NO_LENGTHS, NO_LENGTHS, flat, flat, True, mix=mix)
        return result

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
    """Gather tokens into lines."""  # [tokens, …], [lines, places] → [lines, places, …]
    return x.index_select(0, index.reshape(-1)).view(index.shape[0], index.shape[1], *x.shape[1:])


def _lines(x: Tensor, side: TracedIndex | None, heads: int) -> Tensor:
    """Return tokens as attention takes them."""  # [lines, heads, places, width]
    x = x if side is None else _gather(x, side.pad)
    return x.view(x.shape[0], x.shape[1], heads, x.shape[-1] // heads).transpose(1, 2)


class OperationRecorder(TorchDispatchMode):
    """Records every operation and every tensor that was neither given nor computed."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.known: dict[int, Tensor] = {id(t): t for t in given}  # held, so that no id is used again
        self.constants: dict[int, Tensor] = {}
        self.digest = hashlib.sha256()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.digest.update(str(func).encode())
        for value in tree_leaves((args, kwargs or {})):
            self._record(value)
        out = func(*args, **(kwargs or {}))
        self.known.update({id(t): t for t in tree_leaves(out) if isinstance(t, Tensor)})
        return out

    def _record(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            self.digest.update(repr(value).encode())
        elif id(value) in self.known:
            self.digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        elif id(value) not in self.constants:
            self.constants[id(value)] = value
            self.digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            self.digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def record_operations(function: Callable[[], Any], given: Sequence[Tensor]) -> OperationRecorder:
    """Record a function on its second call, because on the first one layers prepare constants (fused Q, K and V)."""
    with torch.inference_mode(False), torch.no_grad():
        function()
        with OperationRecorder(given) as recorder:
            function()
    return recorder


@contextmanager
def without_gradients(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Turn gradients off while this lasts: a tracer refuses constants that require them."""
    trainable = [t for t in tensors if isinstance(t, nn.Parameter) and t.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
