"""What compiled graphs are given of a batch: states in blocks, and of its layout what they ask for, shared once.

Ragged batches are filled up to one of a few sizes (`_places.py`); filler is computed and never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from offramp.core.layout import Layout
from offramp.engines.openvino import graphs as _sketch
from offramp.engines.openvino.padding import longer, room
from offramp.engines.openvino.runtime import Graph, share

PER_TOKEN = ("key_unpad", "query_unpad", "row")  # of what graphs are told: one for each token
SPARSE = 4  # a batch whose rectangle of rows is that many times its tokens is pooled by torch


def block(
    where: Layout, graph: Graph, x: Tensor, outputs: list[Tensor], tokens: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Inputs and outputs of a graph over rows of one length: states as [rows, length, hidden]."""
    shape = _shape(where)
    given = columns(where, graph, {"position": where.key_position, **tokens})
    return {**given, "x": x.view(*shape, -1)}, [outputs[0].view(*shape, -1), *outputs[1:]]


def columns(where: Layout, graph: Graph, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns that a graph over rows of one length asks for."""  # [rows, length]
    shape = _shape(where)
    return {name: tokens[name].view(shape) for name in graph.names if name in tokens}


def _shape(where: Layout) -> tuple[int, int]:
    return len(where.key_lengths), int(where.key_lengths[0])


def filled(x: Tensor, count: int) -> Tensor:
    """Something of each token with as much behind it as is missing; over the same memory where that goes on."""
    if x.shape[0] == count:
        return x
    needed = (x.storage_offset() + count * x[0].numel()) * x.element_size()
    if x.is_contiguous() and x.untyped_storage().nbytes() >= needed:
        return x.as_strided((count, *x.shape[1:]), x.stride())
    made = x.new_zeros(count, *x.shape[1:])
    made[: x.shape[0]] = x
    return made


def sparse(where: Layout) -> bool:
    """Whether a rectangle of rows would be mostly filler."""
    lengths = where.key_lengths
    return len(lengths) > 1 and len(lengths) * int(lengths.max()) > SPARSE * int(lengths.sum())


def inputs(where: Layout) -> dict[str, Any]:
    """What ragged graphs want to know of a layout, ready to be shared; made once for all layers."""
    if "openvino" not in where.cache:
        made = {name: share(_filled(name, array)) for name, array in _sketch.ragged_inputs(where).items()}
        sides = {"position": where.key_position, "query_position": where.query_position}
        made |= {name: share(filled(x, room(x.shape[0]))) for name, x in sides.items()}
        where.cache["openvino"] = made
    found: dict[str, Any] = where.cache["openvino"]
    return found


def rows(where: Layout, graph: Graph) -> dict[str, Any]:
    """What heads want to know of a layout: pooling always, lines only where a head attends."""
    found: dict[str, Any] = where.cache.setdefault("openvino-rows", {})
    if not all(name in found for name in graph.names if name not in ("x", "id", "type")):
        made = _sketch.row_inputs(where, graph.names)
        found.update({name: share(_filled(name, array)) for name, array in made.items() if name in graph.names})
        if "mask" in graph.names or "position" in graph.names:
            found.update(inputs(where))
    return found


def _filled(name: str, array: _sketch.Array) -> _sketch.Array:
    """One for each token, filled up with zeros: a place, or a row, that is always there."""
    return longer(array, room(len(array))) if name in PER_TOKEN else array
