"""Rows leave, tokens leave, columns travel, everything can be put back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.core.packed import Packed, pack
from offramp.errors import OfframpError

lengths_of = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def numbered(lengths: list[int]) -> Packed:
    """A batch whose states say where they came from: [row, place]."""
    packed = pack([[10 * r + t for t in range(n)] for r, n in enumerate(lengths)])
    place = torch.stack((packed.row_of_token.float(), packed.tokens["position"].float()), 1)
    return packed.with_states(place).with_rows(name=torch.arange(len(lengths)) * 100)


@st.composite
def batch_and_masks(draw: st.DrawFn) -> tuple[list[int], list[bool], list[bool]]:
    lengths = draw(lengths_of)
    total = sum(lengths)
    tokens = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    rows = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    return lengths, tokens, rows


@given(batch_and_masks())
@settings(max_examples=60)
def test_keeping_tokens_keeps_order_columns_and_owners(case: tuple[list[int], list[bool], list[bool]]) -> None:
    lengths, mask, _ = case
    packed = numbered(lengths)
    keep = torch.tensor(mask) | (packed.tokens["position"] == 0)
    kept = packed.keep_tokens(keep)
    assert torch.equal(kept.states, packed.states[keep])
    assert torch.equal(kept.tokens["id"], packed.tokens["id"][keep])
    assert torch.equal(kept.row_of_token.float(), kept.states[:, 0])
    assert kept.lengths.sum() == keep.sum() and kept.count == packed.count
    assert torch.equal(kept.rows["name"], packed.rows["name"])


@given(batch_and_masks())
@settings(max_examples=60)
def test_restore_puts_every_token_back_where_it_was(case: tuple[list[int], list[bool], list[bool]]) -> None:
    lengths, mask, _ = case
    packed = numbered(lengths)
    keep = torch.tensor(mask) | (packed.tokens["position"] == 0)
    moved = packed.keep_tokens(keep)
    back = moved.with_states(moved.states + 1000).restore(packed.states)
    assert torch.equal(back[keep], packed.states[keep] + 1000)
    assert torch.equal(back[~keep], packed.states[~keep])


@given(batch_and_masks())
@settings(max_examples=60)
def test_keeping_rows_keeps_whole_rows(case: tuple[list[int], list[bool], list[bool]]) -> None:
    lengths, _, mask = case
    packed, keep = numbered(lengths), torch.tensor(mask)
    kept = packed.keep_rows(keep)
    assert kept.lengths.tolist() == [n for n, k in zip(lengths, mask, strict=True) if k]
    assert torch.equal(kept.rows["name"], packed.rows["name"][keep])
    assert kept.states[:, 0].unique().tolist() == [r for r, k in enumerate(mask) if k]


@given(lengths_of)
@settings(max_examples=30)
def test_pooling_equals_row_by_row(lengths: list[int]) -> None:
    packed = numbered(lengths)
    packed = packed.with_states(torch.randn(packed.total, 5) - 3)
    parts = packed.states.split(lengths)
    assert torch.allclose(packed.mean(), torch.stack([p.mean(0) for p in parts]), atol=1e-6)
    assert torch.equal(packed.max(), torch.stack([p.amax(0) for p in parts]))
    assert torch.equal(packed.first(), torch.stack([p[0] for p in parts]))


def test_a_row_may_not_lose_all_its_tokens() -> None:
    with pytest.raises(OfframpError, match="row 1"):
        numbered([2, 3]).keep_tokens(torch.tensor([True, True, False, False, False]))


def test_an_empty_row_is_refused() -> None:
    with pytest.raises(OfframpError, match="without tokens"):
        pack([[1, 2], []])
