"""Multiply-accumulates, counted from the events of a run. FLOPs = 2 × MACs.

Lookups, norms, biases and activations are not counted (they are not matrix products), as in the published counts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class Event(NamedTuple):
    """One operation of the loop on some rows."""

    kind: Literal["embed", "attend", "feed", "head", "exit_unit", "predictor"]
    layer: int
    rows: Tensor  # [n] which rows of the original batch
    tokens: Tensor  # [n] tokens computed in each
    keys: Tensor  # [n] tokens visible in each


@dataclass(frozen=True)
class LayerCost:
    """MACs of one layer as coefficients."""

    query: float  # per query token: Q and output projections
    key: float  # per key token: K and V projections
    pair: float  # per query-key pair: both products of attention
    feed: float  # per token fed forward


class HeadCost(NamedTuple):
    """MACs of one exit (or predictor): per row, per token, and per pair of tokens where it attends."""

    row: float
    token: float
    pair: float = 0.0


class CostModel(Protocol):
    """MACs of the parts of a model."""

    def embed_cost(self) -> HeadCost:
        """Return the MACs of projections in the embeddings."""

    def layer_cost(self, layer: int) -> LayerCost:
        """Return the MACs of layer 1…L."""

    def exit_cost(self, layer: int) -> HeadCost:
        """Return the MACs of the exit after layer 0…L."""

    def exit_unit_cost(self, layer: int) -> HeadCost:
        """Return the MACs of the learned exit unit."""

    def predictor_cost(self, layer: int) -> HeadCost:
        """Return the MACs of the method's own predictor before a layer."""


class SummedTrace(Sequence[Event]):
    """A trace whose sums follow from a few numbers of each row; its events are built only if they are read."""

    @abstractmethod
    def macs(self, costs: CostModel, rows: int) -> Tensor:
        """Return the MACs of every row of the batch."""  # [rows] float64

    @abstractmethod
    def tokens_fed(self, depth: int) -> Tensor:
        """Return the number of tokens that each layer computed, summed over rows."""  # [layers]

    @abstractmethod
    def tokens_kept(self, depth: int, rows: int) -> Tensor:
        """Return the mean number of tokens that a layer computed, for every row."""  # [rows]


def macs(trace: Sequence[Event], costs: CostModel, rows: int) -> Tensor:
    """Return the MACs of every row of the batch."""  # [rows] float64
    if isinstance(trace, SummedTrace):
        return trace.macs(costs, rows)
    sums: dict[tuple[int, int, int], tuple[Event, list[float]]] = {}
    for event in trace:  # operations on the same rows and tokens are summed before they are spread
        same = (id(event.rows), id(event.tokens), id(event.keys))
        total = sums.setdefault(same, (event, [0.0, 0.0, 0.0, 0.0]))[1]
        for i, share in enumerate(_shares(event, costs)):
            total[i] += share
    spent = np.zeros(rows)
    if rows == 1:  # plain numbers are quicker than columns of one
        for event, (row, token, key, pair) in sums.values():
            for tokens, keys in zip(event.tokens.tolist(), event.keys.tolist(), strict=True):
                spent[0] += row + token * tokens + (key * keys if tokens > 0 else 0.0) + pair * tokens * keys
        return torch.from_numpy(spent)
    for event, (row, token, key, pair) in sums.values():
        tokens, keys = event.tokens.numpy(), event.keys.numpy()
        # keys of a row are projected only if a query of that row is computed
        cost = row + token * tokens + (key * keys) * (tokens > 0) + pair * tokens * keys
        np.add.at(spent, event.rows.numpy(force=True), cost)  # a row may be named more than once
    return torch.from_numpy(spent)


def _shares(event: Event, costs: CostModel) -> tuple[float, float, float, float]:
    """Return the MACs of an event per row, per token, per key and per query-key pair."""
    kind, layer = event.kind, event.layer
    if kind == "attend":
        cost = costs.layer_cost(layer)
        return 0.0, cost.query, cost.key, cost.pair
    if kind == "feed":
        return 0.0, costs.layer_cost(layer).feed, 0.0, 0.0
    if kind == "embed":
        flat = costs.embed_cost()
    elif kind == "head":
        flat = costs.exit_cost(layer)
    else:
        flat = costs.exit_unit_cost(layer) if kind == "exit_unit" else costs.predictor_cost(layer)
    return flat.row, flat.token, 0.0, flat.pair


def full(costs: CostModel, depth: int, lengths: Tensor) -> Tensor:
    """Return the MACs of the full model (all layers, all tokens, last head only) for rows of these lengths."""
    n, rows = lengths, torch.arange(lengths.shape[0])
    trace = [Event("embed", 0, rows, n, n)]
    for layer in range(1, depth + 1):
        trace += [Event("attend", layer, rows, n, n), Event("feed", layer, rows, n, n)]
    return macs([*trace, Event("head", depth, rows, n, n)], costs, lengths.shape[0])


def tokens_fed(trace: Sequence[Event], depth: int) -> Tensor:
    """Return the number of tokens that each layer computed, summed over rows."""  # [layers]
    if isinstance(trace, SummedTrace):
        return trace.tokens_fed(depth)
    total = np.zeros(depth)
    for event in trace:
        if event.kind == "feed":
            total[event.layer - 1] += int(event.tokens.sum())
    return torch.from_numpy(total)


def tokens_kept(trace: Sequence[Event], depth: int, rows: int) -> Tensor:
    """Return the mean number of tokens that a layer computed, for every row."""  # [rows]
    if isinstance(trace, SummedTrace):
        return trace.tokens_kept(depth, rows)
    total = np.zeros(rows)
    for event in trace:
        if event.kind == "feed" and rows == 1:
            total[0] += sum(event.tokens.tolist())
        elif event.kind == "feed":
            np.add.at(total, event.rows.numpy(force=True), event.tokens.numpy())
    return torch.from_numpy(total / depth)
