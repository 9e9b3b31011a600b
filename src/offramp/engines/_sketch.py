"""What a compiled engine compiles: functions of named tensors, made from a backbone's own layers by tracing them.

Two forms of a layer. *Even*: rows of one length, states as [rows, length, hidden], no gathers, no mask. *Ragged*: states
as [tokens, hidden]; only queries, keys and values are put into lines (`_places.py`) and taken out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offramp.backbones import Layer
from offramp.core.layout import Layout, layout
from offramp.core.packed import Packed
from offramp.engines._places import places
from offramp.engines._traced import NOBODY, Mix, Named, Rows, Side, in_lines



@dataclass(frozen=True)
class Sketch:
    """A function, and two sets of inputs for it: dimensions in which they differ are free, the others are fixed."""

    name: str
    function: Callable[[Named], tuple[Tensor, ...]]
    examples: tuple[Named, Named]


def layer_even(name: str, layer: Layer, half: str, hidden: int) -> Sketch:
    """A layer, or its first half with scores or without, over rows of one length."""

    def function(given: Named) -> tuple[Tensor, ...]:
        x, position = given["x"], given["position"]
        window = position[:, None, :, None], position[:, None, None, :]
        where = Layout(NOBODY, NOBODY, position, position, True, mix=Mix(x.shape[0], None, None, window))
        return _halves(layer, half, x, x, where)

    def example(rows: int, length: int) -> Named:
        return {"x": _states(rows, length, hidden), "position": torch.arange(length).repeat(rows, 1)}

    return Sketch(name, function, (example(2, 6), example(3, 7)))


def layer_ragged(name: str, layer: Layer, half: str, hidden: int) -> Sketch:
    """The same over rows of any lengths."""

    def function(given: Named) -> tuple[Tensor, ...]:
        x, position = given["x"], given["position"]
        side = Side(given["key_pad"], given["key_unpad"])
        where = Layout(NOBODY, NOBODY, position, position, True, mix=in_lines(given, side, side, (position, position)))
        return _halves(layer, half, x, x, where)

    def example(lengths: list[int]) -> Named:
        where = _layout(lengths)
        return {"x": _states(sum(lengths), hidden), **_inputs(where)}

    return Sketch(name, function, (example([6, 4]), example([2, 90, 1, 2, 89])))


def layer_idle(name: str, layer: Layer, half: str, hidden: int) -> Sketch:
    """First half where only some tokens are queries."""

    def function(given: Named) -> tuple[Tensor, ...]:
        queries, keys, asks, seen = given["queries"], given["x"], given["query_position"], given["position"]
        query, key = Side(given["query_pad"], given["query_unpad"]), Side(given["key_pad"], given["key_unpad"])
        where = Layout(NOBODY, NOBODY, asks, seen, False, mix=in_lines(given, query, key, (asks, seen)))
        return _halves(layer, half, queries, keys, where)

    def example(lengths: list[int], counts: list[int]) -> Named:
        where = _layout(lengths, counts)
        return {"queries": _states(sum(counts), hidden), "x": _states(sum(lengths), hidden), **_inputs(where)}

    return Sketch(name, function, (example([6, 4], [3, 2]), example([2, 90, 1, 2, 89], [1, 70, 1, 1, 60])))


def feed(name: str, layer: Layer, hidden: int) -> Sketch:
    """Second half."""
    examples = ({"x": _states(5, hidden)}, {"x": _states(7, hidden)})
    return Sketch(name, lambda given: (layer.feed(given["x"]),), examples)


def embed(name: str, function: Callable[[Packed], Tensor]) -> Sketch:
    """Embeddings of packed tokens."""

    def example(count: int) -> Named:
        count_up = torch.arange(count)
        return {"id": count_up % 5, "type": torch.zeros_like(count_up), "position": count_up}

    def traced(given: Named) -> tuple[Tensor, ...]:
        return (function(Packed(torch.empty(0), torch.empty(0), {}, given)),)

    return Sketch(name, traced, (example(5), example(7)))


def head(name: str, function: Callable[[Packed], Tensor], hidden: int) -> Sketch:
    """An exit or a predictor over packed states."""

    def traced(given: Named) -> tuple[Tensor, ...]:
        return (function(Rows.of(given)),)

    def example(lengths: list[int]) -> Named:
        where = _layout(lengths)
        return {"x": _states(sum(lengths), hidden), **_inputs(where), **row_inputs(where)}

    return Sketch(name, traced, (example([6, 4]), example([2, 90, 1, 2, 89])))


def ragged_inputs(where: Layout) -> dict[str, np.ndarray[Any, Any]]:
    """What a ragged graph wants to know of a layout."""
    at = places(where)
    return {
        "query_pad": at.query.pad,
        "query_unpad": at.query.unpad,
        "key_pad": at.key.pad,
        "key_unpad": at.key.unpad,
        "mask": at.mask,
        "real": at.real,
    }


def row_inputs(where: Layout) -> Named:
    """What pooling wants to know of a layout: each row a line of its own."""
    lengths = torch.from_numpy(where.key_lengths)
    starts = lengths.cumsum(0) - lengths
    column = torch.arange(int(lengths.max()))
    real = column < lengths[:, None]
    line = torch.where(real, starts[:, None] + column, starts[:, None])
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return {"line": line.int(), "weight": real / lengths[:, None], "lengths": lengths, "row": row}


def _halves(layer: Layer, half: str, queries: Tensor, keys: Tensor, where: Layout) -> tuple[Tensor, ...]:
    y, scores = layer.attend(queries, keys, where, half == "scored", None)
    if half == "whole":
        y = layer.feed(y)
    return (y,) if scores is None else (y, *scores)


def _states(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _layout(lengths: Sequence[int], counts: Sequence[int] | None = None) -> Layout:
    keys = torch.tensor(lengths)
    position = torch.cat([torch.arange(n) for n in lengths])
    if counts is None:
        return layout(keys, position)
    asks = torch.cat([torch.arange(n) for n in counts])
    return layout(keys, position, torch.tensor(counts), asks)


def _inputs(where: Layout) -> Named:
    tensors = {name: torch.from_numpy(array) for name, array in ragged_inputs(where).items()}
    return {**tensors, "position": where.key_position, "query_position": where.query_position}
