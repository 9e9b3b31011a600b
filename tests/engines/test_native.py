"""The C++ engine's answers: torch's decisions on every method, backbone and moment, and no dependence on the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offramp import engines, methods
from offramp.core import cost
from offramp.core.columns import PATIENCE, TEMPERATURES, THRESHOLDS
from offramp.core.engine import Engine
from offramp.core.loop import Result, State, rule_for_arrays, run
from offramp.core.packed import Packed, pack
from offramp.core.policy import PairPolicy, Policy, PolicyWrapper
from offramp.core.rules import ExitRule
from offramp.data.tokenization import Encoded
from offramp.engines import EngineOptions
from offramp.engines.native import import_native, unserved_reason
from offramp.engines.native.engine import NativeEngine
from offramp.engines.native.library import INSTRUCTION_SET
from offramp.errors import OfframpError
from offramp.inference import batching
from offramp.inference.batching import run_encoded, run_packed, run_rows
from offramp.nn.network import Network
from offramp.tasks.multi_label import MultiLabelTask
from tests import factories

SERVED = ("albert", "bert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta")
INSTRUCTION_SETS = import_native().instruction_sets()
PRECISIONS = ["fp32", "int8", *(["bf16"] if "avx512_bf16" in INSTRUCTION_SETS else [])]
RULE_SETTINGS = {  # settings at which rows of random models leave at different layers
    "branchynet": [{"threshold": limit} for limit in (1.0, 1.05, 1.08, 1.095)],
    "deebert": [{"threshold": limit} for limit in (1.0, 1.05, 1.08, 1.095)],
    "fastbert": [{"threshold": limit} for limit in (0.9, 0.96, 0.99, 0.999)],
    "shallow_deep": [{"threshold": limit} for limit in (0.5, 0.55, 0.6)],
    "berxit": [{"threshold": limit} for limit in (0.35, 0.45, 0.55, 0.65)],
    "pabee": [{"patience": 1}, {"patience": 2}],
}
LENGTHS = (9, 3, 17, 5, 1, 33, 2, 60, 16)


@dataclass(frozen=True)
class Stepwise(PolicyWrapper):
    """The inner policy without its rule: the loop runs it step by step."""

    inner: Policy

    def rule(self) -> None:
        return None


MOMENTS: dict[str, Policy] = {
    "full depth": Policy(),
    "exits": factories.ExitAt({0: [1], 1: [0], 2: [2]}),
    "tokens drop before a layer": factories.KeepFirst({2: 4}, "before_layer"),
    "tokens drop between the halves": factories.KeepFirst({2: 4}, "after_attention"),
    "scores": factories.DropLittleAttended(2),
    "idle tokens": factories.SetGates({2: [1.0, 1.0, 0.0], 3: [1.0, 0.3, 0.0, 1.0]}),
    "idle tokens and scores": PairPolicy(factories.SetGates({2: [1.0, 1.0, 0.0]}), factories.DropLittleAttended(2)),
}


@cache
def network_of(method: str, backbone: str = "bert", task: str = "classification", **options: Any) -> Network:
    return factories.network(method, task, backbone, **options)


@cache
def plain_network(backbone: str = "bert", task: str = "classification") -> Network:
    return factories.exit_network(task, backbone)


def native(net: Network, precision: str = "fp32", threads: int = 2) -> NativeEngine:
    engine = engines.make("native", net.encoder, EngineOptions(precision, threads))  # type: ignore[arg-type]  # a str that is one
    assert isinstance(engine, NativeEngine)
    return engine


def answer(engine: Engine, net: Network, policy: Policy, packed: Packed) -> Result:
    with torch.inference_mode():
        return run(engine, engine.compile_heads(net), policy, packed)


def assert_same_decisions(ours: Result, expected: Result) -> None:
    assert torch.equal(ours.exit_layer, expected.exit_layer)
    assert torch.allclose(ours.logits, expected.logits, atol=1e-4)
    for one, other in zip(ours.trace, expected.trace, strict=True):
        assert (one.kind, one.layer) == (other.kind, other.layer)
        assert one.rows.tolist() == other.rows.tolist() and one.tokens.tolist() == other.tokens.tolist()


@pytest.mark.parametrize("backbone", SERVED)
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_moment_decides_like_torch(backbone: str, moment: str) -> None:
    net = plain_network(backbone, "tagging" if "drop" in moment else "classification")
    engine, reference = native(net), engines.make("torch", net.encoder)
    for lengths in (LENGTHS, [5, 5, 5], [7]):
        packed = pack(factories.token_ids(lengths))
        assert_same_decisions(
            answer(engine, net, MOMENTS[moment], packed), answer(reference, net, MOMENTS[moment], packed)
        )


class IdleRows(Policy):
    """Leaves these rows idle before one layer: none of their tokens is a query."""

    def __init__(self, layer: int, rows: list[int]) -> None:
        self.layer, self.rows = layer, torch.tensor(rows)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        idle = torch.isin(s.packed.row_of_token, self.rows) & (layer == self.layer)
        s.packed = s.packed.with_tokens(gate=(~idle).float())
        return None


@pytest.mark.parametrize("idle", [[0], [1], [0, 1], [0, 1, 2]])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_may_be_idle_as_a_whole(precision: str, threads: int, idle: list[int]) -> None:
    """Rows of so many tokens go through a layer one by one, so that a group of rows has no query at all."""
    net, packed = plain_network(), pack(factories.token_ids([400, 300, 500]))
    policy = PairPolicy(IdleRows(2, idle), factories.DropLittleAttended(2))
    ours = answer(native(net, precision, threads), net, policy, packed)
    if precision == "fp32":
        assert_same_decisions(ours, answer(engines.make("torch", net.encoder), net, policy, packed))
    alone = [answer(native(net, precision, 1), net, IdleRows(2, [0] if row in idle else []), pack([ids]))
             for row, ids in enumerate(factories.token_ids([400, 300, 500]))]  # fmt: skip
    together = answer(native(net, precision, threads), net, IdleRows(2, idle), packed)
    assert torch.equal(together.logits, torch.cat([one.logits for one in alone]))


def measured_uncertainties(net: Network, engine: Engine, layer: int, packed: Packed) -> list[float]:
    """Return the uncertainty of each row after a layer, as a run by steps measures it."""
    seen: list[float] = []

    class Watch(Policy):
        def should_exit(self, at: int, s: State) -> Tensor | None:
            if at == layer:
                policy = methods.get("deebert").policy(net, methods.get("deebert").settings(threshold=1.0))
                seen.extend(policy.uncertainty(layer, s).tolist())  # type: ignore[attr-defined]
            return None

    answer(engine, net, Watch(), packed)
    return seen


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_threshold_next_to_a_rows_uncertainty_decides_alike_in_every_mode(kind: str) -> None:
    """Thresholds are compared in single precision, whether all rows have one or each its own, at once or by steps."""
    net, method, packed = network_of("deebert"), methods.get("deebert"), pack(factories.token_ids(LENGTHS))
    engine: Engine = native(net) if kind == "native" else engines.make("torch", net.encoder)
    left = set()
    for value in measured_uncertainties(net, engine, 1, packed):
        single = np.float32(value)
        above, below = np.nextafter(single, np.float32(2.0)), np.nextafter(single, np.float32(0.0))
        for limit in (np.nextafter(value, 2.0), np.nextafter(value, 0.0), float(above), float(below), value):
            policy = method.policy(net, method.settings(thresholds=(0.0, float(limit), 0.0)))
            rows = {name: one.expand(packed.count, -1) for name, one in policy.row_settings().items()}
            exits = [
                answer(engine, net, policy, packed).exit_layer,
                answer(engine, net, Stepwise(policy), packed).exit_layer,
                answer(engine, net, policy.by_row(), packed.with_rows(**rows)).exit_layer,
                answer(engine, net, Stepwise(policy.by_row()), packed.with_rows(**rows)).exit_layer,
            ]
            assert all(torch.equal(one, exits[0]) for one in exits[1:]), limit
            left |= set(exits[0].tolist())
    assert left == {1.0, 3.0}


@pytest.mark.parametrize("method", ["deebert", "fastbert", "shallow_deep"])
def test_steps_measure_what_rules_measure(method: str) -> None:
    """Bit by bit, so that a server may run a row either way: no row changes sides at any uncertainty that occurs."""
    net, chosen, packed = network_of(method), methods.get(method), pack(factories.token_ids(LENGTHS))
    engine = native(net)
    measure = chosen.policy(net, chosen.settings()).rule_measure  # type: ignore[attr-defined]
    with torch.inference_mode():
        heads = engine.compile_heads(net)
        states = packed.with_states(engine.embed(packed))
        logits = heads(0, states)
        for temperatures in (None, torch.linspace(0.5, 2.0, packed.count)):
            values = heads.uncertainty(measure, logits, temperatures)  # type: ignore[attr-defined]
            scaled = logits if temperatures is None else logits / temperatures[:, None]
            policy = chosen.policy(net, chosen.settings())
            assert torch.allclose(values, policy.measure(scaled, packed), atol=1e-6)  # type: ignore[attr-defined]
            settings = {} if temperatures is None else {TEMPERATURES: temperatures[:, None].repeat(1, 3)}
            for factor, leaves in ((1.0, False), (1.0 + 2.0**-23, True)):
                limits = torch.zeros(packed.count, 3)
                limits[:, 0] = values * factor
                rows = packed.with_rows(**{THRESHOLDS: limits, **settings})
                found = answer(engine, net, policy.by_row(), rows).exit_layer
                assert ((found == 0) == leaves).all()


@pytest.mark.parametrize("backbone", SERVED)
@pytest.mark.parametrize("method", RULE_SETTINGS)
def test_rules_run_whole_and_decide_like_torch(method: str, backbone: str) -> None:
    net = network_of(method, backbone)
    engine, reference = native(net), engines.make("torch", net.encoder)
    packed, exits = pack(factories.token_ids(LENGTHS)), set()
    for setting in RULE_SETTINGS[method]:
        policy = methods.get(method).policy(net, methods.get(method).settings(**setting))
        rule = policy.rule()
        assert rule is not None and engine.runs_rule(rule, net)
        expected = answer(reference, net, policy, packed)
        assert_same_decisions(answer(engine, net, policy, packed), expected)
        exits |= set(expected.exit_layer.tolist())
    assert len(exits) > 1


@pytest.mark.parametrize("method", ["berxit", "pabee"])
def test_regression_rules_decide_like_torch(method: str) -> None:
    net = network_of(method, task="regression")
    packed = pack(factories.token_ids(LENGTHS))
    for setting in RULE_SETTINGS[method]:
        policy = methods.get(method).policy(net, methods.get(method).settings(**setting))
        expected = answer(engines.make("torch", net.encoder), net, policy, packed)
        assert_same_decisions(answer(native(net), net, policy, packed), expected)


@pytest.mark.parametrize("training", ["learned", "fitted"])
@pytest.mark.parametrize("pool", ["first", "mean", "meanmax"])
def test_exit_heads_equal_torch(pool: str, training: str) -> None:
    net = factories.network("deebert", pool=pool, bag_of_words_training=training, bag_of_words_depth=1)
    with torch.no_grad():
        for name, values in [*net.added.named_parameters(), *net.added.named_buffers()]:
            if name.rsplit(".", 1)[-1] in ("words", "pairs", "bias"):
                values.normal_()
    engine, packed = native(net), pack(factories.token_ids(LENGTHS))
    with torch.inference_mode():
        packed = packed.with_states(engine.embed(packed))
        heads = engine.compile_heads(net)
        for layer in range(net.depth + 1):
            assert torch.allclose(heads(layer, packed), net(layer, packed), atol=1e-4)
        dropped = packed.keep_tokens((packed.tokens["position"] % 3 != 1) | (packed.tokens["position"] == 0))
        assert torch.allclose(heads(0, dropped), net(0, dropped), atol=1e-4)


def test_thresholds_and_temperatures_of_each_row() -> None:
    net, method = network_of("deebert"), methods.get("deebert")
    policies = [
        method.policy(net, method.settings(thresholds=(1.0, a, b), temperatures=(0.5, 2.0, 1.0)))
        for a, b in [(1.05, 1.0), (0.0, 1.08), (1.09, 1.09)]
    ]
    packed = pack(factories.token_ids(LENGTHS))
    columns = [policies[row % 3].row_settings() for row in range(packed.count)]
    packed = packed.with_rows(
        thresholds=torch.stack([own[THRESHOLDS] for own in columns]),
        temperatures=torch.stack([own[TEMPERATURES] for own in columns]),
    )
    policy = policies[0].by_row()
    ours, expected = (
        answer(native(net), net, policy, packed),
        answer(engines.make("torch", net.encoder), net, policy, packed),
    )
    assert_same_decisions(ours, expected)
    alone = answer(native(net), net, policies[1], pack(factories.token_ids(LENGTHS)))
    assert ours.exit_layer[1::3].tolist() == alone.exit_layer[1::3].tolist()


def test_patience_of_each_row() -> None:
    net, method = network_of("pabee"), methods.get("pabee")
    packed = pack(factories.token_ids(LENGTHS))
    packed = packed.with_rows(**{PATIENCE: torch.arange(packed.count) % 3})
    policy = method.policy(net, method.settings(patience=1)).by_row()
    expected = answer(engines.make("torch", net.encoder), net, policy, packed)
    assert_same_decisions(answer(native(net), net, policy, packed), expected)


def test_a_rule_over_undescribed_heads_runs_segment_by_segment() -> None:
    net = network_of("deebert")

    class Undescribed:
        per_token = False

        def __call__(self, layer: int, packed: Packed) -> Tensor:
            return net(layer, packed)

    engine, policy = native(net), methods.get("deebert").policy(net, methods.get("deebert").settings(threshold=1.05))
    rule, packed = policy.rule(), pack(factories.token_ids(LENGTHS))
    assert rule is not None and not engine.runs_rule(rule, Undescribed())  # type: ignore[arg-type]  # all that is read
    with torch.inference_mode():
        ours = run(engine, Undescribed(), policy, packed)  # type: ignore[arg-type]  # all that is read
    assert_same_decisions(ours, answer(engines.make("torch", net.encoder), net, policy, packed))


def test_an_engine_keeps_the_heads_of_a_few_models_only() -> None:
    engine = native(plain_network())
    models = [factories.exit_network() for _ in range(12)]
    compiled = [engine.compile_heads(net) for net in models]
    assert engine.compile_heads(models[-1]) is compiled[-1]
    assert engine.compile_heads(models[0]) is not compiled[0]
    packed = pack(factories.token_ids(LENGTHS))
    assert torch.equal(*(answer(engine, net, Policy(), packed).logits for net in (models[0], models[0])))


def test_pruned_layers_equal_torch() -> None:
    net = factories.exit_network()
    for layer in net.encoder.layers:
        layer.prune(torch.tensor([True, False, True, True]), torch.arange(48) % 5 != 0)  # type: ignore[attr-defined]
    packed = pack(factories.token_ids(LENGTHS))
    expected = answer(engines.make("torch", net.encoder), net, Policy(), packed)
    assert_same_decisions(answer(native(net), net, Policy(), packed), expected)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_instruction_set_decides_like_torch(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTRUCTION_SET, instruction_set)
    packed = pack(factories.token_ids(LENGTHS))
    for net, policy in (
        (plain_network("electra"), MOMENTS["idle tokens and scores"]),
        (network_of("deebert", "mpnet"), entropy_policy(network_of("deebert", "mpnet"))),
    ):
        engine = native(net)
        assert engine.instruction_set == instruction_set
        assert_same_decisions(
            answer(engine, net, policy, packed), answer(engines.make("torch", net.encoder), net, policy, packed)
        )
        low = answer(native(net, "int8"), net, policy, packed)
        expected = answer(engine, net, policy, packed)
        assert not torch.equal(low.logits, expected.logits)  # another precision indeed
        assert torch.allclose(low.logits, expected.logits, atol=0.1)


def entropy_policy(net: Network) -> Policy:
    method = methods.get("deebert")
    return method.policy(net, method.settings(thresholds=(0.9, 1.06, 1.08)))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_low_precision_is_close_to_full_precision(precision: str) -> None:
    net, packed = plain_network(), pack(factories.token_ids(LENGTHS))
    exact, ours = (answer(native(net, p), net, Policy(), packed).logits for p in ("fp32", precision))
    assert torch.allclose(ours, exact, atol=0.05)


ODD_WIDTHS = {"hidden_size": 44, "intermediate_size": 37, "num_attention_heads": 4}


@cache
def invariance_engines(precision: str, instruction_set: str) -> list[tuple[Network, NativeEngine]]:
    """Models whose widths are whole panels and no multiple of anything, with one thread and with two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INSTRUCTION_SET, instruction_set)
        found = []
        for config in ({"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}, ODD_WIDTHS):
            net = factories.network("deebert", config=config)
            found += [(net, native(net, precision, threads)) for threads in (1, 2)]
        return found


@pytest.mark.parametrize("precision", PRECISIONS)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_a_rows_numbers_do_not_depend_on_its_batch(precision: str, lengths: list[int], order: Any, seed: int) -> None:
    """Bit by bit: alone, in a batch, in a batch of another order, with other threads."""
    ids = factories.token_ids(lengths, seed)
    shuffled = list(range(len(ids)))
    order.shuffle(shuffled)
    instruction_set = order.choice([one for one in INSTRUCTION_SETS if precision != "bf16" or one == "avx512_bf16"])
    by_config = invariance_engines(precision, instruction_set)
    for pair in (by_config[:2], by_config[2:]):
        net = pair[0][0]
        for policy in (Policy(), entropy_policy(net)):
            results = [answer(engine, net, policy, pack(ids)) for _, engine in pair]
            mixed = answer(pair[1][1], net, policy, pack([ids[i] for i in shuffled]))
            assert torch.equal(results[0].logits, results[1].logits)
            assert torch.equal(results[0].logits[shuffled], mixed.logits)
            assert torch.equal(results[0].exit_layer[shuffled], mixed.exit_layer)
            for row, own in enumerate(ids):
                alone = answer(pair[row % 2][1], net, policy, pack([own]))
                assert torch.equal(alone.logits[0], results[0].logits[row])
                assert alone.exit_layer[0] == results[0].exit_layer[row]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_states_scores_and_idle_tokens_do_not_depend_on_the_batch(precision: str) -> None:
    net, ids = plain_network(), factories.token_ids([5, 31, 1, 12])
    engine, collected = native(net, precision), list[list[Tensor]]()
    for batch in (ids, *([row] for row in ids)):
        packed = pack(batch)
        with torch.inference_mode():
            states = engine.embed(packed)
            attended, scores = engine.attend(1, states, states, packed.layout, True)
            fed = engine.feed(1, attended)
        assert scores is not None
        collected.append([states, attended, fed, scores.columns, scores.diagonal])
    for i in range(5):
        assert torch.equal(collected[0][i], torch.cat([alone[i] for alone in collected[1:]]))


@pytest.mark.parametrize("lengths", [[1], [1] * 40, [512, *([3] * 30)], [1 + i % 7 for i in range(1000)]])
def test_unusual_batches_equal_torch(lengths: Sequence[int]) -> None:
    net, packed = plain_network(), pack(factories.token_ids(lengths))
    expected = answer(engines.make("torch", net.encoder), net, Policy(), packed)
    assert_same_decisions(answer(native(net), net, Policy(), packed), expected)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 33, "num_attention_heads": 3, "intermediate_size": 7},
        {"hidden_size": 130, "num_attention_heads": 2, "intermediate_size": 1},
        {"hidden_size": 8, "num_attention_heads": 8, "intermediate_size": 257},
        ODD_WIDTHS,
    ],
)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_widths_that_no_panel_divides_equal_torch(
    config: dict[str, int], instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INSTRUCTION_SET, instruction_set)
    net = factories.network("deebert", config=config)
    packed = pack(factories.token_ids([4, 19, 40]))
    expected = answer(engines.make("torch", net.encoder), net, Policy(), packed)
    assert_same_decisions(answer(native(net), net, Policy(), packed), expected)
    low = answer(native(net, "int8"), net, Policy(), packed)
    assert torch.allclose(low.logits, expected.logits, atol=0.25)


