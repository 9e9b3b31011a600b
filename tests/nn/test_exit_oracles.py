"""Oracle exits computed by hand, and exit distributions that sum to one."""

from __future__ import annotations

import math

import pytest
import torch

from offramp.nn import exit_oracles as oracles

LOSSES = torch.tensor(  # [exits, tokens]: rows of 3 and 2 tokens
    [
        [2.0, 0.5, 1.0, 3.0, 0.2],
        [1.0, 0.5, 0.4, 0.1, 0.3],
        [0.9, 0.4, 0.1, 0.1, 0.1],
    ]
)
LENGTHS = torch.tensor([3, 2])


@pytest.mark.parametrize(
    ("penalty", "exits"),
    [(0.0, [2, 2, 2, 1, 2]), (0.2, [1, 0, 2, 1, 0]), (10.0, [0, 0, 0, 0, 0])],  # 0.0: of equals the earliest
)
def test_likelihood_oracle_equals_the_computation_by_hand(penalty: float, exits: list[int]) -> None:
    assert oracles.likelihood_oracle(LOSSES, LENGTHS, penalty).tolist() == exits


def test_correctness_oracle_equals_the_computation_by_hand() -> None:
    right = torch.tensor([[False, True, False, False], [False, True, True, True], [True, True, True, False]])
    lengths = torch.tensor([3, 1])
    assert oracles.correctness_oracle(right, lengths, penalty=0.1).tolist() == [2, 0, 1, 1]
    assert oracles.correctness_oracle(right, lengths, penalty=0.6).tolist() == [0, 0, 1, 1]
    # smoothed, the first token counts that its neighbours are right from exits 0 and 1 on
    kappa = math.exp(-1 / 4)
    assert kappa + math.exp(-4 / 4) - 0.1 < 1 + kappa + math.exp(-4 / 4) - 0.2  # but exit 2, where it is right, wins
    assert oracles.correctness_oracle(right, lengths, penalty=0.1, sigma=4.0).tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize("sigma", [0.0, 4.0])
def test_what_no_exit_gets_right_is_labelled_with_the_last_exit(sigma: float) -> None:
    right = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 1]], dtype=torch.bool)
    found = oracles.correctness_oracle(right, torch.tensor([3]), 0.1, sigma)
    assert found.tolist() == [2, 0, 0]
    as_published = oracles.correctness_oracle(right, torch.tensor([3]), 0.1, sigma, "first")
    assert as_published.tolist() == [0, 0, 0]


@pytest.mark.parametrize("sigma", [0.0, 0.5, 3.0, 1000.0])
def test_smooth_over_neighbours_equals_the_formula_within_rows(sigma: float) -> None:
    torch.manual_seed(0)
    lengths, values = torch.tensor([4, 1, 7]), torch.randn(3, 12)
    row_of_token = torch.tensor([0] * 4 + [1] + [2] * 7)
    expected = torch.zeros_like(values)
    for t in range(12):
        for u in range(12):
            same = t == u if sigma == 0.0 else row_of_token[t] == row_of_token[u]
            if same:
                expected[:, t] += math.exp(-((t - u) ** 2) / sigma) * values[:, u] if sigma else values[:, u]
    assert torch.allclose(oracles.smooth_over_neighbours(values, lengths, sigma), expected, atol=1e-4)


def test_row_oracle_sums_over_the_tokens_of_a_row() -> None:
    assert oracles.row_sums(-LOSSES, LENGTHS)[0].tolist() == pytest.approx([-3.5, -3.2])
    assert oracles.row_oracle(-LOSSES, LENGTHS, 0.0).tolist() == [2, 2]  # 1.4 and 0.2
    assert oracles.row_oracle(-LOSSES, LENGTHS, 0.6).tolist() == [1, 1]


def test_broken_stick_is_a_distribution_and_geometric_loss_its_cross_entropy() -> None:
    stops = torch.tensor([[0.0, 2.0], [-50.0, -50.0], [60.0, 0.0]])
    q = oracles.broken_stick(stops).exp()
    assert torch.allclose(q.sum(1), torch.ones(3))
    chi = stops.sigmoid()
    assert q[0].tolist() == pytest.approx([0.5, 0.5 * float(chi[0, 1]), 0.5 * float(1 - chi[0, 1])])
    assert oracles.geometric_loss(stops[:1], torch.tensor([1])).item() == pytest.approx(-math.log(0.5 * chi[0, 1]))
    assert oracles.geometric_loss(stops[1:2], torch.tensor([2])).item() == pytest.approx(0.0)


def test_exit_units_return_logits_over_exits_or_of_stopping() -> None:
    states = torch.randn(5, 8)
    assert oracles.MultinomialExitUnit(8, 4)(states).shape == (5, 4)
    shared, separate = oracles.GeometricExitUnit(8, 4), oracles.GeometricExitUnit(8, 4, shared=False)
    assert torch.equal(shared(0, states), shared(2, states))
    assert not torch.equal(separate(0, states), separate(2, states))
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    assert oracles.multinomial_loss(logits, torch.tensor([3])).item() == pytest.approx(math.log(4))
