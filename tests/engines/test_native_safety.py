"""The C++ engine under wrong shapes, many threads and forks: clear errors, the same answers, never a crash."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offramp import engines
from offramp.core.packed import Packed, pack
from offramp.core.policy import Policy
from offramp.engines.native import engine, import_native, library
from offramp.errors import OfframpError
from tests import factories
from tests.engines.test_native import LENGTHS, answer, entropy_policy, native, network_of, plain_network

IDS = np.array([5, 6, 7], dtype=np.int64)
LENGTH = np.array([3], dtype=np.int64)


def layers(**changed: Any) -> dict[str, Any]:
    """Return arguments of `run_layers` that are right apart from the given ones."""
    positions = np.arange(3, dtype=np.int64)
    right = {"first": 0, "last": 1, "lengths": LENGTH, "ids": IDS, "types": IDS * 0, "positions": positions}
    return {**right, "output": np.empty((3, 32), np.float32), **changed}


WRONG_LAYERS: dict[str, dict[str, Any]] = {
    "an id outside the vocabulary": {"ids": np.array([5, 97, 7])},
    "a negative id": {"ids": np.array([5, -1, 7])},
    "a position outside its table": {"positions": np.array([0, 1, 600])},
    "a type outside its table": {"types": np.array([0, 1, 2])},
    "lengths that do not add up": {"lengths": np.array([2])},
    "a length of zero": {"lengths": np.array([3, 0])},
    "a negative length": {"lengths": np.array([4, -1])},
    "a layer that does not exist": {"last": 4},
    "layers backwards": {"first": 3, "last": 1, "states": np.zeros((3, 32), np.float32)},
    "a narrow output": {"output": np.empty((3, 31), np.float32)},
    "an output without rows": {"output": np.empty((0, 32), np.float32)},
    "no ids": {"ids": None},
    "no positions": {"positions": None},
    "no types": {"types": None},
    "states beside ids": {"states": np.zeros((3, 32), np.float32)},
    "a head without logits": {"head": import_native().Head()},
    "logits without a head": {"logits": np.empty((1, 3), np.float32)},
    "a head without steps": {"head": import_native().Head(), "logits": np.empty((1, 3), np.float32)},
}


@pytest.mark.parametrize("case", WRONG_LAYERS)
def test_wrong_arguments_of_layers_are_refused(case: str) -> None:
    engine = native(plain_network())
    engine.native.run_layers(**layers())
    with pytest.raises(ValueError):
        engine.native.run_layers(**layers(**WRONG_LAYERS[case]))


def test_a_head_in_bf16_is_refused_without_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    head = import_native().Head()
    head.add_linear(True, np.ones((32, 32), np.float32), None, "", "bf16")
    head.set_pools(["first"])
    given = layers(head=head, logits=np.empty((1, 32), np.float32))
    if "avx512_bf16" in import_native().instruction_sets():
        native(plain_network()).native.run_layers(**given)  # the head is now known to fit the model
    monkeypatch.setenv("OFFRAMP_NATIVE_ISA", "portable")
    with pytest.raises(ValueError, match="bf16"):
        native(plain_network()).native.run_layers(**given)


READ_ONLY = np.zeros((3, 32), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize("changed", [{"ids": [5, 6, 7]}, {"output": np.empty((3, 32))}, {"output": READ_ONLY}])
def test_wrong_types_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        native(plain_network()).native.run_layers(**layers(**changed))


def test_wrong_states_of_halves_are_refused() -> None:
    engine, states = native(plain_network()).native, np.zeros((3, 32), np.float32)
    with pytest.raises(ValueError, match="shape"):
        engine.feed(1, np.zeros((3, 31), np.float32), states)
    with pytest.raises(ValueError, match="layer 9"):
        engine.feed(9, states, states)
    few, many, out = np.array([2]), np.array([3]), np.empty((2, 32), np.float32)
    with pytest.raises(ValueError, match="queries"):
        engine.attend(1, states, states, few, many, None, None, out)
    with pytest.raises(ValueError, match="positions"):
        scores = np.empty(3, np.float32)
        engine.attend(1, states[:2].copy(), states, few, many, None, None, out, scores, scores.copy())
    with pytest.raises(ValueError, match="more queries"):
        engine.attend(1, states, states[:2].copy(), many, few, None, None, np.empty((3, 32), np.float32))


def test_wrong_rules_and_heads_are_refused() -> None:
    net, native_library = network_of("deebert"), import_native()
    engine = native(net)
    packed, logits, layer = pack([[5, 6, 7]]), np.empty((1, 3), np.float32), np.empty(1, np.int64)
    columns = [packed.tokens[name].numpy() for name in ("id", "type", "position")]
    heads = [engine.compile_heads(net).head(number) for number in range(4)]  # type: ignore[attr-defined]

    def rule(**changed: Any) -> Any:
        given = {"measure": "entropy", "exits": [0, 1], "thresholds": [0.5, 0.5], "temperatures": [], "patience": 0}
        return native_library.Rule(**{**given, "tolerance": 0.0, "by_row": False, **changed})

    def call(own_rule: Any, own_heads: Any = heads, own_logits: Any = logits, **more: Any) -> None:
        unit = more.pop("exit_unit", None)
        lengths = packed.lengths.numpy()
        engine.native.run_rule(
            own_rule, own_heads, unit, *columns, lengths, **more, logits=own_logits, exit_layer=layer
        )

    call(rule())
    for wrong in ({"measure": "mood"}, {"thresholds": [0.5]}, {"temperatures": [1.0]}, {"exits": [1, 0]}):
        with pytest.raises(ValueError):
            rule(**wrong)
    for own_rule, own_heads, own_logits in (
        (rule(), heads[:3], logits),
        (rule(), [None, *heads[1:]], logits),
        (rule(), [*heads[:3], None], logits),
        (rule(exits=[0, 3]), heads, logits),
        (rule(measure="exit_unit"), heads, logits),
        (rule(by_row=True), heads, logits),
        (rule(measure="patience", by_row=True), heads, logits),
        (rule(), heads, np.empty((1, 2), np.float32)),
    ):
        with pytest.raises(ValueError):
            call(own_rule, own_heads, own_logits)
    with pytest.raises(ValueError):
        call(rule(by_row=True), thresholds=np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError):
        heads[0].add_activation(False, "relu")  # a head that was used does not change


def test_packed_weights_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError):
        import_native().Linear(np.zeros(10, np.uint8), 3, 3, "fp32", None)
    with pytest.raises(ValueError):
        import_native().Linear(np.zeros(import_native().packed_size("int8", 3, 8), np.uint8), 3, 8, "fp32", None)
    with pytest.raises(ValueError):
        import_native().packed_size("fp8", 3, 3)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_eight_threads_at_once_get_the_same_answers(threads: int) -> None:
    net = network_of("deebert")
    engine, policy = native(net, threads=threads), entropy_policy(net)
    batches = [pack(factories.token_ids([n, 2 * n, 3], seed=n)) for n in range(2, 10)]
    wanted = [answer(engine, net, policy, packed).logits for packed in batches]
    wrong: list[int] = []

    def work(start: int) -> None:
        for turn in range(60):
            i = (start + turn) % len(batches)
            if not torch.equal(answer(engine, net, policy, batches[i]).logits, wanted[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def _in_child(engine: Any, net: Any, packed: Packed, results: Any) -> None:
    results.put([answer(engine, net, Policy(), packed).logits.tolist() for _ in range(3)])


def test_an_engine_works_in_forked_processes() -> None:
    net, packed = plain_network(), pack(factories.token_ids(LENGTHS))
    engine = native(net, threads=3)
    expected = answer(engine, net, Policy(), packed).logits.tolist()
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    children = [fork.Process(target=_in_child, args=(engine, net, packed, results)) for _ in range(2)]
    for child in children:
        child.start()
    collected = [results.get() for _ in children]
    for child in children:
        child.join(60)
    assert collected == [[expected] * 3] * 2 and [child.exitcode for child in children] == [0, 0]
    assert answer(engine, net, Policy(), packed).logits.tolist() == expected  # and still in the parent


TASKS = Path("/proc/self/task")  # on Linux: one entry for each thread of this process, whoever started it


@pytest.mark.skipif(not TASKS.exists(), reason="this system does not list the threads of a process")
def test_engines_take_their_threads_along_when_they_go() -> None:
    net, packed = plain_network(), pack(factories.token_ids(LENGTHS))

    def threads() -> int:
        gc.collect()
        return len(list(TASKS.iterdir()))

    answer(native(net, threads=1), net, Policy(), packed)  # what torch starts once is there now
    before = threads()
    kept = native(net, threads=4)
    answer(kept, net, Policy(), packed)
    assert threads() == before + 3
    for _ in range(20):
        answer(native(net, threads=4), net, Policy(), packed)
    del kept
    for _ in range(100):  # a thread that was joined may be listed a moment longer
        if threads() == before:
            break
        time.sleep(0.05)
    assert threads() == before


def test_the_number_of_threads_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    net, most = plain_network(), import_native().MOST_THREADS
    with pytest.raises(OfframpError, match=f"use 1 to {most}"):
        native(net, threads=most + 1)
    monkeypatch.setattr(engine, "usable_cores", lambda: 4 * most)
    built = engines.make("native", net.encoder)
    assert isinstance(built, engine.NativeEngine) and built.native.threads == most


def test_a_compiled_package_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_native(), "INTERFACE", 1)
    library.import_native.cache_clear()
    try:
        with pytest.raises(OfframpError, match="another version"):
            library.import_native()
        net = plain_network()
        name, reason = engines.explain_choice("auto", torch.device("cpu"), net.encoder)
        assert name != "native" and "another version" in reason
    finally:
        library.import_native.cache_clear()


@pytest.mark.parametrize("table", ["words", "positions", "types"])
def test_an_engine_refuses_tables_that_changed(table: str) -> None:
    """Matrices are copies and tables are not: half of a change would be neither the old model nor the new one."""
    net, packed = factories.exit_network(), pack(factories.token_ids(LENGTHS))
    engine = native(net)
    answer(engine, net, Policy(), packed)
    with torch.no_grad():
        getattr(net.encoder.tables, table).weight.mul_(2.0)
    with pytest.raises(OfframpError, match="changed since"):
        answer(engine, net, Policy(), packed)
    expected = answer(engines.make("torch", net.encoder), net, Policy(), packed).logits
    assert torch.allclose(answer(native(net), net, Policy(), packed).logits, expected, atol=1e-4)


@pytest.mark.parametrize("training", ["learned", "fitted"])
@pytest.mark.parametrize("whole", [True, False])
def test_an_engine_refuses_tables_of_words_that_changed(whole: bool, training: str) -> None:
    net, packed = factories.network("deebert", bag_of_words_training=training), pack(factories.token_ids(LENGTHS))
    engine, policy = native(net), entropy_policy(net) if whole else Policy()
    answer(engine, net, policy, packed)
    head = engine.compile_heads(net)
    with torch.inference_mode():
        states = packed.with_states(engine.embed(packed))
        head(0, states)
    with torch.no_grad():
        net.exit_heads[0].words.add_(1.0)  # type: ignore[operator, union-attr]
    with pytest.raises(OfframpError, match="changed since"), torch.inference_mode():
        if whole:
            answer(engine, net, policy, packed)
        head(0, states)


def test_queries_that_are_the_keys_are_one_array() -> None:
    engine, states = native(plain_network()).native, np.zeros((3, 32), np.float32)
    few, many = np.array([2]), np.array([3])
    with pytest.raises(ValueError, match="one array"):
        engine.attend(1, states.copy(), states, many, many, None, None, np.empty((3, 32), np.float32), same=True)
    with pytest.raises(ValueError, match="as many where they are the same"):
        engine.attend(1, states[:2], states, few, many, None, None, np.empty((2, 32), np.float32), same=True)


def test_some_tokens_at_the_start_of_the_memory_of_all_are_queries_of_their_own() -> None:
    """Equal addresses do not make queries the keys."""
    engine = native(plain_network()).native
    states = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    positions, outputs = np.arange(3), [np.empty((2, 32), np.float32) for _ in range(2)]
    for queries, output in zip((states[:2], states[:2].copy()), outputs, strict=True):
        engine.attend(1, queries, states, np.array([2]), np.array([3]), positions[:2], positions, output)
    assert (outputs[0] == outputs[1]).all()


def test_wrong_measures_of_logits_are_refused() -> None:
    measure, logits, values = import_native().measure_logits, np.zeros((2, 3), np.float32), np.empty(2, np.float32)
    measure("entropy", logits, None, values)
    assert values == pytest.approx(np.log(3.0))
    for wrong in (("patience", logits, None, values), ("entropy", logits[0], None, values),
                  ("entropy", logits[:, :0], None, values), ("entropy", logits, values[:1], values),
                  ("entropy", logits, None, values[:1])):  # fmt: skip
        with pytest.raises(ValueError):
            measure(*wrong)
