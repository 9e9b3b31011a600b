"""Oracle depths by hand, and exit distributions that sum to one."""

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
    ("penalty", "depths"),
    [(0.0, [2, 2, 2, 1, 2]), (0.2, [1, 0, 2, 1, 0]), (10.0, [0, 0, 0, 0, 0])],  # 0.0: equals go to the earliest
)
def test_likelihood_oracle_by_hand(penalty: float, depths: list[int]) -> None:
    assert oracles.likelihood_oracle(LOSSES, LENGTHS, penalty).tolist() == depths


def test_correctness_oracle_by_hand() -> None:
    right = torch.tensor([[False, True, False, False], [False, True, True, True], [True, True, True, False]])
    lengths = torch.tensor([3, 1])
    assert oracles.correctness_oracle(right, lengths, penalty=0.1).tolist() == [2, 0, 1, 1]
    assert oracles.correctness_oracle(right, lengths, penalty=0.6).tolist() == [0, 0, 1, 1]
    near = math.exp(-1 / 4)  # the first token now sees that its neighbour is right at once and the next at exit 1
    assert near + math.exp(-4 / 4) - 0.1 < 1 + near + math.exp(-4 / 4) - 0.2  # its own turn at exit 2 still wins
    assert oracles.correctness_oracle(right, lengths, penalty=0.1, sigma=4.0).tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize("sigma", [0.0, 0.5, 3.0, 1000.0])
def test_smoothing_equals_the_formula_and_never_looks_into_another_row(sigma: float) -> None:
    torch.manual_seed(0)
    lengths, values = torch.tensor([4, 1, 7]), torch.randn(3, 12)
    owner = torch.tensor([0] * 4 + [1] + [2] * 7)
    wanted = torch.zeros_like(values)
    for t in range(12):
        for u in range(12):
            same = t == u if sigma == 0.0 else owner[t] == owner[u]
            if same:
                wanted[:, t] += math.exp(-((t - u) ** 2) / sigma) * values[:, u] if sigma else values[:, u]
    assert torch.allclose(oracles.smooth_over_neighbours(values, lengths, sigma), wanted, atol=1e-4)


def test_row_oracle_sums_over_the_row() -> None:
    assert oracles.row_sums(-LOSSES, LENGTHS)[0].tolist() == pytest.approx([-3.5, -3.2])
    assert oracles.row_oracle(-LOSSES, LENGTHS, 0.0).tolist() == [2, 2]  # 1.4 and 0.2
    assert oracles.row_oracle(-LOSSES, LENGTHS, 0.6).tolist() == [1, 1]


def test_geometric_form_is_a_distribution_and_its_loss_is_that_of_the_product() -> None:
    stops = torch.tensor([[0.0, 2.0], [-50.0, -50.0], [60.0, 0.0]])
    q = oracles.broken_stick(stops).exp()
    assert torch.allclose(q.sum(1), torch.ones(3))
    chi = stops.sigmoid()
    assert q[0].tolist() == pytest.approx([0.5, 0.5 * float(chi[0, 1]), 0.5 * float(1 - chi[0, 1])])
    assert oracles.geometric_loss(stops[:1], torch.tensor([1])).item() == pytest.approx(-math.log(0.5 * chi[0, 1]))
    assert oracles.geometric_loss(stops[1:2], torch.tensor([2])).item() == pytest.approx(0.0)
    assert oracles.first_stop(stops).tolist() == [1, 2, 0]
    assert oracles.first_stop(stops, torch.tensor([0.4, 0.9])).tolist() == [0, 2, 0]


def test_heads_speak_at_every_exit_but_the_last_of_the_geometric_form() -> None:
    states = torch.randn(5, 8)
    assert oracles.MultinomialExitUnit(8, 4)(states).shape == (5, 4)
    one, each = oracles.GeometricExitUnit(8, 4), oracles.GeometricExitUnit(8, 4, shared=False)
    assert torch.equal(one(0, states), one(2, states))
    assert not torch.equal(each(0, states), each(2, states))
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    assert oracles.multinomial_loss(logits, torch.tensor([3])).item() == pytest.approx(math.log(4))
