"""Graphs that join pieces to save calls: embeddings with an exit, a layer with its exit, or the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.backbones import Layer
from offramp.core.columns import ID, POSITION
from offramp.core.packed import Packed
from offramp.engines.openvino.graphs import (
    FEW,
    MANY,
    GraphSample,
    GraphSpec,
    all_inputs,
    id_columns,
    packed_sample,
    run_half,
    states,
)
from offramp.engines.openvino.tracing import EvenRows, NamedTensors, RaggedRows, even, ragged


def even_exit_spec(name: str, layer: Layer, function: Callable[[Packed], Tensor], hidden: int) -> GraphSpec:
    """Return the graph of a layer and its exit for rows of one length."""

    def traced(given: NamedTensors) -> tuple[Tensor, ...]:
        (y,) = run_half([layer], "whole", given["x"], given["x"], even(given[POSITION]))
        return y, function(EvenRows.of(y, given))

    def sample(rows: int, length: int) -> GraphSample:
        packed = packed_sample([length] * rows).with_states(states(rows * length, hidden))
        block = {key: tensor.view(rows, length) for key, tensor in id_columns(packed).items()}
        block["x"] = packed.states.view(rows, length, hidden)
        return GraphSample(block, lambda: _run_layer_and_exit(layer, function, packed))

    return GraphSpec(name, traced, (sample(2, 6), sample(3, 7)))


def ragged_exit_spec(name: str, layer: Layer, function: Callable[[Packed], Tensor], hidden: int) -> GraphSpec:
    """Return the graph of a layer and its exit for rows of any lengths."""

    def traced(given: NamedTensors) -> tuple[Tensor, ...]:
        (y,) = run_half([layer], "whole", given["x"], given["x"], ragged(given))
        return y, function(RaggedRows.of({**given, "x": y}))

    def sample(lengths: Sequence[int]) -> GraphSample:
        packed = packed_sample(lengths).with_states(states(sum(lengths), hidden))
        given = {"x": packed.states, **id_columns(packed), **all_inputs(packed)}
        return GraphSample(given, lambda: _run_layer_and_exit(layer, function, packed))

    return GraphSpec(name, traced, (sample(FEW), sample(MANY)))


def even_embeddings_spec(
    name: str, embed: Callable[[Packed], Tensor], function: Callable[[Packed], Tensor]
) -> GraphSpec:
    """Return the graph of embeddings and exit 0 for rows of one length."""

    def traced(given: NamedTensors) -> tuple[Tensor, ...]:
        flat = {key: tensor.reshape(-1) for key, tensor in given.items()}
        x = embed(Packed(torch.empty(0), torch.empty(0), {}, flat))
        return x, function(EvenRows.of(x.view(given[ID].shape[0], given[ID].shape[1], -1), given))

    def sample(rows: int, length: int) -> GraphSample:
        packed = packed_sample([length] * rows)
        block = {key: tensor.view(rows, length) for key, tensor in id_columns(packed).items()}
        return GraphSample(block, lambda: _run_embeddings_and_exit(embed, function, packed))

    return GraphSpec(name, traced, (sample(2, 6), sample(3, 7)))


def ragged_embeddings_spec(
    name: str, embed: Callable[[Packed], Tensor], function: Callable[[Packed], Tensor]
) -> GraphSpec:
    """Return the graph of embeddings and exit 0 for rows of any lengths."""

    def traced(given: NamedTensors) -> tuple[Tensor, ...]:
        x = embed(Packed(torch.empty(0), torch.empty(0), {}, given))
        return x, function(RaggedRows.of({**given, "x": x}))

    def sample(lengths: Sequence[int]) -> GraphSample:
        packed = packed_sample(lengths)
        return GraphSample(
            {**id_columns(packed), **all_inputs(packed)}, lambda: _run_embeddings_and_exit(embed, function, packed)
        )

    return GraphSpec(name, traced, (sample(FEW), sample(MANY)))


@dataclass(frozen=True)
class Parts:
    """The parts of a whole model."""

    embed: Callable[[Packed], Tensor]
    layers: Sequence[Layer]
    last: Callable[[Packed], Tensor]


def even_model_spec(name: str, parts: Parts) -> GraphSpec:
    """Return the graph of the whole model for rows of one length."""

    def function(given: NamedTensors) -> tuple[Tensor, ...]:
        flat = {key: tensor.reshape(-1) for key, tensor in given.items()}
        x = parts.embed(Packed(torch.empty(0), torch.empty(0), {}, flat))
        rows, length = given[ID].shape[0], given[ID].shape[1]
        x = x.view(rows, length, -1)
        (x,) = run_half(parts.layers, "whole", x, x, even(given[POSITION]))
        return (parts.last(EvenRows.of(x, given)),)

    def sample(rows: int, length: int) -> GraphSample:
        packed = packed_sample([length] * rows)
        block = {key: tensor.view(rows, length) for key, tensor in id_columns(packed).items()}
        return GraphSample(block, lambda: _run_model(parts, packed))

    return GraphSpec(name, function, (sample(2, 6), sample(3, 7)))


def ragged_model_spec(name: str, parts: Parts) -> GraphSpec:
    """Return the graph of the whole model for rows of any lengths."""

    def function(given: NamedTensors) -> tuple[Tensor, ...]:
        x = parts.embed(Packed(torch.empty(0), torch.empty(0), {}, given))
        (x,) = run_half(parts.layers, "whole", x, x, ragged(given))
        return (parts.last(RaggedRows.of({**given, "x": x})),)

    def sample(lengths: Sequence[int]) -> GraphSample:
        packed = packed_sample(lengths)
        return GraphSample({**id_columns(packed), **all_inputs(packed)}, lambda: _run_model(parts, packed))

    return GraphSpec(name, function, (sample(FEW), sample(MANY)))


def _run_embeddings_and_exit(
    embed: Callable[[Packed], Tensor], function: Callable[[Packed], Tensor], packed: Packed
) -> tuple[Tensor, ...]:
    """Run embeddings and exit 0 with torch."""
    x = embed(packed)
    return x, function(packed.with_states(x))


def _run_layer_and_exit(layer: Layer, function: Callable[[Packed], Tensor], packed: Packed) -> tuple[Tensor, ...]:
    """Run a layer and its exit with torch."""
    (y,) = run_half([layer], "whole", packed.states, packed.states, packed.layout)
    return y, function(packed.with_states(y))


def _run_model(parts: Parts, packed: Packed) -> tuple[Tensor, ...]:
    """Run the whole model with torch."""
    x = parts.embed(packed)
    (x,) = run_half(parts.layers, "whole", x, x, packed.layout)
    return (parts.last(packed.with_states(x)),)
