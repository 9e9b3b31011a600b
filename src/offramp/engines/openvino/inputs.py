"""Inputs of compiled graphs: the states of a batch and the arrays of its layout, shared without copying.

Ragged batches are padded to one of a few sizes (`padding`); filler is computed and never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from offramp.core.columns import ID, POSITION, TYPE
from offramp.core.layout import Layout
from offramp.engines.openvino import graphs
from offramp.engines.openvino.padding import extend, padded_tokens
from offramp.engines.openvino.runtime import Graph, share

PER_TOKEN = ("key_unpad", "query_unpad", "row")  # inputs with one value for each token
SPARSE = 4  # a batch whose rectangle of rows is that many times its tokens is pooled by torch


def even_inputs(
    where: Layout, graph: Graph, x: Tensor, outputs: list[Tensor], tokens: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return inputs and outputs of a graph for rows of one length, states as [rows, length, hidden]."""
    shape = _shape(where)
    given = even_columns(where, graph, {POSITION: where.key_position, **tokens})
    return {**given, "x": x.view(*shape, -1)}, [outputs[0].view(*shape, -1), *outputs[1:]]


def even_columns(where: Layout, graph: Graph, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns that a graph for rows of one length takes."""  # [rows, length]
    shape = _shape(where)
    return {name: tokens[name].view(shape) for name in graph.names if name in tokens}


def _shape(where: Layout) -> tuple[int, int]:
    return len(where.key_lengths), int(where.key_lengths[0])


def padded(x: Tensor, count: int) -> Tensor:
    """Return one value for each token, padded to `count`; a view where the memory behind the tensor is long enough."""
    if x.shape[0] == count:
        return x
    needed = (x.storage_offset() + count * x[0].numel()) * x.element_size()
    if x.is_contiguous() and x.untyped_storage().nbytes() >= needed:
        return x.as_strided((count, *x.shape[1:]), x.stride())
    result = x.new_zeros(count, *x.shape[1:])
    result[: x.shape[0]] = x
    return result


def mostly_filler(where: Layout) -> bool:
    """Return whether a rectangle of rows would be mostly filler."""
    lengths = where.key_lengths
    return len(lengths) > 1 and len(lengths) * int(lengths.max()) > SPARSE * int(lengths.sum())


def ragged_inputs(where: Layout) -> dict[str, Any]:
    """Return the inputs that ragged graphs take of a layout, computed once for all layers."""
    if "openvino" not in where.cache:
        result = {name: share(_filled(name, array)) for name, array in graphs.ragged_arrays(where).items()}
        sides = {POSITION: where.key_position, "query_position": where.query_position}
        result |= {name: share(padded(x, padded_tokens(x.shape[0]))) for name, x in sides.items()}
        where.cache["openvino"] = result
    found: dict[str, Any] = where.cache["openvino"]
    return found


def row_inputs(where: Layout, graph: Graph) -> dict[str, Any]:
    """Return the inputs that heads take of a layout: pooling always, lines only where a head attends."""
    found: dict[str, Any] = where.cache.setdefault("openvino-rows", {})
    if not all(name in found for name in graph.names if name not in ("x", ID, TYPE)):
        result = graphs.row_arrays(where, graph.names)
        found.update({name: share(_filled(name, array)) for name, array in result.items() if name in graph.names})
        if "mask" in graph.names or POSITION in graph.names:
            found.update(ragged_inputs(where))
    return found


def _filled(name: str, array: graphs.Array) -> graphs.Array:
    """Pad inputs with one value for each token with zeros, an index that always exists."""
    return extend(array, padded_tokens(len(array))) if name in PER_TOKEN else array
