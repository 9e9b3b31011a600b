"""Every length method with every depth method, discovered: tokens leave, rows leave, and no batch changes an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offramp import engines, methods, tasks
from offramp.calibration.replay import record_exits, replay
from offramp.calibration.subject import CalibrationContext, candidate_settings
from offramp.core import cost
from offramp.errors import OfframpError
from offramp.inference.batching import run_encoded
from offramp.methods import Method, PairMethod
from offramp.nn.batches import Data, build_batch
from offramp.nn.network import Network
from tests.conformance.test_methods import LENGTHS, _reached, answer, by_row, made, options_of

WHERE = [("classification", "bert"), ("tagging", "bert"), ("regression", "modernbert")]
CASES = [
    (pair, backbone, task)
    for pair in methods.pairs()
    for task, backbone in WHERE
    if methods.get(pair).needs <= tasks.get(task).provides
]
cases = pytest.mark.parametrize(("name", "backbone", "task"), CASES, ids=["-".join(case) for case in CASES])


def some_settings(method: Method, net: Network, data: Data) -> list[Any]:
    """Tight lengths and exits that really fire under them, then all tokens with the same kind of exits."""
    pair, found = method, []
    assert isinstance(pair, PairMethod)
    for one in (candidate_settings(net, pair.length, record_exits(net, data))[0], {}):
        under = CalibrationContext(net, method, data).exits_at_lengths(one)
        tried = candidate_settings(net, pair.depth, under.record())
        found += [pair.merged_settings.join(one, two) for two in tried[:: -max(1, len(tried) // 4)]]
    return [methods.configure(method.settings, settings, method.name) for settings in found]


@cases
def test_a_batch_never_changes_an_answer(name: str, backbone: str, task: str) -> None:
    method, net, data = made(name, backbone, task)
    exits = set()
    for settings in some_settings(method, net, data):
        together = answer(method, net, settings, data.encoded)
        spent, parts = cost.macs(together.trace, net, len(LENGTHS)), by_row(net, together, LENGTHS)
        exits |= set(together.exit_layer.tolist())
        for row, item in enumerate(data.encoded):
            alone = answer(method, net, settings, [item])
            assert alone.exit_layer.item() == together.exit_layer[row].item(), settings
            assert torch.allclose(by_row(net, alone, [LENGTHS[row]])[0], parts[row], atol=1e-5)
            assert cost.macs(alone.trace, net, 1).item() == pytest.approx(spent[row].item())
    assert task != "classification" or len(exits) > 1, "nobody left early: little was tested"


@cases
def test_exits_replay_under_dropped_tokens(name: str, backbone: str, task: str) -> None:
    """One recording of a length setting tells what exits would do under it, to the last operation."""
    method, net, data = made(name, backbone, task)
    pair = method
    assert isinstance(pair, PairMethod)
    under = CalibrationContext(net, method, data).exits_at_lengths(
        candidate_settings(net, pair.length, record_exits(net, data))[0]
    )
    if not under.method.replays:
        return
    recording = under.record()
    for settings in candidate_settings(net, pair.depth, recording)[::7]:
        policy = pair.depth.policy(net, methods.configure(pair.depth.settings, settings, name))
        promised, real = replay(net, recording, policy), under.run(settings, None)
        assert np.array_equal(promised.exit_layer, real.exit_layer)
        assert np.array_equal(promised.macs, real.macs) and np.array_equal(promised.tokens_kept, real.tokens_kept)
        for a, b in zip(promised.logits, real.logits, strict=True):
            assert np.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", methods.pairs())
def test_gradients_reach_exactly_the_declared_parameters(name: str, tmp_path: Path) -> None:
    task = "tagging" if "words" in methods.get(name).needs else "classification"
    method, net, data = made(name, "bert", task)
    some = build_batch(net.task, data, range(len(LENGTHS)), seed=0)
    for stage in method.stages(net, options_of(method)):
        stage.prepare(data, tmp_path)
        declared = {key for key, _ in stage.trainable()}
        reached = _reached(stage, net, some)
        assert reached <= declared
        assert not {key for key in declared - reached if "pooler" not in key}


def test_the_loosest_setting_of_a_pair_is_the_plain_model() -> None:
    method, net, data = made("length_adaptive+branchynet", "bert", "classification")
    outcome = run_encoded(net, engines.make("torch", net.encoder), method.policy(net, method.settings()), data.encoded)
    full = cost.full(net, net.depth, torch.tensor(LENGTHS))
    assert np.allclose(outcome.macs, full.numpy())


@pytest.mark.parametrize("name", ["length_adaptive", "adapler", "tr_bert"])
def test_a_length_method_at_its_loosest_wants_nothing(name: str) -> None:
    """So that an engine may run its full model at once."""
    method, net, _ = made(name, "bert", "classification")
    assert not method.policy(net, method.settings()).wants_anything(net.depth)


def test_options_that_a_pair_has_no_use_for_are_refused() -> None:
    name = "length_adaptive+branchynet"
    for option in ("mixed", "equilibrium"):
        with pytest.raises(OfframpError, match=rf"(?s){option}=true.*known settings: .*weights"):
            methods.configure(methods.get(name).options, {option: "true"}, name)


@pytest.mark.parametrize(
    "name", ["branchynet+length_adaptive", "full+branchynet", "length_adaptive+full", "length_adaptive+", "a+b+c"]
)
def test_what_is_no_pair_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(OfframpError, match=r"first one of: .*length_adaptive.*then one of: .*branchynet"):
        methods.get(name)
