"""What must be true of every method, as functions of a case (a method on a backbone and a task).

The tests beside this file run the checks on all methods that `methods.names()` lists; any other method file can be
checked in the same way (`test_worked_example.py` does so).
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from offramp import engines, methods, tasks
from offramp.calibration.calibrate import CalibrationContext, candidate_settings
from offramp.calibration.replay import record_exits, replay
from offramp.core import cost
from offramp.core.loop import Engine, Result, run
from offramp.data.tokenization import Encoded
from offramp.engines import EngineOptions
from offramp.methods import Method, PairMethod
from offramp.nn.batches import Data, pack_rows
from offramp.nn.network import Network
from offramp.training.forward import ForwardHooks, forward_all_layers
from offramp.training.objectives import JointStage
from offramp.training.stage import Stage
from tests import factories

LENGTHS = [9, 3, 17, 5, 5, 30]
TWO_BACKBONES = ["bert", "modernbert"]  # post-norm and pre-norm; tasks other than classification are tried on these
BACKBONES_OF_TASKS = {
    "classification": factories.BACKBONES,
    "tagging": TWO_BACKBONES,
    "regression": TWO_BACKBONES,
    "multi_label": TWO_BACKBONES,
}


class Case(NamedTuple):
    """A method on a backbone and a task."""

    method: str
    backbone: str
    task: str


class Built(NamedTuple):
    """A case with a tiny random network and rows."""

    method: Method
    network: Network
    data: Data


def cases_of(name: str, backbones: dict[str, list[str]] | None = None) -> list[Case]:
    """Return the cases of a method on all tasks that it serves; `backbones` lists those to try for each task."""
    found = (Case(name, b, t) for t, listed in (backbones or BACKBONES_OF_TASKS).items() for b in listed)
    return [case for case in found if methods.get(name).serves(tasks.get(case.task))]


@cache
def build(case: Case) -> Built:
    """Return the method of a case with a network and six rows."""
    method = methods.get(case.method)
    options = {"k": 2} if "k" in {f.name for f in fields(method.options)} else {}  # tiny models have few layers
    network = factories.network(case.method, case.task, case.backbone, lengths=LENGTHS, seed=None, **options)
    return Built(method, network, factories.data(LENGTHS))


def options_of(method: Method) -> Any:
    """Return the options that `build` uses."""
    return method.options(k=2) if "k" in {f.name for f in fields(method.options)} else method.options()


def run_rows(built: Built, settings: Any, encoded: list[Encoded]) -> Result:
    """Return what the loop computes for rows at some settings."""
    policy = built.method.policy(built.network, settings)
    return factories.run_policy(built.network, policy, pack_rows(built.network.task, encoded))


def logits_of_rows(network: Network, result: Result, lengths: list[int]) -> list[Tensor]:
    """Return the logits of each row, [outputs] or [tokens, outputs]."""
    return list(result.logits.split(lengths)) if network.per_token else list(result.logits)


def settings_from_fast_to_full(built: Built) -> list[Any]:
    """Return a few settings with different outcomes, the default (the full model) last."""
    if isinstance(built.method, PairMethod):
        return _pair_settings(built, built.method)
    method, network, data = built
    recording = record_exits(network, data, policy=method.policy(network, method.settings()))
    values = candidate_settings(network, method, recording)
    found = [methods.configure(method.settings, value, method.name) for value in values]
    return [*found[:: max(1, len(found) // 5)], method.settings()]


def _pair_settings(built: Built, pair: PairMethod) -> list[Any]:
    """Return the shortest lengths with thresholds at which rows exit under them, then the same with all tokens."""
    found: list[dict[str, Any]] = []
    shortest = candidate_settings(built.network, pair.length, record_exits(built.network, built.data))[0]
    for lengths in (shortest, {}):
        context = CalibrationContext(built.network, pair, built.data).exits_at_lengths(lengths)
        exits = candidate_settings(built.network, pair.depth, context.record())
        found += [pair.merged_settings.join(lengths, values) for values in exits[:: -max(1, len(exits) // 4)]]
    return [methods.configure(pair.settings, values, pair.name) for values in found]


def check_declaration(name: str) -> None:
    """Check what a method declares: dataclasses with defaults, a summary of one sentence, what tasks provide."""
    method = methods.get(name)
    assert method.name == name
    assert is_dataclass(method.settings) and is_dataclass(method.options)
    method.settings(), method.options()  # all fields have defaults
    assert method.summary.endswith(".")
    assert any(method.serves(tasks.get(task)) for task in tasks.names())


def check_default_settings_give_the_full_model(case: Case) -> None:
    """Check that nothing exits or is dropped at the default settings, and that Hugging Face gives the same logits."""
    built = build(case)
    method, network, data = built
    result = run_rows(built, method.settings(), data.encoded)
    packed = pack_rows(network.task, data.encoded)
    last = network.depth if method.hf_equal else int(result.exit_layer[0])
    with torch.no_grad():
        trained = network(
            last, forward_all_layers(network.encoder, packed, _training_pass(method, network)).after(last)
        )
    assert torch.allclose(result.logits, trained, atol=1e-5)  # the pass of run time is that of training
    assert result.exit_layer.tolist() == [last] * len(LENGTHS)
    if method.hf_equal:
        expected = factories.hf_padded(network.hf, [e.ids for e in data.encoded]).logits
        for row, logits in enumerate(logits_of_rows(network, result, LENGTHS)):
            own = expected[row, : LENGTHS[row]] if network.per_token else expected[row]
            assert torch.allclose(logits, own, atol=1e-5)
        spent = cost.macs(result.trace, network, len(LENGTHS))
        assert torch.allclose(spent, cost.full(network, network.depth, torch.tensor(LENGTHS)))


def _training_pass(method: Method, network: Network) -> ForwardHooks:
    """Return what the method's last stage changes in the pass over the layers, where it cuts no rows at random."""
    options = options_of(method)
    if "cut" in {f.name for f in fields(options)}:
        options = replace(options, cut=False, explore=0.0, head="own")
    last = method.stages(network, options)[-1]
    return last.hooks if isinstance(last, JointStage) else ForwardHooks()


