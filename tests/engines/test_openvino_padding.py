"""Lines for compiled attention: every token has one place and its own row, and one long row inflates no other."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from offramp.core.layout import layout
from offramp.engines.openvino.padding import line_layout


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


@given(st.lists(st.integers(1, 40) | st.integers(100, 300), min_size=1, max_size=12), st.randoms())
def test_every_query_sees_exactly_the_keys_of_its_row(lengths: list[int], draw: object) -> None:
    counts = [draw.randint(0, n) for n in lengths]  # type: ignore[attr-defined]
    counts[0] = max(1, counts[0])
    for queries in (None, counts):
        counts = lengths if queries is None else queries
        some = None if queries is None else torch.tensor(queries)
        lines = line_layout(layout(torch.tensor(lengths), positions(lengths), some, positions(counts)))
        visible = np.broadcast_to(
            lines.mask == 0, (*lines.mask.shape[:2], lines.query.pad.shape[1], lines.mask.shape[3])
        )
        assert visible.any(-1).all()  # a line of −∞ alone would be NaN
        owners = np.repeat(np.arange(len(lengths)), counts)
        assert lines.real.sum() == len(owners)
        ends = np.cumsum(lengths)
        for token, place in enumerate(lines.query.unpad):
            line, column = divmod(int(place), lines.query.pad.shape[1])
            assert lines.query.pad[line, column] == token and lines.real[line, column, 0] == 1.0
            row = owners[token]
            keys = lines.key.pad[line][visible[line, 0, column]]
            assert sorted(keys.tolist()) == list(range(ends[row] - lengths[row], ends[row]))


def test_one_long_row_does_not_inflate_its_batch() -> None:
    lengths = [400, *[10] * 31]
    lines = line_layout(layout(torch.tensor(lengths), positions(lengths)))
    assert lines.cells <= 2 * 400 * 400
    near = [40, 30, 38, 25]
    assert line_layout(layout(torch.tensor(near), positions(near))).mask.shape == (
        4,
        1,
        1,
        40,
    )  # little waste: plain rows
