"""Every method × backbone, discovered: a file that lands in methods/ or backbones/ is tested by being there."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offramp import engines, methods, tasks
from offramp.calibration.replay import record_exits
from offramp.calibration.subject import candidate_settings
from offramp.core import cost
from offramp.core.loop import Engine, Result, run
from offramp.core.packed import pack
from offramp.data.tokenization import Encoded
from offramp.engines import How
from offramp.inference.run_folder import build_network
from offramp.methods import Method
from offramp.nn.batches import Data, build_batch, pack_rows
from offramp.nn.network import Network
from offramp.training.forward import ForwardHooks, forward_all_layers
from offramp.training.objectives import JointStage
from offramp.training.stage import Stage
from tests import tiny

LENGTHS = [9, 3, 17, 5, 5, 30]
SOME = ["bert", "modernbert"]  # backbones on which the other tasks are tried too
ROWS = [{"text": "a", "label": i % 3, "tokens": ["a"] * n, "tags": (["O", "B-X", "I-X"] * n)[:n]}
        for i, n in enumerate(LENGTHS)]  # fmt: skip
CASES = [
    (m, b, t)
    for m in methods.names()
    for t, backbones in {"classification": tiny.BACKBONES, "tagging": SOME, "regression": SOME}.items()
    for b in backbones
    if methods.get(m).needs <= tasks.get(t).provides
]
cases = pytest.mark.parametrize(("name", "backbone", "task"), CASES, ids=["-".join(case) for case in CASES])


@cache
def made(name: str, backbone: str, task: str) -> tuple[Method, Network, Data]:
    spec = tasks.get(task).from_rows(ROWS, "rows")
    method = methods.get(name)
    torch.manual_seed(3)
    outputs = {"num_labels": spec.outputs}
    net = build_network(tiny.model(backbone, spec.auto_class, **outputs), spec, method, options_of(method))
    net.eval()
    ids = tiny.rows(LENGTHS)
    encoded = [Encoded(row, [0] * len(row), i, list(range(len(row))), [], 0) for i, row in enumerate(ids)]
    return method, net, Data(ROWS, encoded)


def options_of(method: Method) -> Any:
    """The defaults, and two layers for the method that keeps only the first few."""
    return method.options(k=2) if "k" in {f.name for f in fields(method.options)} else method.options()


def settings_from_tight_to_loose(method: Method, net: Network, data: Data) -> list[Any]:
    """A few settings that really differ in what they do, the loosest last."""
    recording = record_exits(net, data, policy=method.policy(net, method.settings()))
    tried = [methods.configure(method.settings, s, method.name) for s in candidate_settings(net, method, recording)]
    return [*tried[:: max(1, len(tried) // 5)], method.settings()]


def training_path(method: Method, net: Network) -> ForwardHooks:
    """What the method's last stage changes in the pass over the layers."""
    last = method.stages(net, options_of(method))[-1]
    return last.hooks if isinstance(last, JointStage) else ForwardHooks()


def answer(method: Method, net: Network, settings: Any, encoded: list[Encoded]) -> Result:
    with torch.no_grad():
        packed = pack_rows(net.task, encoded)
        return run(engines.make("torch", net.encoder), net, method.policy(net, settings), packed)


def by_row(net: Network, result: Result, lengths: list[int]) -> list[Tensor]:
    return list(result.logits.split(lengths)) if net.per_token else list(result.logits)


def test_every_method_file_is_whole() -> None:
    for name in methods.names():
        method = methods.get(name)
        assert is_dataclass(method.settings) and is_dataclass(method.options) and method.summary.endswith(".")
        assert all(f.default is not None for f in fields(method.settings))


@cases
def test_loosest_setting_is_the_full_model(name: str, backbone: str, task: str) -> None:
    method, net, data = made(name, backbone, task)
    result = answer(method, net, method.settings(), data.encoded)
    packed = pack_rows(net.task, data.encoded)
    last = net.depth if method.hf_equal else int(result.exit_layer[0])
    with torch.no_grad():
        soft = net(last, forward_all_layers(net.encoder, packed, training_path(method, net)).after(last))
    assert torch.allclose(result.logits, soft, atol=1e-5)  # the run-time path is the training path in the limit
    assert result.exit_layer.tolist() == [last] * len(LENGTHS)
    if method.hf_equal:
        theirs = tiny.padded(net.hf, [e.ids for e in data.encoded]).logits
        for row, part in enumerate(by_row(net, result, LENGTHS)):
            assert torch.allclose(part, theirs[row, : LENGTHS[row]] if net.per_token else theirs[row], atol=1e-5)
        spent = cost.macs(result.trace, net, len(LENGTHS))
        assert torch.allclose(spent, cost.full(net, net.depth, torch.tensor(LENGTHS)))


