"""Pieces joined into one graph, where that saves calls: embeddings or a layer with an exit, or everything at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.backbones import Layer
from offramp.core.packed import Packed
from offramp.engines.openvino.graphs import FEW, MANY, Sample, Sketch, all_inputs, halves, ids_of, packed_sample, states
from offramp.engines.openvino.tracing import Block, Named, Rows, even, ragged


def exit_even(name: str, layer: Layer, function: Callable[[Packed], Tensor], hidden: int) -> Sketch:
    """A layer and its exit over rows of one length."""

    def traced(given: Named) -> tuple[Tensor, ...]:
        (y,) = halves([layer], "whole", given["x"], given["x"], even(given["position"]))
        return y, function(Block.of(y, given))

    def sample(rows: int, length: int) -> Sample:
        packed = packed_sample([length] * rows).with_states(states(rows * length, hidden))
        block = {key: tensor.view(rows, length) for key, tensor in ids_of(packed).items()}
        block["x"] = packed.states.view(rows, length, hidden)
        return Sample(block, lambda: _answered(layer, function, packed))

    return Sketch(name, traced, (sample(2, 6), sample(3, 7)))


def exit_ragged(name: str, layer: Layer, function: Callable[[Packed], Tensor], hidden: int) -> Sketch:
    """A layer and its exit over rows of any lengths."""

    def traced(given: Named) -> tuple[Tensor, ...]:
        (y,) = halves([layer], "whole", given["x"], given["x"], ragged(given))
        return y, function(Rows.of({**given, "x": y}))

    def sample(lengths: Sequence[int]) -> Sample:
        packed = packed_sample(lengths).with_states(states(sum(lengths), hidden))
        given = {"x": packed.states, **ids_of(packed), **all_inputs(packed)}
        return Sample(given, lambda: _answered(layer, function, packed))

    return Sketch(name, traced, (sample(FEW), sample(MANY)))


def opened_even(name: str, embed: Callable[[Packed], Tensor], function: Callable[[Packed], Tensor]) -> Sketch:
    """Embeddings and their exit over rows of one length."""

    def traced(given: Named) -> tuple[Tensor, ...]:
        flat = {key: tensor.reshape(-1) for key, tensor in given.items()}
        x = embed(Packed(torch.empty(0), torch.empty(0), {}, flat))
        return x, function(Block.of(x.view(given["id"].shape[0], given["id"].shape[1], -1), given))

    def sample(rows: int, length: int) -> Sample:
        packed = packed_sample([length] * rows)
        block = {key: tensor.view(rows, length) for key, tensor in ids_of(packed).items()}
        return Sample(block, lambda: _opened(embed, function, packed))

    return Sketch(name, traced, (sample(2, 6), sample(3, 7)))


def opened_ragged(name: str, embed: Callable[[Packed], Tensor], function: Callable[[Packed], Tensor]) -> Sketch:
    """Embeddings and their exit over rows of any lengths."""

    def traced(given: Named) -> tuple[Tensor, ...]:
        x = embed(Packed(torch.empty(0), torch.empty(0), {}, given))
        return x, function(Rows.of({**given, "x": x}))

    def sample(lengths: Sequence[int]) -> Sample:
        packed = packed_sample(lengths)
        return Sample({**ids_of(packed), **all_inputs(packed)}, lambda: _opened(embed, function, packed))

    return Sketch(name, traced, (sample(FEW), sample(MANY)))


@dataclass(frozen=True)
class Parts:
    """Everything from words to answers."""

    embed: Callable[[Packed], Tensor]
    layers: Sequence[Layer]
    last: Callable[[Packed], Tensor]


def model_even(name: str, parts: Parts) -> Sketch:
    """Words to answers for rows of one length."""

    def function(given: Named) -> tuple[Tensor, ...]:
        flat = {key: tensor.reshape(-1) for key, tensor in given.items()}
        x = parts.embed(Packed(torch.empty(0), torch.empty(0), {}, flat))
        rows, length = given["id"].shape[0], given["id"].shape[1]
        x = x.view(rows, length, -1)
        (x,) = halves(parts.layers, "whole", x, x, even(given["position"]))
        return (parts.last(Block.of(x, given)),)

    def sample(rows: int, length: int) -> Sample:
        packed = packed_sample([length] * rows)
        block = {key: tensor.view(rows, length) for key, tensor in ids_of(packed).items()}
        return Sample(block, lambda: _through(parts, packed))

    return Sketch(name, function, (sample(2, 6), sample(3, 7)))


def model_ragged(name: str, parts: Parts) -> Sketch:
    """Words to answers for rows of any lengths."""

    def function(given: Named) -> tuple[Tensor, ...]:
        x = parts.embed(Packed(torch.empty(0), torch.empty(0), {}, given))
        (x,) = halves(parts.layers, "whole", x, x, ragged(given))
        return (parts.last(Rows.of({**given, "x": x})),)

    def sample(lengths: Sequence[int]) -> Sample:
        packed = packed_sample(lengths)
        return Sample({**ids_of(packed), **all_inputs(packed)}, lambda: _through(parts, packed))

    return Sketch(name, function, (sample(FEW), sample(MANY)))


def _opened(
    embed: Callable[[Packed], Tensor], function: Callable[[Packed], Tensor], packed: Packed
) -> tuple[Tensor, ...]:
    """Embeddings and their exit by torch."""
    x = embed(packed)
    return x, function(packed.with_states(x))


def _answered(layer: Layer, function: Callable[[Packed], Tensor], packed: Packed) -> tuple[Tensor, ...]:
    """A layer and its exit by torch."""
    (y,) = halves([layer], "whole", packed.states, packed.states, packed.layout)
    return y, function(packed.with_states(y))


def _through(parts: Parts, packed: Packed) -> tuple[Tensor, ...]:
    """Words to answers by torch."""
    x = parts.embed(packed)
    (x,) = halves(parts.layers, "whole", x, x, packed.layout)
    return (parts.last(packed.with_states(x)),)
