"""Lines for compiled attention: every token has one place, sees its own row only, and one long row inflates nobody."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from offramp.core.layout import layout
from offramp.engines.openvino.padding import places


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


@given(st.lists(st.integers(1, 40) | st.integers(100, 300), min_size=1, max_size=12), st.randoms())
def test_every_query_sees_exactly_the_keys_of_its_row(lengths: list[int], draw: object) -> None:
    counts = [draw.randint(0, n) for n in lengths]  # type: ignore[attr-defined]
    counts[0] = max(1, counts[0])
    for queries in (None, counts):
        asked = lengths if queries is None else queries
        some = None if queries is None else torch.tensor(queries)
        made = places(layout(torch.tensor(lengths), positions(lengths), some, positions(asked)))
        seen = np.broadcast_to(made.mask == 0, (*made.mask.shape[:2], made.query.pad.shape[1], made.mask.shape[3]))
        assert seen.any(-1).all()  # a line of −∞ alone would be NaN
        owners = np.repeat(np.arange(len(lengths)), asked)
        assert made.real.sum() == len(owners)
        ends = np.cumsum(lengths)
        for token, place in enumerate(made.query.unpad):
            line, column = divmod(int(place), made.query.pad.shape[1])
            assert made.query.pad[line, column] == token and made.real[line, column, 0] == 1.0
            row = owners[token]
            keys = made.key.pad[line][seen[line, 0, column]]
            assert sorted(keys.tolist()) == list(range(ends[row] - lengths[row], ends[row]))


def test_one_long_row_does_not_inflate_its_batch() -> None:
    lengths = [400, *[10] * 31]
    made = places(layout(torch.tensor(lengths), positions(lengths)))
    assert made.cells <= 2 * 400 * 400
    near = [40, 30, 38, 25]
    assert places(layout(torch.tensor(near), positions(near))).mask.shape == (4, 1, 1, 40)  # little waste: plain rows
