"""Large embedding tables learn from sparse gradients as from dense ones."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from offramp.training.sparse_embeddings import LARGE_TABLE, sparse_gradients


def train_table(table: nn.Embedding, batches: Iterable[Tensor], sparse: bool) -> Tensor:
    """Return the table's weights after a few steps, and set them back."""
    network, start = nn.ModuleDict({"large": table, "small": nn.Embedding(8, 4)}), table.weight.detach().clone()
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.1, weight_decay=0.01)
    with sparse_gradients(network) if sparse else nullcontext(None) as tables:
        for ids in batches:
            optimiser.zero_grad()
            table(ids).pow(2).sum().backward()
            (table(ids[:2]).sum() * 3.0).backward()  # gradients of several backward passes add up
            if tables is not None:
                assert table.weight.grad is not None and table.weight.grad.is_sparse
                tables.densify_gradients()
            assert table.weight.grad is not None and not table.weight.grad.is_sparse
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
    trained = table.weight.detach().clone()
    table.weight.data.copy_(start)
    return trained


def test_sparse_gradients_train_as_dense_gradients_do() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(LARGE_TABLE, 4)
    batches = [torch.tensor([3, 3, 7, 4000]), torch.tensor([7, 1, 0]), torch.tensor([4095, 4095])]
    dense, sparse = train_table(table, batches, sparse=False), train_table(table, batches, sparse=True)
    assert torch.allclose(dense, sparse, atol=1e-7) and not torch.equal(dense, table.weight)
    assert not table.sparse and table.weight.grad is None


def test_sparse_gradients_leave_small_and_shared_tables_unchanged() -> None:
    table, head = nn.Embedding(LARGE_TABLE, 4), nn.Linear(4, LARGE_TABLE, bias=False)
    head.weight = table.weight
    for network in (nn.ModuleList([table, head]), nn.ModuleList([nn.Embedding(LARGE_TABLE - 1, 4)])):
        with sparse_gradients(network) as tables:
            assert tables.modules == [] and not table.sparse
