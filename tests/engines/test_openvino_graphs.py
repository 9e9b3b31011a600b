"""What the compiled engine compiles: pieces kept as files, shared by threads, and what stays with torch."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offramp import engines
from offramp.core.loop import State
from offramp.core.packed import Packed, pack
from offramp.core.policy import Policy
from offramp.engines import EngineOptions
from offramp.engines.openvino import cache as _shelf
from offramp.engines.openvino.engine import OpenVINOEngine
from offramp.nn.bag_of_words import BagOfWordsExit, FittedBagOfWordsExit
from offramp.nn.exit_heads import ExitHead
from offramp.nn.exit_policies import BagOfWordsTraining, ExitOptions, build_exit_heads
from offramp.nn.network import bare_network
from offramp.tasks import get
from tests import factories
from tests.engines.test_openvino import EVEN, MOMENTS, RAGGED, answer, compiled, net_for
from tests.factories import ExitAt


def test_threads_may_share_compiled_graphs() -> None:
    net, engine = net_for("classification", "bert"), compiled("classification", "bert")
    batches = [pack(factories.token_ids([n, 2 * n, 3], seed=n)) for n in range(2, 10)]
    wanted = [answer(engine, net, MOMENTS["exits"], packed).logits for packed in batches]
    wrong: list[int] = []

    def work(start: int) -> None:
        for turn in range(40):
            i = (start + turn) % len(batches)
            if not torch.allclose(answer(engine, net, MOMENTS["exits"], batches[i]).logits, wanted[i], atol=1e-5):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def blobs(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in folder.rglob("*.blob")}


def test_compiled_pieces_are_kept_and_compiled_again_when_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = bare_network(factories.hf_model("bert", seed=3), net_for("classification", "bert").task)
    packed, policy = pack(factories.token_ids([4])), ExitAt({1: []})

    def start(precision: str = "fp32") -> Tensor:
        engine = engines.make("openvino", net.encoder, EngineOptions(precision, 1, tmp_path))  # type: ignore[arg-type]  # a str that is one
        return answer(engine, net, policy, packed).logits

    before = start()
    first = blobs(tmp_path)
    assert len(first) == 1 + net.depth  # embeddings, layers, the last exit with its layer
    monkeypatch.setattr(_shelf, "convert", None)  # nothing is compiled the second time
    assert torch.equal(start(), before) and blobs(tmp_path) == first
    monkeypatch.undo()

    with torch.no_grad():
        net.hf.bert.encoder.layer[1].output.dense.weight.mul_(1.5)
    assert not torch.allclose(start(), before, atol=1e-4)
    second = blobs(tmp_path)
    assert len(second) == len(first) and len(first.keys() - second.keys()) == 1  # that layer alone, its old file gone

    start("bf16")
    assert len(blobs(tmp_path)) > len(second)  # other settings lie beside
    monkeypatch.setattr(_shelf, "__version__", "another")
    start()
    assert not blobs(tmp_path / "openvino" / "fp32-1").keys() & {name.split("/")[-1] for name in second}


def test_a_damaged_or_unwritable_cache_costs_time_only(tmp_path: Path) -> None:
    net, packed = net_for("classification", "bert"), pack(factories.token_ids([4]))
    for path in (tmp_path / "a", tmp_path / "file"):
        (tmp_path / "file").write_text("no folder")
        for _ in range(2):
            engine = engines.make("openvino", net.encoder, EngineOptions("fp32", 1, path))
            assert answer(engine, net, Policy(), packed).logits.shape == (1, 3)
            for blob in path.rglob("*.blob"):
                blob.write_bytes(b"nonsense")


def test_torch_computes_with_one_thread_while_graphs_run() -> None:
    """Its threads spin after every product, on the cores that graphs want."""
    threads_inside, before = [], torch.get_num_threads()

    class Looks(ExitAt):
        def should_exit(self, layer: int, s: State) -> Tensor | None:
            threads_inside.append(torch.get_num_threads())
            return super().should_exit(layer, s)

    try:
        torch.set_num_threads(2)
        net, engine = net_for("classification", "bert"), compiled("classification", "bert")
        answer(engine, net, Looks({1: [0]}), pack(factories.token_ids([5, 6])))
        assert set(threads_inside) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_exits_beyond_tracing_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    net = net_for("classification", "bert")
    real = ExitHead.forward

    def counts(self: ExitHead, packed: Packed) -> Tensor:
        assert packed.count == 3  # a number of rows that is known: nothing a graph of free shapes can have
        return real(self, packed)

    monkeypatch.setattr(ExitHead, "forward", counts)
    engine = engines.make("openvino", net.encoder, EngineOptions("fp32", 1))
    assert isinstance(engine, OpenVINOEngine)
    answer(engine, net, ExitAt({1: [0, 1, 2]}), pack(factories.token_ids([5, 6, 7])))
    assert engine.graph_cache.graphs["head-1"] is None


@pytest.mark.parametrize("bag_of_words_training", ["learned", "fitted"])
@pytest.mark.parametrize("lengths", [EVEN, RAGGED, [12]])
def test_exits_with_bags_of_words_are_compiled_with_the_layer_below(
    lengths: list[int], bag_of_words_training: BagOfWordsTraining
) -> None:
    """Ids of a real vocabulary: their hashes are beyond what floats count."""
    task = get("classification").from_rows([{"text": "a", "label": i} for i in range(3)], "rows")
    net = bare_network(factories.hf_model("bert", task.auto_class, vocab_size=60_000), task)
    net.added.update(
        {
            "exit_heads": build_exit_heads(
                net, ExitOptions(bag_of_words_depth=1, bag_of_words_training=bag_of_words_training)
            )
        }
    )
    torch.manual_seed(1)
    for layer in (0, 1):
        exit_head = net.exit_heads[layer]
        assert isinstance(exit_head, BagOfWordsExit | FittedBagOfWordsExit)
        for table in (exit_head.words, exit_head.pairs):
            torch.nn.init.normal_(table)
    net.eval()
    engine = engines.make("openvino", net.encoder, EngineOptions("fp32", 1))
    packed = pack([torch.randint(60_000, (length,)).tolist() for length in lengths])
    with torch.inference_mode():
        states, logits = engine.run_segment(0, 0, engine.compile_heads(net), packed)
        wanted = packed.with_states(net.encoder.embed(packed))
        assert logits is not None
        assert torch.allclose(states, wanted.states, atol=1e-4)
        assert torch.allclose(logits, net(0, wanted), atol=1e-3)
        states, logits = engine.run_segment(1, 1, engine.compile_heads(net), wanted)
        assert logits is not None
        assert torch.allclose(logits, net(1, wanted.with_states(states)), atol=1e-3)
        assert torch.allclose(engine.compile_heads(net)(1, wanted), net(1, wanted), atol=1e-3)