@pytest.mark.parametrize("backbone", ["modernbert", "alberta", "deberta-v2"])
def test_a_model_that_is_not_served_is_refused_with_the_reason(backbone: str) -> None:
    net = plain_network(backbone)
    reason = unserved_reason(net.encoder, EngineOptions())
    assert reason
    with pytest.raises(OfframpError, match="does not serve"):
        engines.make("native", net.encoder)
    assert engines.choose("auto", torch.device("cpu"), net.encoder) == "openvino"


def test_bf16_is_refused_without_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTRUCTION_SET, "avx2" if "avx2" in INSTRUCTION_SETS else "portable")
    with pytest.raises(OfframpError, match="bf16"):
        native(plain_network(), "bf16")


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTRUCTION_SET, "mmx")
    with pytest.raises(OfframpError, match="portable"):
        native(plain_network())


def test_rules_name_the_measures_they_serve() -> None:
    engine = native(plain_network())
    assert not engine.runs_rule(ExitRule("length", (0,), (1.0,)), plain_network())  # type: ignore[arg-type]  # unknown


@pytest.mark.parametrize("method, options", [("deebert", {"threshold": 1.05}), ("pabee", {"patience": 1})])
def test_rows_as_arrays_equal_packed_rows_and_their_counted_costs(method: str, options: dict[str, Any]) -> None:
    net, chosen = network_of(method), methods.get(method)
    policy = chosen.policy(net, chosen.settings(**options))
    engine = engines.make("native", net.encoder, EngineOptions("fp32", 1))
    rows = [Encoded(ids, [0] * len(ids), n, [], [], 0) for n, ids in enumerate(factories.token_ids(list(LENGTHS), 3))]
    assert rule_for_arrays(engine, engine.compile_heads(net), policy) is not None
    for batch in (rows, rows[:1]):
        fast = run_rows(net, engine, policy, batch)
        slow = run_packed(net, engine, policy, pack([row.ids for row in batch]))
        assert all((a == b).all() for a, b in zip(fast.logits, slow.logits, strict=True)) and fast.finite
        stepped = run(engines.make("torch", net.encoder), net, policy, pack([row.ids for row in batch]))
        assert fast.macs.tolist() == pytest.approx(cost.macs(list(stepped.trace), net, len(batch)).tolist())
        for name in ("exit_layer", "macs", "tokens_kept", "tokens_by_layer"):
            assert (getattr(fast, name) == getattr(slow, name)).all(), name