def check_a_batch_never_changes_an_answer(case: Case) -> None:
    """Check that logits, exits and MACs of a row are the same in a batch, in another order and alone."""
    built, exits = build(case), set()
    order = [4, 0, 5, 2, 1, 3]
    for settings in settings_from_fast_to_full(built):
        together = run_rows(built, settings, built.data.encoded)
        logits = logits_of_rows(built.network, together, LENGTHS)
        spent = cost.macs(together.trace, built.network, len(LENGTHS))
        shuffled = run_rows(built, settings, [built.data.encoded[i] for i in order])
        assert shuffled.exit_layer.tolist() == together.exit_layer[order].tolist()
        exits |= set(together.exit_layer.tolist())
        for row, encoded in enumerate(built.data.encoded):
            alone = run_rows(built, settings, [encoded])
            assert alone.exit_layer.item() == together.exit_layer[row].item(), settings
            assert torch.allclose(logits_of_rows(built.network, alone, [LENGTHS[row]])[0], logits[row], atol=1e-5)
            assert cost.macs(alone.trace, built.network, 1).item() == pytest.approx(spent[row].item())
    if isinstance(built.method, PairMethod) and case.task == "classification":
        assert len(exits) > 1, "no row exited early, so that little was checked"


def check_cost_rises_with_settings(case: Case) -> None:
    """Check that settings from fast to full feed ever more tokens, in sum over rows and layers."""
    built = build(case)
    ladder = settings_from_fast_to_full(built)
    results = [run_rows(built, settings, built.data.encoded) for settings in ladder]
    depth = built.network.depth
    fed = [cost.tokens_kept(result.trace, depth, len(LENGTHS)).sum().item() for result in results]
    assert fed == sorted(fed)
    if case.task == "classification" and len(ladder) > 1:  # random models rarely agree on whole sentences of tags
        assert fed[0] < fed[-1]


def check_gradients_reach_the_declared_parameters(case: Case, folder: Path) -> None:
    """Check that the loss of each stage reaches exactly the parameters that the stage declares as trainable."""
    method, network, data = build(case)
    network.prepare(data, folder)
    for stage in method.stages(network, options_of(method)):
        stage.prepare(data, folder)
        declared = {name for name, _ in stage.trainable()}
        reached = _parameters_with_gradients(stage, network, factories.batch(network, data, seed=0))
        assert reached <= declared
        unused = {name for name in declared - reached if "pooler" not in name}
        assert not unused, f"{stage.name} declares parameters that its loss never reaches"


def _parameters_with_gradients(stage: Stage, network: Network, batch: Any) -> set[str]:
    for _, parameter in network.named_parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    for _, parameter in stage.trainable():
        parameter.requires_grad_(True)
    stage.set_train_mode()
    stage.begin_epoch(0, 1, 0)
    torch.manual_seed(0)
    for _ in range(6):  # some stages alternate, some skip layers at random
        stage.step(batch, lambda loss: loss.backward())
    network.eval()
    reached = {name for name, parameter in network.named_parameters() if parameter.grad is not None}
    for _, parameter in network.named_parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
    return reached


@cache
def _engine(case: Case, engine: str) -> Engine:
    """Return one engine per network, because compiling takes seconds."""
    return engines.make(engine, build(case).network.encoder, EngineOptions(threads=1))


def check_engine_decides_like_torch(case: Case, engine: str) -> None:
    """Check that another engine gives the exits, logits and MACs of the reference engine."""
    built = build(case)
    network, runner = built.network, _engine(case, engine)
    for settings in settings_from_fast_to_full(built)[::3]:
        expected, packed = run_rows(built, settings, built.data.encoded), pack_rows(network.task, built.data.encoded)
        with torch.inference_mode():
            result = run(runner, runner.compile_heads(network), built.method.policy(network, settings), packed)
        assert torch.equal(result.exit_layer, expected.exit_layer)
        assert torch.allclose(result.logits, expected.logits, atol=1e-4)
        spent = cost.macs(result.trace, network, len(LENGTHS))
        assert torch.equal(spent, cost.macs(expected.trace, network, len(LENGTHS)))


def check_exits_replay_under_dropped_tokens(case: Case) -> None:
    """Check that one recording at a length setting of a pair gives the outcome of every exit setting under it."""
    pair, network, data = build(case)
    assert isinstance(pair, PairMethod)
    shortest = candidate_settings(network, pair.length, record_exits(network, data))[0]
    context = CalibrationContext(network, pair, data).exits_at_lengths(shortest)
    if not context.method.replays:
        return
    recording = context.record()
    for settings in candidate_settings(network, pair.depth, recording)[::7]:
        policy = pair.depth.policy(network, methods.configure(pair.depth.settings, settings, pair.name))
        replayed, real = replay(network, recording, policy), context.run(settings, None)
        assert np.array_equal(replayed.exit_layer, real.exit_layer)
        assert np.array_equal(replayed.macs, real.macs) and np.array_equal(replayed.tokens_kept, real.tokens_kept)
        for a, b in zip(replayed.logits, real.logits, strict=True):
            assert np.allclose(a, b, atol=1e-5)
