"""Variable-length attention against the obvious computation, one row at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offramp import backbones
from offramp.core.attention import AttentionOptions, attend, layout
from offramp.core.packed import pack
from tests import factories

HEADS, WIDTH = 2, 8


def obvious(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
    q, k, v = (x.view(len(x), HEADS, -1).transpose(0, 1) for x in (q, k, v))
    logits = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    if window is not None:
        far = (torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])[None]).abs() > window
        logits = logits.masked_fill(far, float("-inf"))
    weights = logits.softmax(-1)
    return (weights @ v).transpose(0, 1).reshape(q.shape[1], -1), weights.mean(0)


def places(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.booleans(), st.sampled_from([None, 3]))
@settings(max_examples=40)
def test_rows_see_only_themselves(lengths: list[int], scores: bool, window: int | None) -> None:
    torch.manual_seed(sum(lengths))
    q, k, v = torch.randn(3, sum(lengths), WIDTH)
    where = layout(torch.tensor(lengths), places(lengths))
    out, seen = attend(q, k, v, where, AttentionOptions(HEADS, window=window, scores=scores))
    parts = [x.split(lengths) for x in (q, k, v)]
    for row, (a, b, c) in enumerate(zip(*parts, strict=True)):
        want, weights = obvious(a, b, c, window)
        assert torch.allclose(out.split(lengths)[row], want, atol=1e-5)
        if seen is not None:
            assert torch.allclose(seen.columns.split(lengths)[row], weights.sum(0), atol=1e-5)
            assert torch.allclose(seen.diagonal.split(lengths)[row], weights.diagonal(), atol=1e-5)


@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0, 1)), min_size=1, max_size=6))
@settings(max_examples=40)
def test_fewer_queries_than_keys(rows: list[tuple[int, float]]) -> None:
    """Also rows without a single query."""
    lengths = [n for n, _ in rows]
    torch.manual_seed(len(rows))
    q, k, v = torch.randn(3, sum(lengths), WIDTH)
    live = torch.cat([torch.rand(n) < share for n, share in rows])
    if not live.any():
        live[0] = True
    counts = torch.tensor([int(part.sum()) for part in live.split(lengths)])
    position = places(lengths)
    where = layout(torch.tensor(lengths), position, counts, position[live])
    out, _ = attend(q[live], k, v, where, AttentionOptions(HEADS))
    want = torch.cat([obvious(*x)[0] for x in zip(*(y.split(lengths) for y in (q, k, v)), strict=True)])
    assert torch.allclose(out, want[live], atol=1e-5)


@pytest.mark.parametrize("lengths", [[3, 17, 60, 2], [5, 5, 5]])
def test_gradients_through_the_gathers_are_exact(lengths: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, sum(lengths), WIDTH, requires_grad=True)
    weight = torch.randn(sum(lengths), WIDTH)
    out, _ = attend(*x, layout(torch.tensor(lengths), places(lengths)), AttentionOptions(HEADS))
    (ours,) = torch.autograd.grad((out * weight).sum(), x)
    want = torch.cat([obvious(*p)[0] for p in zip(*(y.split(lengths) for y in x), strict=True)])
    (theirs,) = torch.autograd.grad((want * weight).sum(), x)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_soft_mask_becomes_removal_in_the_limit() -> None:
    torch.manual_seed(1)
    lengths = [6, 11]
    q, k, v = torch.randn(3, 17, WIDTH)
    gone = torch.zeros(17, dtype=torch.bool)
    gone[[2, 3, 9]] = True
    bias = torch.where(gone, -1e9, 0.0)
    soft, _ = attend(q, k, v, layout(torch.tensor(lengths), places(lengths)), AttentionOptions(HEADS, key_bias=bias))
    position = places(lengths)
    where = layout(torch.tensor([4, 10]), position[~gone], torch.tensor(lengths), position)
    hard, _ = attend(q, k[~gone], v[~gone], where, AttentionOptions(HEADS))
    assert torch.allclose(soft, hard, atol=1e-5)


def test_one_long_row_does_not_inflate_its_batch() -> None:
    lengths = [512] + [16] * 31
    where = layout(torch.tensor(lengths), places(lengths))
    cells = sum(b.rows * b.queries * b.keys for b in where.rectangles)
    assert cells == sum(n * n for n in lengths)


def test_equal_lengths_take_the_path_without_gathers() -> None:
    where = layout(torch.tensor([7, 7, 7]), places([7, 7, 7]))
    assert where.query is None and where.key is None and len(where.rectangles) == 1


def test_column_sums_equal_eager_hugging_face_attentions() -> None:
    net = factories.hf_model("bert")
    net.set_attn_implementation("eager")
    lengths = [9, 4, 13]
    ids = factories.token_ids(lengths)
    attentions = factories.hf_padded(net, ids, output_attentions=True).attentions
    encoder, packed = backbones.encoder(net), pack(ids)
    packed = packed.with_states(encoder.embed(packed).detach())
    for layer, theirs in zip(encoder.layers, attentions, strict=True):
        x, seen = layer.attend(packed.states, packed.states, packed.layout, True, None)
        assert seen is not None
        for row, part in enumerate(seen.columns.split(lengths)):
            n = lengths[row]
            assert torch.allclose(part, theirs[row, :, :n, :n].mean(0).sum(0), atol=1e-5)
        packed = packed.with_states(layer.feed(x))


def test_the_diagonal_of_idle_tokens_is_zero_and_a_batch_does_not_change_it() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 11, WIDTH)
    live = torch.tensor([True, False, True, True, False] + [True] * 6)
    position, lengths = places([5, 6]), torch.tensor([5, 6])
    both = layout(lengths, position, torch.tensor([3, 6]), position[live])
    alone = layout(lengths[:1], position[:5], torch.tensor([3]), position[:5][live[:5]])
    together = attend(q[live], k, v, both, AttentionOptions(HEADS, scores=True))[1]
    single = attend(q[:5][live[:5]], k[:5], v[:5], alone, AttentionOptions(HEADS, scores=True))[1]
    assert together is not None and single is not None
    assert torch.allclose(together.diagonal[:5], single.diagonal, atol=1e-6)
    assert (single.diagonal[~live[:5]] == 0).all() and (single.diagonal[live[:5]] > 0).all()
    assert torch.allclose(together.columns[:5], single.columns, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_training_in_bfloat16_mixes_as_fp32_does(window: int | None) -> None:
    """Forward and gradients, rows of unequal length in one rectangle."""
    lengths = [9, 12, 3]
    torch.manual_seed(0)
    whole = torch.randn(3, sum(lengths), WIDTH)
    where = layout(torch.tensor(lengths), places(lengths))
    seen = {}
    for kind in (torch.float32, torch.bfloat16):
        states = whole.to(kind, copy=True).requires_grad_()
        out, _ = attend(*states, where, AttentionOptions(HEADS, window=window))
        out.square().sum().backward()
        assert states.grad is not None
        seen[kind] = torch.cat([out[None], states.grad]).float()
    assert torch.allclose(*seen.values(), atol=0.15)
    assert (seen[torch.float32] - seen[torch.bfloat16]).abs().mean() < 0.01