@cases
def test_a_batch_equals_its_rows_one_at_a_time_in_any_order(name: str, backbone: str, task: str) -> None:
    method, net, data = made(name, backbone, task)
    for settings in settings_from_tight_to_loose(method, net, data):
        together = answer(method, net, settings, data.encoded)
        parts = by_row(net, together, LENGTHS)
        spent = cost.macs(together.trace, net, len(LENGTHS))
        order = [4, 0, 5, 2, 1, 3]
        shuffled = answer(method, net, settings, [data.encoded[i] for i in order])
        assert shuffled.exit_layer.tolist() == together.exit_layer[order].tolist()
        for row, item in enumerate(data.encoded):
            alone = answer(method, net, settings, [item])
            assert alone.exit_layer.item() == together.exit_layer[row].item(), settings
            assert torch.allclose(by_row(net, alone, [LENGTHS[row]])[0], parts[row], atol=1e-5)
            assert cost.macs(alone.trace, net, 1).item() == pytest.approx(spent[row].item())


@cases
def test_cost_is_monotone_in_the_knob(name: str, backbone: str, task: str) -> None:
    method, net, data = made(name, backbone, task)
    ladder = settings_from_tight_to_loose(method, net, data)
    results = [answer(method, net, s, data.encoded) for s in ladder]
    fed = [cost.tokens_kept(r.trace, net.depth, len(LENGTHS)).sum().item() for r in results]
    assert fed == sorted(fed)
    if task == "classification" and len(ladder) > 1:  # random models rarely agree on whole sentences of tags
        assert fed[0] < fed[-1]


@cases
def test_gradients_reach_exactly_the_declared_parameters(name: str, backbone: str, task: str, tmp_path: Path) -> None:
    method, net, data = made(name, backbone, task)
    some = build_batch(net.task, data, range(len(LENGTHS)), seed=0)
    for stage in method.stages(net, options_of(method)):
        stage.prepare(data, tmp_path)
        declared = {key for key, _ in stage.trainable()}
        reached = _reached(stage, net, some)
        assert reached <= declared
        unused = {key for key in declared - reached if "pooler" not in key}
        assert not unused, f"{stage.name} declares parameters its loss never reaches"


def _reached(stage: Stage, net: Network, some: Any) -> set[str]:
    for _, parameter in net.named_parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    for _, parameter in stage.trainable():
        parameter.requires_grad_(True)
    stage.set_train_mode()
    stage.begin_epoch(0, 1, 0)
    torch.manual_seed(0)
    for _ in range(6):  # some stages alternate, some leave layers out at random
        stage.step(some, lambda loss: loss.backward())
    net.eval()
    reached = {key for key, p in net.named_parameters() if p.grad is not None}
    for _, parameter in net.named_parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
    return reached


@cache
def engine_for(name: str, backbone: str, task: str, engine: str) -> Engine:
    """One engine a network: what it compiled serves all tests of a case."""
    return engines.make(engine, made(name, backbone, task)[1].encoder, How(threads=1))


# graphs take seconds to compile: every method on one backbone here; every backbone × moment in tests/engines
@pytest.mark.parametrize("engine", [engine for engine in engines.names() if engine != "torch"])
@pytest.mark.parametrize("name", methods.names())
def test_every_engine_decides_like_torch(name: str, engine: str) -> None:
    backbone, task = next((b, t) for m, b, t in CASES if m == name and b == "bert")
    method, net, data = made(name, backbone, task)
    for settings in settings_from_tight_to_loose(method, net, data)[::3]:
        theirs, packed = answer(method, net, settings, data.encoded), pack_rows(net.task, data.encoded)
        with torch.inference_mode():
            runner = engine_for(name, backbone, task, engine)
            ours = run(runner, runner.exits(net), method.policy(net, settings), packed)
        assert torch.equal(ours.exit_layer, theirs.exit_layer)
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)
        assert torch.equal(cost.macs(ours.trace, net, len(LENGTHS)), cost.macs(theirs.trace, net, len(LENGTHS)))


def test_pack_gives_the_same_as_packed_rows() -> None:
    _, net, data = made("full", "bert", "classification")
    plain = pack([e.ids for e in data.encoded])
    assert torch.equal(pack_rows(net.task, data.encoded).tokens["id"], plain.tokens["id"])
