"""Graphs meet few sizes, and filler is never taken for anything."""

from __future__ import annotations

import torch

from offramp.core.layout import layout
from offramp.engines.openvino.inputs import filled
from offramp.engines.openvino.padding import many, places, room, wide


def test_sizes_are_few_and_little_larger() -> None:
    tokens, rows, places_ = range(1, 4097), range(1, 257), range(1, 513)
    assert all(n <= room(n) <= n + max(7, n / 16) and room(room(n)) == room(n) for n in tokens)
    assert all(n <= many(n) <= n * 9 / 8 and many(many(n)) == many(n) for n in rows) and many(1) == 1
    assert all(n <= wide(n) <= n + 3 for n in places_)
    assert len({room(n) for n in tokens}) < 120 and len({many(n) for n in rows}) < 60


def test_filling_up_copies_only_where_memory_ends() -> None:
    long = torch.arange(24.0).view(12, 2)
    part = long[:5]
    same, copied = filled(part, 8), filled(part.clone(), 8)
    assert same.data_ptr() == long.data_ptr() and torch.equal(same, long[:8])
    assert torch.equal(copied[:5], part) and copied[5:].count_nonzero() == 0 and filled(long, 12) is long
    behind = filled(long[9:], 4)  # the memory ends one row too early
    assert torch.equal(behind[:3], long[9:]) and behind.shape == (4, 2) and behind.data_ptr() != long[9:].data_ptr()
    assert torch.equal(filled(long.t(), 3)[:2], long.t())  # not one row after another


def test_filler_sees_something_and_is_no_row() -> None:
    lengths = [3] * 17 + [90] + [1] * 30
    for counts in (lengths, [9] * 8 + [8] * 9):
        made = places(layout(torch.tensor(counts), torch.cat([torch.arange(n) for n in counts])))
        assert made.key.pad.shape[0] == many(made.key.pad.shape[0]) and made.key.pad.shape[1] % 4 == 0
        assert (made.mask == 0).any(-1).all()  # looking at nothing would be NaN
        assert made.real.sum() == sum(counts) == len(made.key.unpad)
        assert sorted(made.key.pad.reshape(-1)[made.key.unpad]) == list(range(sum(counts)))
