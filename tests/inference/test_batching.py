"""Batches of similar length, results in input order, and what windows of one row add up to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp import engines
from offramp.core.policy import Policy
from offramp.data.tokenization import Encoded
from offramp.inference.batching import full_macs, per_input_row, run_encoded
from offramp.nn.batches import LARGEST_FACTOR, SMALLEST_SHARE, TYPICAL_LENGTH, batches_by_length
from offramp.nn.outputs import RunOutput
from tests import factories


@given(st.lists(st.integers(1, 600), max_size=60), st.integers(1, 16))
def test_batches_by_length_bound_tokens_and_rows(lengths: list[int], batch_size: int) -> None:
    batches = list(batches_by_length(lengths, batch_size))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    flat = [lengths[i] for batch in batches for i in batch]
    assert flat == sorted(flat), "shortest first"
    for batch in batches:
        assert len(batch) <= (batch_size * LARGEST_FACTOR if batch_size > 1 else 1)
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= batch_size * TYPICAL_LENGTH


@given(st.lists(st.integers(1, 600), max_size=60), st.integers(1, 16), st.sampled_from([0.01, 0.5, 1.0]))
def test_batches_are_filled_by_predicted_work(lengths: list[int], batch_size: int, share: float) -> None:
    batches = list(batches_by_length(lengths, batch_size, lambda length: share))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert len(batches) <= len(list(batches_by_length(lengths, batch_size)))
    for batch in batches:
        work = sum(lengths[i] for i in batch) * max(SMALLEST_SHARE, share)
        assert len(batch) == 1 or work <= batch_size * TYPICAL_LENGTH * (1 + 1e-9)


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_run_encoded_returns_results_in_input_order(task: str) -> None:
    network, rows = factories.exit_network(task), factories.data([9, 3, 17, 5, 30])
    engine, policy = engines.make("torch", network.encoder), factories.ExitAt({1: [0]})
    together = run_encoded(network, engine, policy, rows.encoded, batch_size=1)
    for number, row in enumerate(rows.encoded):
        alone = run_encoded(network, engine, policy, [row])
        assert np.allclose(together.logits[number], alone.logits[0], atol=1e-5)
        assert together.macs[number] == alone.macs[0] and together.exit_layer[number] == alone.exit_layer[0] == 1


def test_per_input_row_averages_layers_and_adds_costs_of_windows() -> None:
    encoded = [Encoded([1], [0], example, [0], [], 0) for example in (0, 1, 1)]
    output = RunOutput([], np.array([3.0, 1.0, 2.0]), np.array([10.0, 20.0, 30.0]), np.array([4.0, 5.0, 6.0]))
    layers, kept, macs = per_input_row(output, encoded, 2)
    assert (layers.tolist(), kept.tolist(), macs.tolist()) == ([3.0, 1.5], [4.0, 11.0], [10.0, 50.0])


def test_full_macs_equal_a_run_without_a_policy() -> None:
    network, rows = factories.network("full"), factories.data()
    output = run_encoded(network, engines.make("torch", network.encoder), Policy(), rows.encoded)
    assert full_macs(network, rows.encoded) == pytest.approx(output.macs)