def test_costs_of_many_batches_are_computed_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    net, chosen = network_of("deebert"), methods.get("deebert")
    policy, engine = chosen.policy(net, chosen.settings(threshold=1.05)), native(net)
    rows = [Encoded(ids, [0] * len(ids), n, [], [], 0) for n, ids in enumerate(factories.token_ids(list(LENGTHS), 3))]
    alone = [run_encoded(net, engine, policy, [row]) for row in rows]
    monkeypatch.setattr(batching, "rule_macs", None)  # calling it would fail
    together = run_encoded(net, engine, policy, rows, batch_size=1)
    assert together.finite and together.exit_layer.tolist() == [float(one.exit_layer[0]) for one in alone]
    monkeypatch.undo()
    assert together.macs.tolist() == [float(one.macs[0]) for one in alone]
    assert together.tokens_kept.tolist() == [float(one.tokens_kept[0]) for one in alone]
    fed = together.tokens_by_layer
    assert fed is not None and fed.tolist() == sum(one.tokens_by_layer for one in alone).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["deebert", "fastbert", "shallow_deep", "pabee"])
def test_several_distributions_a_row_are_no_rule(method: str) -> None:
    """A row of a multi-label task has one distribution for each label, which no measure of a rule knows."""
    net, chosen = network_of(method), methods.get(method)
    several = replace(net, task=MultiLabelTask(("a", "b", "c")))
    assert chosen.policy(net, chosen.settings()).rule() is not None
    assert chosen.policy(several, chosen.settings()).rule() is None
