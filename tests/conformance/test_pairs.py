"""Every length method with every depth method, discovered: tokens are dropped and rows exit in the same pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from offramp import engines, methods
from offramp.core import cost
from offramp.errors import OfframpError
from offramp.inference.batching import run_encoded
from tests.conformance import checks
from tests.conformance.checks import LENGTHS, Case

BACKBONES = {"classification": ["bert"], "tagging": ["bert"], "regression": ["modernbert"]}
CASES = [case for name in methods.pairs() for case in checks.cases_of(name, BACKBONES)]
all_cases = pytest.mark.parametrize("case", CASES, ids=["-".join(case) for case in CASES])


@all_cases
def test_a_batch_never_changes_an_answer(case: Case) -> None:
    checks.check_a_batch_never_changes_an_answer(case)


@all_cases
def test_exits_replay_under_dropped_tokens(case: Case) -> None:
    checks.check_exits_replay_under_dropped_tokens(case)


@pytest.mark.parametrize("name", methods.pairs())
def test_gradients_reach_the_declared_parameters(name: str, tmp_path: Path) -> None:
    task = "tagging" if "words" in methods.get(name).needs else "classification"
    checks.check_gradients_reach_the_declared_parameters(Case(name, "bert", task), tmp_path)


def test_default_settings_of_a_pair_give_the_plain_model() -> None:
    method, net, data = checks.build(Case("length_adaptive+branchynet", "bert", "classification"))
    outcome = run_encoded(net, engines.make("torch", net.encoder), method.policy(net, method.settings()), data.encoded)
    full = cost.full(net, net.depth, torch.tensor(LENGTHS))
    assert np.allclose(outcome.macs, full.numpy())


@pytest.mark.parametrize("name", ["length_adaptive", "adapler", "tr_bert"])
def test_length_method_needs_nothing_at_default_settings(name: str) -> None:
    """An engine may then run the full model at once."""
    method, net, _ = checks.build(Case(name, "bert", "classification"))
    assert not method.policy(net, method.settings()).acts(net.depth)


@pytest.mark.parametrize("option", ["mixed", "equilibrium"])
def test_configure_refuses_options_that_a_pair_cannot_use(option: str) -> None:
    name = "length_adaptive+branchynet"
    with pytest.raises(OfframpError, match=rf"(?s){option}=true.*known settings: .*weights"):
        methods.configure(methods.get(name).options, {option: "true"}, name)


@pytest.mark.parametrize(
    "name", ["branchynet+length_adaptive", "full+branchynet", "length_adaptive+full", "length_adaptive+", "a+b+c"]
)
def test_get_refuses_what_is_no_pair_and_lists_the_parts(name: str) -> None:
    with pytest.raises(OfframpError, match=r"first one of: .*length_adaptive.*then one of: .*branchynet"):
        methods.get(name)
