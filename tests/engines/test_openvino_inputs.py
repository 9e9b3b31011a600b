"""Graphs meet few sizes, and filler is never taken for anything."""

from __future__ import annotations

import torch

from offramp.core.layout import layout
from offramp.engines.openvino.inputs import padded
from offramp.engines.openvino.padding import line_layout, padded_length, padded_rows, padded_tokens


def test_sizes_are_few_and_little_larger() -> None:
    tokens, rows, places_ = range(1, 4097), range(1, 257), range(1, 513)
    assert all(
        n <= padded_tokens(n) <= n + max(7, n / 16) and padded_tokens(padded_tokens(n)) == padded_tokens(n)
        for n in tokens
    )
    assert (
        all(n <= padded_rows(n) <= n * 9 / 8 and padded_rows(padded_rows(n)) == padded_rows(n) for n in rows)
        and padded_rows(1) == 1
    )
    assert all(n <= padded_length(n) <= n + 3 for n in places_)
    assert len({padded_tokens(n) for n in tokens}) < 120 and len({padded_rows(n) for n in rows}) < 60


def test_filling_up_copies_only_where_memory_ends() -> None:
    long = torch.arange(24.0).view(12, 2)
    part = long[:5]
    same, copied = padded(part, 8), padded(part.clone(), 8)
    assert same.data_ptr() == long.data_ptr() and torch.equal(same, long[:8])
    assert torch.equal(copied[:5], part) and copied[5:].count_nonzero() == 0 and padded(long, 12) is long
    behind = padded(long[9:], 4)  # the memory ends one row too early
    assert torch.equal(behind[:3], long[9:]) and behind.shape == (4, 2) and behind.data_ptr() != long[9:].data_ptr()
    assert torch.equal(padded(long.t(), 3)[:2], long.t())  # not one row after another


def test_filler_sees_something_and_is_no_row() -> None:
    lengths = [3] * 17 + [90] + [1] * 30
    for counts in (lengths, [9] * 8 + [8] * 9):
        lines = line_layout(layout(torch.tensor(counts), torch.cat([torch.arange(n) for n in counts])))
        assert lines.key.pad.shape[0] == padded_rows(lines.key.pad.shape[0]) and lines.key.pad.shape[1] % 4 == 0
        assert (lines.mask == 0).any(-1).all()  # attending to nothing would be NaN
        assert lines.real.sum() == sum(counts) == len(lines.key.unpad)
        assert sorted(lines.key.pad.reshape(-1)[lines.key.unpad]) == list(range(sum(counts)))
