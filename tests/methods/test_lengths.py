"""Which tokens are kept: by rank among a row's own tokens, the earlier of equals; on row tasks always the first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.core.packed import pack
from offramp.errors import OfframpError
from offramp.methods._shared.lengths import LengthPolicy, LengthSettings, best_tokens, token_ranks
from offramp.nn.lengths import CLIFF_SHARE, cliffs, constant_drop, kept_counts
from offramp.nn.network import bare_network
from offramp.tasks import get
from tests import factories


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 1000), st.booleans())
@settings(max_examples=50)
def test_best_tokens_of_a_row_do_not_depend_on_the_batch(lengths: list[int], seed: int, first: bool) -> None:
    packed = pack(factories.token_ids(lengths))
    torch.manual_seed(seed)
    scores = torch.randint(0, 4, (packed.total,)) / 4.0 + torch.rand(packed.total) * 1e-6  # many ties, nearly
    kept_counts_of_rows = torch.tensor([1 + seed % n for n in lengths])
    kept = best_tokens(packed, scores, kept_counts_of_rows, first).split(lengths)
    for row, own in enumerate(scores.split(lengths)):
        order = sorted(range(lengths[row]), key=lambda i: (not (first and i == 0), -round(float(own[i]), 3), i))
        assert kept[row].nonzero().squeeze(1).tolist() == sorted(order[: int(kept_counts_of_rows[row])])


def test_token_ranks_count_from_the_best() -> None:
    packed = pack([[1, 2, 3], [4, 5]])
    scores = torch.tensor([0.1, 0.9, 0.5, 0.2, 0.2])
    assert token_ranks(packed, scores, first=False).tolist() == [2, 0, 1, 0, 1]
    assert token_ranks(packed, scores, first=True).tolist() == [0, 1, 2, 0, 1]


def test_kept_counts_round_up_and_keep_two() -> None:
    lengths = torch.tensor([1, 2, 3, 10, 64])
    assert kept_counts(lengths, 0.5).tolist() == [1, 2, 2, 5, 32]
    assert kept_counts(lengths, 0.3).tolist() == [1, 2, 2, 3, 20]  # 0.3 · 10 is 3, whatever floating point says
    assert kept_counts(lengths, 1.0).tolist() == lengths.tolist()


def test_a_constant_drop_is_a_geometric_series() -> None:
    assert constant_drop(3, 0.2) == (0.8, 0.64, 0.512)
    assert constant_drop(2, 0.0) == (1.0, 1.0)


BAD = {
    (0.5, 0.6): "layer 2 would keep more",
    (0.8, 0.0): "above 0 and at most 1",
    (1.2, 0.5): "above 0 and at most 1",
}


@pytest.mark.parametrize("lengths", BAD)
def test_invalid_lengths_are_refused(lengths: tuple[float, ...]) -> None:
    with pytest.raises(OfframpError, match=BAD[lengths]):
        LengthSettings(lengths)


def test_cliffs_keep_at_least_as_many_tokens_as_the_shortest_lengths() -> None:
    least = constant_drop(6, 0.2)
    assert cliffs(least) == [(1.0,) * edge + (CLIFF_SHARE,) * (6 - edge) for edge in (3, 4, 5)]
    assert cliffs((0.01,) * 4) == [(1.0,) * edge + (CLIFF_SHARE,) * (4 - edge) for edge in (1, 2, 3)]
    assert cliffs((0.5,)) == []


def test_lengths_for_another_depth_are_refused() -> None:
    task = get("classification").from_rows([{"text": "a", "label": i} for i in range(3)], "rows")
    net = bare_network(factories.hf_model("bert"), task)
    with pytest.raises(OfframpError, match="each of 3 layers") as refused:
        LengthPolicy(net, LengthSettings((0.8, 0.6)))
    assert "0.8,0.6" in str(refused.value) and "calibrate --search" in str(refused.value)


def test_only_layers_that_drop_need_scores() -> None:
    task = get("classification").from_rows([{"text": "a", "label": i} for i in range(3)], "rows")
    net = bare_network(factories.hf_model("bert"), task)
    policy = LengthPolicy(net, LengthSettings((1.0, 0.5, 0.5)))
    assert [policy.needs(layer).scores for layer in (1, 2, 3)] == [False, True, False]
    plain = LengthPolicy(net, LengthSettings())
    assert not any(plain.needs(layer).scores for layer in (1, 2, 3))


def test_constant_drop_of_deep_models_stays_positive() -> None:
    shares = constant_drop(24, 0.75)
    LengthSettings(lengths=shares)
    assert shares[0] == 0.25 and shares[-1] == 1e-6 and kept_counts(torch.tensor([64]), shares[-1]).tolist() == [2]
