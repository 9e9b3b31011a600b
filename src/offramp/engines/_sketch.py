"""What a compiled engine compiles: functions of named tensors, made from a backbone's own layers by tracing them.

Two forms of a layer. *Even*: rows of one length, states as [rows, length, hidden], no gathers, no mask. *Ragged*:
states as [tokens, hidden]; only queries, keys and values are put into lines (`_places.py`) and taken out again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offramp.backbones import Layer
from offramp.core.layout import Layout, layout
from offramp.core.packed import Packed
from offramp.engines._places import places
from offramp.engines._traced import NOBODY, Mix, Named, Rows, Side, in_lines

Array = NDArray[Any]


@dataclass(frozen=True)
class Sketch:
    """A function, and two sets of inputs for it: dimensions in which they differ are free, the others are fixed."""

    name: str
    function: Callable[[Named], tuple[Tensor, ...]]
    examples: tuple[Named, Named]


def layer_even(name: str, layers: Sequence[Layer], half: str, hidden: int) -> Sketch:
    """A layer, or its first half with scores or without, over rows of one length."""

    def function(given: Named) -> tuple[Tensor, ...]:
        x, position = given["x"], given["position"]
        window = position[:, None, :, None], position[:, None, None, :]
        where = Layout(NOBODY, NOBODY, position, position, True, mix=Mix(x.shape[0], None, None, window))
        return _halves(layers, half, x, x, where)

    def example(rows: int, length: int) -> Named:
        return {"x": _states(rows, length, hidden), "position": torch.arange(length).repeat(rows, 1)}

    return Sketch(name, function, (example(2, 6), example(3, 7)))


def layer_ragged(name: str, layers: Sequence[Layer], half: str, hidden: int) -> Sketch:
    """The same over rows of any lengths."""

    def function(given: Named) -> tuple[Tensor, ...]:
        x, position = given["x"], given["position"]
        side = Side(given["key_pad"], given["key_unpad"])
        where = Layout(NOBODY, NOBODY, position, position, True, mix=in_lines(given, side, side, (position, position)))
        return _halves(layers, half, x, x, where)

    def example(lengths: list[int]) -> Named:
        where = _layout(lengths)
        return {"x": _states(sum(lengths), hidden), **_inputs(where)}

    return Sketch(name, function, (example([6, 4]), example([2, 90, 1, 2, 89])))


def layer_idle(name: str, layers: Sequence[Layer], half: str, hidden: int) -> Sketch:
    """First half where only some tokens are queries."""

    def function(given: Named) -> tuple[Tensor, ...]:
        queries, keys, asks, seen = given["queries"], given["x"], given["query_position"], given["position"]
        query, key = Side(given["query_pad"], given["query_unpad"]), Side(given["key_pad"], given["key_unpad"])
        where = Layout(NOBODY, NOBODY, asks, seen, False, mix=in_lines(given, query, key, (asks, seen)))
        return _halves(layers, half, queries, keys, where)

    def example(lengths: list[int], counts: list[int]) -> Named:
        where = _layout(lengths, counts)
        return {"queries": _states(sum(counts), hidden), "x": _states(sum(lengths), hidden), **_inputs(where)}

    return Sketch(name, function, (example([6, 4], [3, 2]), example([2, 90, 1, 2, 89], [1, 70, 1, 1, 60])))


def feed(name: str, layers: Sequence[Layer], hidden: int) -> Sketch:
    """Second half."""
    (layer,) = layers
    examples = ({"x": _states(5, hidden)}, {"x": _states(7, hidden)})
    return Sketch(name, lambda given: (layer.feed(given["x"]),), examples)


def embed(name: str, function: Callable[[Packed], Tensor]) -> Sketch:
    """Embeddings of packed tokens."""

    def example(count: int) -> Named:
        counted = torch.arange(count)
        return {"id": counted % 5, "type": torch.zeros_like(counted), "position": counted}

    def traced(given: Named) -> tuple[Tensor, ...]:
        return (function(Packed(torch.empty(0), torch.empty(0), {}, given)),)

    return Sketch(name, traced, (example(5), example(7)))


def head(name: str, function: Callable[[Packed], Tensor], hidden: int) -> Sketch:
    """An exit or a predictor over packed states."""

    def traced(given: Named) -> tuple[Tensor, ...]:
        return (function(Rows.of(given)),)

    def example(lengths: list[int]) -> Named:
        where = _layout(lengths)
        rows = {name: torch.from_numpy(array) for name, array in row_inputs(where, ("row",)).items()}
        return {"x": _states(sum(lengths), hidden), **_inputs(where), **rows}

    return Sketch(name, traced, (example([6, 4]), example([2, 90, 1, 2, 89])))


def ragged_inputs(where: Layout) -> dict[str, Array]:
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


def row_inputs(where: Layout, wanted: Container[str]) -> dict[str, Array]:
    """What pooling wants to know of a layout: each row a line of its own, filled up with its first token."""
    lengths, made = where.key_lengths, {"lengths": where.key_lengths}
    if "row" in wanted:
        made["row"] = np.repeat(np.arange(len(lengths)), lengths)
    if len(lengths) == 1:
        made["line"] = np.arange(lengths[0], dtype=np.int32)[None]
        return {**made, "weight": np.full((1, lengths[0]), 1.0 / lengths[0], dtype=np.float32)}
    starts, column = (np.cumsum(lengths) - lengths)[:, None], np.arange(lengths.max())
    real = column < lengths[:, None]
    made["line"] = np.where(real, starts + column, starts).astype(np.int32)
    return {**made, "weight": (real / lengths[:, None]).astype(np.float32)}


def _halves(
    layers: Sequence[Layer], half: str, queries: Tensor, keys: Tensor, where: Layout
) -> tuple[Tensor, ...]:
    """One first half, or whole layers one after another."""
    if half == "whole":
        for layer in layers:
            keys = layer.feed(layer.attend(keys, keys, where, False, None)[0])
        return (keys,)
    (layer,) = layers
    y, scores = layer.attend(queries, keys, where, half == "scored", None)
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
