"""Gradients of large embedding tables without their zeros.

A batch contains a few hundred of thirty thousand token ids, but a dense gradient is fresh memory of the table's size in
every backward pass (MiniLM: 47 MB, measured as a twentieth to a fifth of a step). Sparse gradients are computed instead
and copied into one dense tensor that is kept; optimisers and clipping get what they would have got.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LARGE_TABLE = 4096  # rows from which sparse gradients pay


class SparseEmbeddings:
    """The large embedding tables of a model whose weights no other module shares."""

    def __init__(self, model: nn.Module) -> None:
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        self.modules = [
            module
            for module in embeddings
            if module.num_embeddings >= LARGE_TABLE
            and uses[id(module.weight)] == 1
            and module.weight.device.type == "cpu"
        ]
        self.dense: dict[int, tuple[Tensor, Tensor]] = {}  # by index: the dense gradient, the rows filled last

    def densify_gradients(self) -> None:
        """Replace sparse gradients by dense ones; call it after every backward pass."""
        for index, module in enumerate(self.modules):
            grad = module.weight.grad
            if grad is None or not grad.is_sparse:
                continue
            grad = grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            if index in self.dense:
                dense, filled = self.dense[index]
                dense.index_fill_(0, filled, 0.0)
            else:
                dense = torch.zeros_like(module.weight)
            dense.index_copy_(0, rows, values)
            self.dense[index] = dense, rows
            module.weight.grad = dense


@contextmanager
def sparse_gradients(model: nn.Module) -> Iterator[SparseEmbeddings]:
    """Let large embedding tables produce sparse gradients inside the block."""
    tables = SparseEmbeddings(model)
    before = [module.sparse for module in tables.modules]
    for module in tables.modules:
        module.sparse = True
    try:
        yield tables
    finally:
        for module, sparse in zip(tables.modules, before, strict=True):
            module.sparse = sparse
            module.weight.grad = None  # it must not hold the dense tensor any longer
