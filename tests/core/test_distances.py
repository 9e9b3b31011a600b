"""Logits from distances: rows in order take a shorter way, which gives the same numbers and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offramp.core.attention import distances
from offramp.core.attention.distances import RelativePositions, are_whole_rows

ROWS, HEADS, WIDTH = 3, 2, 8


def logits_and_gradients(
    tables: tuple[bool, bool], reach: int, size: int, places: Tensor, shared: bool
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = 1 if shared else HEADS
    table = torch.randn(2 * reach + 1, heads, WIDTH, generator=generator, requires_grad=True)
    query, key = (torch.randn(ROWS, HEADS, size, WIDTH, generator=generator, requires_grad=True) for _ in range(2))
    weights = torch.randn(ROWS, HEADS, size, size, generator=generator)
    relative = RelativePositions(reach, *(table if used else None for used in tables))
    logits = relative.logits(query, key, (places, places))
    (logits * weights).sum().backward()
    return [logits.detach(), *(one.grad for one in (query, key, table) if one.grad is not None)]


@pytest.mark.parametrize("tables", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("reach", "size"), [(3, 9), (9, 4), (4, 5), (2, 1)])
@pytest.mark.parametrize("shared", [True, False])
def test_rows_in_order_have_the_logits_and_gradients_of_the_general_way(
    tables: tuple[bool, bool], reach: int, size: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = torch.arange(size).expand(ROWS, -1)
    found = logits_and_gradients(tables, reach, size, places, shared)
    monkeypatch.setattr(distances, "are_whole_rows", lambda *_: False)
    expected = logits_and_gradients(tables, reach, size, places, shared)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_with_gaps_or_other_queries_are_not_whole() -> None:
    counted = torch.arange(4).expand(2, -1)
    assert are_whole_rows(counted, counted)
    filled = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 0]])
    assert are_whole_rows(filled, filled)
    gap = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 0]])
    assert not are_whole_rows(gap, gap)
    assert not are_whole_rows(counted[:, :2], counted)
