"""NaN in the C++ engine: a damaged model gives NaN where torch does, on every instruction set, and is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import offramp
from offramp import engines, methods
from offramp.core.packed import pack
from offramp.core.policy import Policy
from offramp.engines.native import import_native
from offramp.engines.native.library import INSTRUCTION_SET
from offramp.errors import OfframpError
from offramp.nn.network import Network
from tests import factories
from tests.engines.test_native import (
    INSTRUCTION_SETS,
    LENGTHS,
    PRECISIONS,
    answer,
    native,
)

NAN = float("nan")
KERNELS = [
    pytest.param(one, precision, id=f"{one}-{precision}")
    for one in INSTRUCTION_SETS
    for precision in PRECISIONS
    if precision != "bf16" or one == "avx512_bf16"
]


def _parts(net: Network) -> Any:
    return net.encoder.layers[1].parts  # type: ignore[attr-defined]


PLACES: dict[str, Callable[[Network], Tensor]] = {
    "a word": lambda net: net.encoder.tables.words.weight[7],  # type: ignore[union-attr]
    "a query weight": lambda net: _parts(net).query.weight[3],
    "a value bias": lambda net: _parts(net).value.bias[5:6],
    "a weight before the activation": lambda net: _parts(net).up.weight[2, 4:5],
    "a bias before the activation": lambda net: _parts(net).up.bias[11:12],
    "a weight after the activation": lambda net: _parts(net).down.weight[0, 1:2],
    "a norm": lambda net: _parts(net).feed_norm.weight[2:3],
    "the last head": lambda net: net.hf.classifier.bias[1:2],
}


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("instruction_set", "precision"), KERNELS)
def test_nan_in_a_parameter_gives_nan_where_torch_does(
    instruction_set: str, precision: str, place: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INSTRUCTION_SET, instruction_set)
    net = factories.exit_network(hidden_act=activation)
    with torch.no_grad():
        PLACES[place](net).fill_(NAN)
    ids = factories.token_ids(LENGTHS)
    ids[0][1], ids[7][-1] = 7, 7  # the damaged word
    expected = answer(engines.make("torch", net.encoder), net, Policy(), pack(ids)).logits
    assert expected.isnan().any()
    assert torch.equal(answer(native(net, precision), net, Policy(), pack(ids)).logits.isnan(), expected.isnan())


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_an_int8_weight_that_is_not_finite_makes_its_answers_nan(
    instruction_set: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INSTRUCTION_SET, instruction_set)
    weight = np.ones((40, 33), np.float32)
    weight[[3, 39], [0, 32]] = value
    head = import_native().Head()
    head.add_linear(True, weight, None, "", "int8")
    head.set_pools(["first"])
    net = factories.exit_network(hidden_size=33, num_attention_heads=3)
    found = _head_logits(net, head, np.ones((1, 33), np.float32), 40)[0]
    assert np.flatnonzero(np.isnan(found)).tolist() == [3, 39]


def _head_logits(net: Network, head: Any, states: np.ndarray, outputs: int) -> np.ndarray:
    logits = np.empty((1, outputs), np.float32)
    native(net).native.run_layers(
        first=1, last=0, lengths=np.array([len(states)]), states=states, head=head, logits=logits
    )
    return logits


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_activations_of_nan_are_nan(instruction_set: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place of a vector, and in the rest behind the last whole one."""
    monkeypatch.setenv(INSTRUCTION_SET, instruction_set)
    head = import_native().Head()
    head.add_activation(False, activation)
    head.set_pools(["first"])
    net = factories.exit_network(hidden_size=45, num_attention_heads=3)
    for place in range(45):
        states = torch.linspace(-6.0, 6.0, 45)[None]
        states[0, place] = NAN
        found = _head_logits(net, head, states.numpy(), 45)
        assert np.allclose(found, ACTIVATIONS[activation](states).numpy(), atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("pool", ["mean", "max"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_pooling_nan_gives_nan(instruction_set: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTRUCTION_SET, instruction_set)
    head = import_native().Head()
    head.add_linear(False, np.eye(45, dtype=np.float32)[[0, 15, 16, 44]] * 0.0, None)
    head.set_pools([pool])
    kept = import_native().Head()
    kept.add_activation(False, "relu")
    kept.set_pools([pool])
    net = factories.exit_network(hidden_size=45, num_attention_heads=3)
    for token in range(3):
        for place in range(45):
            states = np.random.default_rng(0).normal(size=(3, 45)).astype(np.float32)
            states[token, place] = NAN
            assert np.isnan(_head_logits(net, head, states, 4)).all()  # 0 times NaN
            assert np.flatnonzero(np.isnan(_head_logits(net, kept, states, 45))).tolist() == [place]


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("deebert", {"threshold": 1.09}),
        ("fastbert", {"threshold": 0.99}),
        ("shallow_deep", {"threshold": 0.6}),
        ("pabee", {"patience": 1}),
    ],
)
def test_rows_do_not_exit_where_an_exit_is_nan(method: str, setting: dict[str, Any]) -> None:
    """Decided like torch: NaN is below no threshold."""
    net, chosen = factories.network(method), methods.get(method)
    last = [module for module in net.exit_heads[1].modules() if isinstance(module, torch.nn.Linear)][-1]
    with torch.no_grad():
        last.bias[2] = NAN
    policy, packed = chosen.policy(net, chosen.settings(**setting)), pack(factories.token_ids(LENGTHS))
    expected = answer(engines.make("torch", net.encoder), net, policy, packed)
    ours = answer(native(net), net, policy, packed)
    assert torch.equal(ours.exit_layer, expected.exit_layer)
    assert torch.equal(ours.logits.isnan(), expected.logits.isnan())


def test_rows_beside_a_damaged_one_keep_their_numbers() -> None:
    net, ids = factories.exit_network(), factories.token_ids(LENGTHS)
    with torch.no_grad():
        PLACES["a word"](net).fill_(NAN)
    clean = [[token if token != 7 else 8 for token in row] for row in ids]
    damaged = [[7, *clean[0][1:]], *clean[1:]]
    for precision in PRECISIONS:
        engine = native(net, precision)
        one, other = (answer(engine, net, Policy(), pack(rows)).logits for rows in (clean, damaged))
        assert not one.isnan().any() and other[0].isnan().all() and torch.equal(one[1:], other[1:])


@pytest.mark.parametrize(("instruction_set", "precision"), KERNELS)
def test_a_predictor_refuses_a_damaged_model(
    trained: Path, tmp_path: Path, instruction_set: str, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INSTRUCTION_SET, instruction_set)
    own = Path(shutil.copytree(trained, tmp_path / "own"))
    (own / "points.json").unlink()  # it belongs to the weights
    (file,) = own.rglob("model.safetensors")
    weights = load_file(file)
    (name,) = [name for name in weights if name.endswith("layer.1.intermediate.dense.weight")]
    weights[name][3, 2] = NAN
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(OfframpError, match="NaN"):
        offramp.load(own, engine="native", precision=precision).predict(["a good film"])
