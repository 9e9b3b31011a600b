"""KV caches: missing tokens are projected when a block is reached, and cached attention equals plain attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.decoding.kv_cache import CrossAttentionCache, SelfAttentionCache, attend_cached, write_position

HIDDEN, HEADS = 8, 2


class LinearKV:
    """Projections that record how many states they were given."""

    def __init__(self) -> None:
        self.weight = torch.randn(2 * HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0))
        self.projected = 0

    def project_kv(self, states: Tensor) -> Tensor:
        self.projected += states[..., 0].numel()
        return F.linear(states, self.weight)

    project_source_kv = project_kv


def random_states(*shape: int) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0]])
def test_fill_missing_projects_exactly_the_tokens_that_exited_below(rows: list[int]) -> None:
    block, states = LinearKV(), random_states(3, 32)
    cache = SelfAttentionCache(3, states[:, 0], HEADS)
    index = np.array(rows)
    missing = cache.fill_missing(block, states, 2, index)
    assert missing is not None and missing.tolist() == [2] * len(rows) and block.projected == 2 * len(rows)
    assert torch.allclose(cache.kv[rows, :2], block.project_kv(states[rows, :2]))
    assert cache.fill_missing(block, states, 3, index) is None
    assert cache.filled.tolist() == [4 if row in rows else 0 for row in range(3)]


def test_fill_projects_the_source_of_each_sentence_once() -> None:
    block, source = LinearKV(), random_states(3, 5)
    cache = CrossAttentionCache(source, HEADS)
    assert cache.fill(block, source, np.array([1, 1])).tolist() == [1]
    assert cache.fill(block, source, np.array([0, 1, 2])).tolist() == [0, 2]
    assert cache.fill(block, source, np.array([0, 1, 2])).tolist() == [] and block.projected == 15
    assert torch.allclose(cache.kv, block.project_kv(source))


def test_select_keeps_rows_in_the_given_order() -> None:
    block, states = LinearKV(), random_states(3, 32)
    cache = SelfAttentionCache(3, states[:, 0], HEADS)
    cache.fill_missing(block, states, 1, np.array([2]))
    before = cache.kv.clone()
    cache.select(torch.tensor([2, 0]), np.array([2, 0]))
    assert cache.filled.tolist() == [2, 0] and torch.equal(cache.kv, before[[2, 0]])


@pytest.mark.parametrize("rows", [None, [1], [0, 2, 3]])
def test_attend_cached_of_some_rows_equals_attention_of_each_row(rows: list[int] | None) -> None:
    keys, values = (torch.randn(4, HEADS, 6, HIDDEN // HEADS) for _ in range(2))
    chosen = list(range(4)) if rows is None else rows
    query = random_states(len(chosen))
    attended = attend_cached(query, keys, values, None if rows is None else torch.tensor(rows), 4)
    for place, row in enumerate(chosen):
        alone = F.scaled_dot_product_attention(query[place].view(HEADS, 1, -1), keys[row], values[row])
        assert torch.allclose(attended[place], alone.flatten(), atol=1e-6)


def test_attend_cached_lets_beams_share_the_source_and_masks_padding() -> None:
    keys, values = (torch.randn(2, HEADS, 6, HIDDEN // HEADS) for _ in range(2))
    mask = torch.zeros(2, 1, 1, 6)
    mask[1, ..., 4:] = -torch.inf
    query = random_states(6)  # three beams for each of two sentences
    attended = attend_cached(query, keys, values, None, 6, mask)
    for row in range(6):
        own, length = row // 3, 6 if row < 3 else 4
        shown = keys[own, :, :length], values[own, :, :length]
        alone = F.scaled_dot_product_attention(query[row].view(HEADS, 1, -1), *shown)
        assert torch.allclose(attended[row], alone.flatten(), atol=1e-6)


@pytest.mark.parametrize("rows", [[0, 1], [1]])
def test_write_position_changes_only_the_given_rows(rows: list[int]) -> None:
    store, values = torch.zeros(2, 3, HIDDEN), random_states(len(rows))
    write_position(store, 1, np.array(rows), values)
    assert torch.equal(store[rows, 1], values)
    assert int((store != 0).any(-1).sum()) == len(rows)
