"""Gradients of word tables without their zeros.

A batch names a few hundred of thirty thousand words, but a dense gradient is fresh memory of the whole table's size at
every way back (MiniLM: 47 MB, measured a twentieth to a fifth of a step). Sparse gradients are gathered instead and
laid into one dense tensor that stays; optimisers and clipping see what they would have seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LARGE_TABLE = 4096  # rows from which it pays


class SparseEmbeddings:
    """The large tables of a model that nothing else shares."""

    def __init__(self, model: nn.Module) -> None:
        shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        found = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        self.modules = [
            module
            for module in found
            if module.num_embeddings >= LARGE_TABLE
            and shared[id(module.weight)] == 1
            and module.weight.device.type == "cpu"
        ]
        self.dense: dict[int, tuple[Tensor, Tensor]] = {}  # by place: the tensor that stays, the rows that are filled

    def densify_gradients(self) -> None:
        """Sparse gradients become dense ones."""
        for place, module in enumerate(self.modules):
            grad = module.weight.grad
            if grad is None or not grad.is_sparse:
                continue
            joined = grad.coalesce()
            rows, values = joined.indices()[0], joined.values()
            if place in self.dense:
                whole, before = self.dense[place]
                whole.index_fill_(0, before, 0.0)
            else:
                whole = torch.zeros_like(module.weight)
            whole.index_copy_(0, rows, values)
            self.dense[place] = whole, rows
            module.weight.grad = whole


@contextmanager
def sparse_gradients(model: nn.Module) -> Iterator[SparseEmbeddings]:
    """Large tables give sparse gradients in here; call `settle` after every way back."""
    tables = SparseEmbeddings(model)
    before = [module.sparse for module in tables.modules]
    for module in tables.modules:
        module.sparse = True
    try:
        yield tables
    finally:
        for module, was in zip(tables.modules, before, strict=True):
            module.sparse = was
            module.weight.grad = None  # it must not hold the tensor that stayed
