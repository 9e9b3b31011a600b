"""The compiled engine: torch's decisions on every backbone and moment, the law in every precision, and its files."""

from __future__ import annotations

import shutil
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import offramp
from offramp import engines
from offramp.core.attention import Scores
from offramp.core.loop import Engine, Result, State, run
from offramp.core.packed import Packed, pack
from offramp.core.policy import Both, Policy
from offramp.engines import How, _shelf
from offramp.engines.openvino import OpenVINOEngine
from offramp.parts.exits import ExitOptions, ramps
from offramp.parts.heads import LexicalRamp, OffRamp
from offramp.parts.network import Network, network
from offramp.tasks import get
from tests import runs, tiny
from tests.fakes import Drop, Gate, Leave

RAGGED, EVEN, ONE_LONG = [9, 3, 17, 5], [5, 5, 5], [7, 1, 1, 120]


class Significance(Policy):
    """Drops what received less attention than the middle of its batch of one row, or by place: scores at work."""

    def wants_scores(self, layer: int) -> bool:
        return True

    def attended(self, layer: int, s: State, scores: Scores | None) -> Tensor | None:
        assert scores is not None
        first = s.packed.tokens["position"] == 0
        return (scores.columns - scores.diagonal > 0.5) | first if layer == 2 else None


MOMENTS: dict[str, Policy] = {
    "nobody looks": Policy(),
    "exits": Leave({0: [1], 1: [0], 2: [2]}),
    "tokens drop before a layer": Drop({2: 4}, "enter"),
    "tokens drop between the halves": Drop({2: 4}, "attended"),
    "scores": Significance(),
    "idle tokens": Gate({2: [1.0, 1.0, 0.0], 3: [1.0, 0.3, 0.0, 1.0]}),
    "idle tokens and scores": Both(Gate({2: [1.0, 1.0, 0.0]}), Significance()),
}


@cache
def net_for(task: str, kind: str) -> Network:
    rows = [{"text": "a", "label": i, "tokens": ["a", "b", "c"], "tags": ["O", "B-X", "I-X"]} for i in range(3)]
    spec = get(task).from_rows(rows, "rows")
    made = network(tiny.model(kind, spec.auto_class, num_hidden_layers=3), spec)
    torch.manual_seed(5)
    made.added.update({"ramps": ramps(made, ExitOptions())})
    made.eval()
    return made


@cache
def compiled(task: str, kind: str, precision: str = "fp32") -> Engine:
    return engines.make("openvino", net_for(task, kind).encoder, How(precision, threads=1))  # type: ignore[arg-type]


def answer(engine: Engine, net: Network, policy: Policy, packed: Packed) -> Result:
    with torch.inference_mode():
        return run(engine, engine.exits(net), policy, packed)


OWN_LAYERS = ("alberta", "bert", "modernbert")  # the others have BERT's layers under other names
CASES = [(kind, moment) for kind in tiny.BACKBONES for moment in MOMENTS if kind in OWN_LAYERS or moment == "exits"]


@pytest.mark.parametrize(("kind", "moment"), CASES)
def test_same_decisions_as_torch(kind: str, moment: str) -> None:
    """Tagging where tokens drop (they are restored), rows elsewhere."""
    task = "tagging" if "drop" in moment else "classification"
    net, engine = net_for(task, kind), compiled(task, kind)
    for lengths in (RAGGED, EVEN):
        packed = pack(tiny.rows(lengths))
        ours = answer(engine, net, MOMENTS[moment], packed)
        theirs = answer(engines.make("torch", net.encoder), net, MOMENTS[moment], packed)
        assert torch.equal(ours.exit_layer, theirs.exit_layer)
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)
        assert [e.tokens.tolist() for e in ours.log if e.what == "feed"] == [
            e.tokens.tolist() for e in theirs.log if e.what == "feed"
        ]


@pytest.mark.parametrize("moment", ["nobody looks", "exits", "scores", "idle tokens"])
def test_short_rows_share_a_line_beside_a_long_one(moment: str) -> None:
    net, engine = net_for("classification", "bert"), compiled("classification", "bert")
    packed = pack(tiny.rows(ONE_LONG))
    ours = answer(engine, net, MOMENTS[moment], packed)
    theirs = answer(engines.make("torch", net.encoder), net, MOMENTS[moment], packed)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)


def test_answers_do_not_depend_on_what_ran_before() -> None:
    """A first row of one token once made OpenVINO compile attention for rows of one token."""
    net = net_for("classification", "bert")
    fresh = engines.make("openvino", net.encoder, How(threads=1))
    torch_engine = engines.make("torch", net.encoder)
    for lengths in ([1], [1, 1], [7], [1, 9], [16, 16], [3, 1, 2], [1], [33]):
        packed = pack(tiny.rows(lengths))
        for policy in (Policy(), MOMENTS["tokens drop between the halves"]):
            ours, theirs = (answer(engine, net, policy, packed).logits for engine in (fresh, torch_engine))
            assert torch.allclose(ours, theirs, atol=1e-4), lengths


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.1), ("int8", 0.15)])
def test_a_batch_never_changes_an_answer_in_low_precision(precision: str, tolerance: float) -> None:
    """Alone or together within float tolerance; against fp32 within the stated one."""
    net, lengths = net_for("classification", "bert"), [9, 3, 17, 5]
    ids = tiny.rows(lengths)
    low, exact = compiled("classification", "bert", precision), compiled("classification", "bert")
    for policy in (Policy(), Leave({1: [0], 2: [2]})):
        together = answer(low, net, policy, pack(ids)).logits
        assert not torch.equal(together, answer(exact, net, policy, pack(ids)).logits)  # it really is another precision
        assert torch.allclose(together, answer(exact, net, policy, pack(ids)).logits, atol=tolerance)
    plain = answer(low, net, Policy(), pack(ids)).logits
    for row, words in enumerate(ids):
        assert torch.allclose(answer(low, net, Policy(), pack([words])).logits[0], plain[row], atol=tolerance / 5)
    stacked = [name for name in low.shelf.graphs if name.startswith("layers-")]
    assert not stacked and any("layer-1-whole" in name for name in low.shelf.graphs)  # checked where errors are small


