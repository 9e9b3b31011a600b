"""Specifications of graphs to compile: functions of named tensors, traced from a backbone's own layers.

A layer has two forms. *Even*: rows of one length, states as [rows, length, hidden], no gathers, no mask. *Ragged*:
states as [tokens, hidden]; only queries, keys and values are gathered into lines (`padding`) and back.
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
from offramp.core.columns import ID, POSITION, TYPE
from offramp.core.layout import Layout, layout
from offramp.core.packed import Packed, pack
from offramp.engines.openvino.padding import extend, line_layout, padded_length, padded_rows
from offramp.engines.openvino.tracing import NamedTensors, RaggedRows, even, ragged

Array = NDArray[Any]
FEW, MANY = (6, 4), (2, 90, 1, 2, 89)  # lengths of rows; the second puts short rows into one line


@dataclass(frozen=True)
class GraphSample:
    """Inputs of a function, and the outputs it must give, computed by torch without tracing."""

    given: NamedTensors
    expected: Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class GraphSpec:
    """A function and two samples of its inputs: dimensions in which they differ are dynamic, the others fixed."""

    name: str
    function: Callable[[NamedTensors], tuple[Tensor, ...]]
    samples: tuple[GraphSample, GraphSample]


def even_layer_spec(name: str, layers: Sequence[Layer], half: str, hidden: int) -> GraphSpec:
    """Return the graph of layers, or of the first half of one, with or without scores, for rows of one length."""

    def function(given: NamedTensors) -> tuple[Tensor, ...]:
        x, position = given["x"], given[POSITION]
        return run_half(layers, half, x, x, even(position))

    def sample(rows: int, length: int) -> GraphSample:
        where, x = _layout([length] * rows), states(rows * length, hidden)
        block = {"x": x.view(rows, length, hidden), POSITION: where.key_position.view(rows, length)}
        return GraphSample(block, lambda: run_half(layers, half, x, x, where))

    return GraphSpec(name, function, (sample(2, 6), sample(3, 7)))


def ragged_layer_spec(name: str, layers: Sequence[Layer], half: str, hidden: int) -> GraphSpec:
    """Return the same graph for rows of any lengths."""

    def function(given: NamedTensors) -> tuple[Tensor, ...]:
        return run_half(layers, half, given["x"], given["x"], ragged(given))

    def sample(lengths: Sequence[int]) -> GraphSample:
        where, x = _layout(lengths), states(sum(lengths), hidden)
        return GraphSample({"x": x, **_inputs(where)}, lambda: run_half(layers, half, x, x, where))

    return GraphSpec(name, function, (sample(FEW), sample(MANY)))


def idle_layer_spec(name: str, layers: Sequence[Layer], half: str, hidden: int) -> GraphSpec:
    """Return the graph of a first half in which only some tokens are queries."""

    def function(given: NamedTensors) -> tuple[Tensor, ...]:
        return run_half(layers, half, given["queries"], given["x"], ragged(given, same=False))

    def sample(lengths: Sequence[int], counts: Sequence[int]) -> GraphSample:
        where = _layout(lengths, counts)
        queries, keys = states(sum(counts), hidden), states(sum(lengths), hidden)
        given = {"queries": queries, "x": keys, **_inputs(where)}
        return GraphSample(given, lambda: run_half(layers, half, queries, keys, where))

    return GraphSpec(name, function, (sample(FEW, (3, 2)), sample(MANY, (1, 70, 1, 1, 60))))


def feed_spec(name: str, layers: Sequence[Layer], hidden: int) -> GraphSpec:
    """Return the graph of the second half of a layer."""
    (layer,) = layers

    def sample(count: int) -> GraphSample:
        x = states(count, hidden)
        return GraphSample({"x": x}, lambda: (layer.feed(x),))

    return GraphSpec(name, lambda given: (layer.feed(given["x"]),), (sample(5), sample(7)))


def embed_spec(name: str, function: Callable[[Packed], Tensor]) -> GraphSpec:
    """Return the graph of the embeddings of packed tokens."""

    def sample(lengths: Sequence[int]) -> GraphSample:
        packed = packed_sample(lengths)
        return GraphSample(id_columns(packed), lambda: (function(packed),))

    def traced(given: NamedTensors) -> tuple[Tensor, ...]:
        return (function(Packed(torch.empty(0), torch.empty(0), {}, given)),)

    return GraphSpec(name, traced, (sample(FEW), sample(MANY)))


def head_spec(name: str, function: Callable[[Packed], Tensor], hidden: int) -> GraphSpec:
    """Return the graph of an exit head or predictor over packed states."""

    def sample(lengths: Sequence[int]) -> GraphSample:
        packed = packed_sample(lengths).with_states(states(sum(lengths), hidden))
        return GraphSample(
            {"x": packed.states, **id_columns(packed), **all_inputs(packed)}, lambda: (function(packed),)
        )

    return GraphSpec(name, lambda given: (function(RaggedRows.of(given)),), (sample(FEW), sample(MANY)))


def ragged_arrays(where: Layout) -> dict[str, Array]:
    """Return the arrays of a layout that ragged graphs take as inputs."""
    at = line_layout(where)
    return {
        "query_pad": at.query.pad,
        "query_unpad": at.query.unpad,
        "key_pad": at.key.pad,
        "key_unpad": at.key.unpad,
        "mask": at.mask,
        "real": at.real,
    }


def row_arrays(where: Layout, wanted: Container[str]) -> dict[str, Array]:
    """Return the arrays of a layout that pooling takes as inputs: one line a row, padded with its first token.

    The number of lines is rounded up (`padded_rows`); lines behind the last row repeat a token and have weight 0."""
    lengths, result = where.key_lengths, {"lengths": where.key_lengths}
    if "row" in wanted:
        result["row"] = np.repeat(np.arange(len(lengths)), lengths)
    if len(lengths) == 1:
        result["line"] = np.arange(lengths[0], dtype=np.int32)[None]
        return {**result, "weight": np.full((1, lengths[0]), 1.0 / lengths[0], dtype=np.float32)}
    lines, column = padded_rows(len(lengths)), np.arange(padded_length(int(lengths.max())))
    starts, real = extend(np.cumsum(lengths) - lengths, lines)[:, None], column < extend(lengths, lines)[:, None]
    result["line"] = np.where(real, starts + column, starts).astype(np.int32)
    result["lengths"] = extend(lengths, lines, filler=1)
    return {**result, "weight": (real / result["lengths"][:, None]).astype(np.float32)}


def all_inputs(packed: Packed) -> NamedTensors:
    rows = {key: torch.from_numpy(array) for key, array in row_arrays(packed.layout, ("row",)).items()}
    return {**_inputs(packed.layout), **rows}


def run_half(layers: Sequence[Layer], half: str, queries: Tensor, keys: Tensor, where: Layout) -> tuple[Tensor, ...]:
    """Run one first half, or whole layers one after another."""
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
    """Return rows of small ids at positions that every model has."""
    result = pack([[place % 7 for place in range(length)] for length in lengths])
    return result.with_tokens(position=result.tokens[POSITION] % 7)


def id_columns(packed: Packed) -> NamedTensors:
    return {name: packed.tokens[name] for name in (ID, TYPE, POSITION)}


def _layout(lengths: Sequence[int], counts: Sequence[int] | None = None) -> Layout:
    position = torch.cat([torch.arange(n) for n in lengths])
    if counts is None:
        return layout(torch.tensor(lengths), position)
    asks = torch.cat([torch.arange(n) for n in counts])
    return layout(torch.tensor(lengths), position, torch.tensor(counts), asks)


def _inputs(where: Layout) -> NamedTensors:
    tensors = {name: torch.from_numpy(array) for name, array in ragged_arrays(where).items()}
    return {**tensors, POSITION: where.key_position, "query_position": where.query_position}
