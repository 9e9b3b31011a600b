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
from offramp.core.packed import Packed, pack
from offramp.engines.openvino.padding import longer, many, places, wide
from offramp.engines.openvino.tracing import Named, Rows, even, ragged

Array = NDArray[Any]
FEW, MANY = (6, 4), (2, 90, 1, 2, 89)  # lengths of rows; the second puts short rows into one line


@dataclass(frozen=True)
class Sample:
    """Inputs for a function, and what it must make of them, computed without any of this file."""

    given: Named
    truth: Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Sketch:
    """A function, and two samples for it: dimensions in which they differ are free, the others are fixed."""

    name: str
    function: Callable[[Named], tuple[Tensor, ...]]
    samples: tuple[Sample, Sample]


def layer_even(name: str, layers: Sequence[Layer], half: str, hidden: int) -> Sketch:
    """Layers, or the first half of one with scores or without, over rows of one length."""

    def function(given: Named) -> tuple[Tensor, ...]:
        x, position = given["x"], given["position"]
        return halves(layers, half, x, x, even(position))

    def sample(rows: int, length: int) -> Sample:
        where, x = _layout([length] * rows), states(rows * length, hidden)
        block = {"x": x.view(rows, length, hidden), "position": where.key_position.view(rows, length)}
        return Sample(block, lambda: halves(layers, half, x, x, where))

    return Sketch(name, function, (sample(2, 6), sample(3, 7)))


def layer_ragged(name: str, layers: Sequence[Layer], half: str, hidden: int) -> Sketch:
    """The same over rows of any lengths."""

    def function(given: Named) -> tuple[Tensor, ...]:
        return halves(layers, half, given["x"], given["x"], ragged(given))

    def sample(lengths: Sequence[int]) -> Sample:
        where, x = _layout(lengths), states(sum(lengths), hidden)
        return Sample({"x": x, **_inputs(where)}, lambda: halves(layers, half, x, x, where))

    return Sketch(name, function, (sample(FEW), sample(MANY)))


def layer_idle(name: str, layers: Sequence[Layer], half: str, hidden: int) -> Sketch:
    """First half where only some tokens are queries."""

    def function(given: Named) -> tuple[Tensor, ...]:
        return halves(layers, half, given["queries"], given["x"], ragged(given, same=False))

    def sample(lengths: Sequence[int], counts: Sequence[int]) -> Sample:
        where = _layout(lengths, counts)
        queries, keys = states(sum(counts), hidden), states(sum(lengths), hidden)
        given = {"queries": queries, "x": keys, **_inputs(where)}
        return Sample(given, lambda: halves(layers, half, queries, keys, where))

    return Sketch(name, function, (sample(FEW, (3, 2)), sample(MANY, (1, 70, 1, 1, 60))))


def feed(name: str, layers: Sequence[Layer], hidden: int) -> Sketch:
    """Second half."""
    (layer,) = layers

    def sample(count: int) -> Sample:
        x = states(count, hidden)
        return Sample({"x": x}, lambda: (layer.feed(x),))

    return Sketch(name, lambda given: (layer.feed(given["x"]),), (sample(5), sample(7)))


def embed(name: str, function: Callable[[Packed], Tensor]) -> Sketch:
    """Embeddings of packed tokens."""

    def sample(lengths: Sequence[int]) -> Sample:
        packed = packed_sample(lengths)
        return Sample(ids_of(packed), lambda: (function(packed),))

    def traced(given: Named) -> tuple[Tensor, ...]:
        return (function(Packed(torch.empty(0), torch.empty(0), {}, given)),)

    return Sketch(name, traced, (sample(FEW), sample(MANY)))


def head(name: str, function: Callable[[Packed], Tensor], hidden: int) -> Sketch:
    """An exit or a predictor over packed states."""

    def sample(lengths: Sequence[int]) -> Sample:
        packed = packed_sample(lengths).with_states(states(sum(lengths), hidden))
        return Sample({"x": packed.states, **ids_of(packed), **all_inputs(packed)}, lambda: (function(packed),))

    return Sketch(name, lambda given: (function(Rows.of(given)),), (sample(FEW), sample(MANY)))


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
    """What pooling wants to know of a layout: each row a line of its own, filled up with its first token.

    Of several rows there are `many`: those behind the last are the first token over and over, and weigh nothing."""
    lengths, made = where.key_lengths, {"lengths": where.key_lengths}
    if "row" in wanted:
        made["row"] = np.repeat(np.arange(len(lengths)), lengths)
    if len(lengths) == 1:
        made["line"] = np.arange(lengths[0], dtype=np.int32)[None]
        return {**made, "weight": np.full((1, lengths[0]), 1.0 / lengths[0], dtype=np.float32)}
    lines, column = many(len(lengths)), np.arange(wide(int(lengths.max())))
    starts, real = longer(np.cumsum(lengths) - lengths, lines)[:, None], column < longer(lengths, lines)[:, None]
    made["line"] = np.where(real, starts + column, starts).astype(np.int32)
    made["lengths"] = longer(lengths, lines, filler=1)
    return {**made, "weight": (real / made["lengths"][:, None]).astype(np.float32)}


def all_inputs(packed: Packed) -> Named:
    rows = {key: torch.from_numpy(array) for key, array in row_inputs(packed.layout, ("row",)).items()}
    return {**_inputs(packed.layout), **rows}


def halves(layers: Sequence[Layer], half: str, queries: Tensor, keys: Tensor, where: Layout) -> tuple[Tensor, ...]:
    """One first half, or whole layers one after another."""
    if half == "whole":
        for layer in layers:
            keys = layer.feed(layer.attend(keys, keys, where, False, None)[0])
        return (keys,)
    (layer,) = layers
    y, scores = layer.attend(queries, keys, where, half == "scored", None)
    return (y,) if scores is None else (y, *scores)


def states(count: int, hidden: int) -> Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(count))


def packed_sample(lengths: Sequence[int]) -> Packed:
    """Rows of small ids, at positions that any model has."""
    made = pack([[place % 7 for place in range(length)] for length in lengths])
    return made.with_tokens(position=made.tokens["position"] % 7)


def ids_of(packed: Packed) -> Named:
    return {name: packed.tokens[name] for name in ("id", "type", "position")}


def _layout(lengths: Sequence[int], counts: Sequence[int] | None = None) -> Layout:
    position = torch.cat([torch.arange(n) for n in lengths])
    if counts is None:
        return layout(torch.tensor(lengths), position)
    asks = torch.cat([torch.arange(n) for n in counts])
    return layout(torch.tensor(lengths), position, torch.tensor(counts), asks)


def _inputs(where: Layout) -> Named:
    tensors = {name: torch.from_numpy(array) for name, array in ragged_inputs(where).items()}
    return {**tensors, "position": where.key_position, "query_position": where.query_position}