def test_threads_may_share_compiled_graphs() -> None:
    net, engine = net_for("classification", "bert"), compiled("classification", "bert")
    batches = [pack(tiny.rows([n, 2 * n, 3], seed=n)) for n in range(2, 10)]
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


def test_compiled_pieces_are_kept_and_made_anew_when_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network(tiny.model("bert", seed=3), net_for("classification", "bert").task)
    packed, policy = pack(tiny.rows([4])), Leave({1: []})

    def start(precision: str = "fp32") -> Tensor:
        engine = engines.make("openvino", net.encoder, How(precision, 1, tmp_path))  # type: ignore[arg-type]
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
    net, packed = net_for("classification", "bert"), pack(tiny.rows([4]))
    for path in (tmp_path / "a", tmp_path / "file"):
        (tmp_path / "file").write_text("no folder")
        for _ in range(2):
            engine = engines.make("openvino", net.encoder, How("fp32", 1, path))
            assert answer(engine, net, Policy(), packed).logits.shape == (1, 3)
            for blob in path.rglob("*.blob"):
                blob.write_bytes(b"nonsense")


def test_torch_computes_with_one_thread_while_graphs_run() -> None:
    """Its threads spin after every product, on the cores that graphs want."""
    seen, before = [], torch.get_num_threads()

    class Looks(Leave):
        def leave(self, layer: int, s: State) -> Tensor | None:
            seen.append(torch.get_num_threads())
            return super().leave(layer, s)

    try:
        torch.set_num_threads(2)
        net, engine = net_for("classification", "bert"), compiled("classification", "bert")
        answer(engine, net, Looks({1: [0]}), pack(tiny.rows([5, 6])))
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_exits_beyond_tracing_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    net = net_for("classification", "bert")
    real = OffRamp.forward

    def counts(self: OffRamp, packed: Packed) -> Tensor:
        assert packed.count == 3  # a number of rows that is known: nothing a graph of free shapes can have
        return real(self, packed)

    monkeypatch.setattr(OffRamp, "forward", counts)
    engine = engines.make("openvino", net.encoder, How("fp32", 1))
    assert isinstance(engine, OpenVINOEngine)
    answer(engine, net, Leave({1: [0, 1, 2]}), pack(tiny.rows([5, 6, 7])))
    assert engine.shelf.graphs["head-1"] is None


@pytest.mark.parametrize("lengths", [EVEN, RAGGED, [12]])
def test_off_ramps_that_know_words_are_compiled_with_what_is_below_them(lengths: list[int]) -> None:
    """Ids of a real vocabulary: their hashes are beyond what floats count."""
    task = get("classification").from_rows([{"text": "a", "label": i} for i in range(3)], "rows")
    net = network(tiny.model("bert", task.auto_class, vocab_size=60_000), task)
    net.added.update({"ramps": ramps(net, ExitOptions(lexical_depth=1))})
    torch.manual_seed(1)
    for layer in (0, 1):
        ramp = net.ramps[layer]
        assert isinstance(ramp, LexicalRamp)
        for table in (ramp.words, ramp.pairs):
            torch.nn.init.normal_(table)
    net.eval()
    engine = engines.make("openvino", net.encoder, How("fp32", 1))
    packed = pack([torch.randint(60_000, (length,)).tolist() for length in lengths])
    with torch.inference_mode():
        states, logits = engine.opened(engine.exits(net), packed)
        wanted = packed.with_states(net.encoder.embed(packed))
        assert logits is not None
        assert torch.allclose(states, wanted.states, atol=1e-4)
        assert torch.allclose(logits, net(0, wanted), atol=1e-3)
        states, logits = engine.answered(1, engine.exits(net), wanted)
        assert logits is not None
        assert torch.allclose(logits, net(1, wanted.with_states(states)), atol=1e-3)
        assert torch.allclose(engine.exits(net)(1, wanted), net(1, wanted), atol=1e-3)


def test_a_run_answers_alike_with_both_engines(trained: Path, tmp_path: Path) -> None:
    run_folder = Path(shutil.copytree(trained, tmp_path / "run"))
    texts = [row["text"] for row in runs.rows("classification", 12, 5)]
    for budget in (1.0, 0.4):
        ours, theirs = (offramp.load(run_folder, engine).predict(texts, budget) for engine in ("openvino", "torch"))
        for one, other in zip(ours, theirs, strict=True):
            assert one["label"] == other["label"] and one["exit_layer"] == other["exit_layer"]
            assert one["macs"] == other["macs"]
            assert one["scores"] == pytest.approx(other["scores"], abs=1e-4)
    assert list((run_folder / ".cache" / "openvino" / "fp32").glob("*.blob"))
