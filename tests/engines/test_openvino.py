"""The compiled engine's answers: torch's decisions on every backbone and moment, and the law in every precision."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

import offramp
from offramp import engines
from offramp.core.loop import Engine, Result, run
from offramp.core.packed import Packed, pack
from offramp.core.policy import PairPolicy, Policy
from offramp.engines import EngineOptions
from offramp.nn.exit_policies import ExitOptions, build_exit_heads
from offramp.nn.network import Network, bare_network
from offramp.tasks import get
from tests import factories
from tests.factories import DropLittleAttended, ExitAt, KeepFirst, SetGates

RAGGED, EVEN, ONE_LONG = [9, 3, 17, 5], [5, 5, 5], [7, 1, 1, 120]


MOMENTS: dict[str, Policy] = {
    "no policy": Policy(),
    "exits": ExitAt({0: [1], 1: [0], 2: [2]}),
    "tokens drop before a layer": KeepFirst({2: 4}, "before_layer"),
    "tokens drop between the halves": KeepFirst({2: 4}, "after_attention"),
    "scores": DropLittleAttended(2),
    "idle tokens": SetGates({2: [1.0, 1.0, 0.0], 3: [1.0, 0.3, 0.0, 1.0]}),
    "idle tokens and scores": PairPolicy(SetGates({2: [1.0, 1.0, 0.0]}), DropLittleAttended(2)),
}


@cache
def net_for(task: str, kind: str) -> Network:
    rows = [{"text": "a", "label": i, "tokens": ["a", "b", "c"], "tags": ["O", "B-X", "I-X"]} for i in range(3)]
    spec = get(task).from_rows(rows, "rows")
    network = bare_network(factories.hf_model(kind, spec.auto_class, num_hidden_layers=3), spec)
    torch.manual_seed(5)
    network.added.update({"exit_heads": build_exit_heads(network, ExitOptions())})
    network.eval()
    return network


@cache
def compiled(task: str, kind: str, precision: str = "fp32") -> Engine:
    return engines.make("openvino", net_for(task, kind).encoder, EngineOptions(precision, threads=1))  # type: ignore[arg-type]


def answer(engine: Engine, net: Network, policy: Policy, packed: Packed) -> Result:
    with torch.inference_mode():
        return run(engine, engine.compile_heads(net), policy, packed)


OWN_LAYERS = ("alberta", "bert", "modernbert")  # the others have BERT's layers under other names
CASES = [
    (kind, moment) for kind in factories.BACKBONES for moment in MOMENTS if kind in OWN_LAYERS or moment == "exits"
]


@pytest.mark.parametrize(("kind", "moment"), CASES)
def test_same_decisions_as_torch(kind: str, moment: str) -> None:
    """Tagging where tokens drop (they are restored), rows elsewhere."""
    task = "tagging" if "drop" in moment else "classification"
    net, engine = net_for(task, kind), compiled(task, kind)
    for lengths in (RAGGED, EVEN):
        packed = pack(factories.token_ids(lengths))
        ours = answer(engine, net, MOMENTS[moment], packed)
        theirs = answer(engines.make("torch", net.encoder), net, MOMENTS[moment], packed)
        assert torch.equal(ours.exit_layer, theirs.exit_layer)
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)
        assert [e.tokens.tolist() for e in ours.trace if e.kind == "feed"] == [
            e.tokens.tolist() for e in theirs.trace if e.kind == "feed"
        ]


@pytest.mark.parametrize("moment", ["no policy", "exits", "scores", "idle tokens"])
def test_short_rows_share_a_line_beside_a_long_one(moment: str) -> None:
    net, engine = net_for("classification", "bert"), compiled("classification", "bert")
    packed = pack(factories.token_ids(ONE_LONG))
    ours = answer(engine, net, MOMENTS[moment], packed)
    theirs = answer(engines.make("torch", net.encoder), net, MOMENTS[moment], packed)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)


def test_answers_do_not_depend_on_what_ran_before() -> None:
    """A first row of one token once let OpenVINO compile attention for rows of one token."""
    net = net_for("classification", "bert")
    fresh = engines.make("openvino", net.encoder, EngineOptions(threads=1))
    torch_engine = engines.make("torch", net.encoder)
    for lengths in ([1], [1, 1], [7], [1, 9], [16, 16], [3, 1, 2], [1], [33]):
        packed = pack(factories.token_ids(lengths))
        for policy in (Policy(), MOMENTS["tokens drop between the halves"]):
            ours, theirs = (answer(engine, net, policy, packed).logits for engine in (fresh, torch_engine))
            assert torch.allclose(ours, theirs, atol=1e-4), lengths


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.1), ("int8", 0.15)])
def test_a_batch_never_changes_an_answer_in_low_precision(precision: str, tolerance: float) -> None:
    """Alone or together within float tolerance; against fp32 within the stated one."""
    net, lengths = net_for("classification", "bert"), [9, 3, 17, 5]
    ids = factories.token_ids(lengths)
    low, exact = compiled("classification", "bert", precision), compiled("classification", "bert")
    for policy in (Policy(), ExitAt({1: [0], 2: [2]})):
        together = answer(low, net, policy, pack(ids)).logits
        assert not torch.equal(together, answer(exact, net, policy, pack(ids)).logits)  # it really is another precision
        assert torch.allclose(together, answer(exact, net, policy, pack(ids)).logits, atol=tolerance)
    plain = answer(low, net, Policy(), pack(ids)).logits
    for row, words in enumerate(ids):
        assert torch.allclose(answer(low, net, Policy(), pack([words])).logits[0], plain[row], atol=tolerance / 5)
    stacked = [name for name in low.graph_cache.graphs if name.startswith("layers-")]
    assert not stacked and any(
        "layer-1-whole" in name for name in low.graph_cache.graphs
    )  # checked where errors are small


def test_a_run_answers_alike_with_both_engines(trained: Path, tmp_path: Path) -> None:
    run_folder = Path(shutil.copytree(trained, tmp_path / "run"))
    texts = [row["text"] for row in factories.labelled_rows("classification", 12, 5)]
    for budget in (1.0, 0.4):
        ours, theirs = (offramp.load(run_folder, engine).predict(texts, budget) for engine in ("openvino", "torch"))
        for one, other in zip(ours, theirs, strict=True):
            assert one["label"] == other["label"] and one["exit_layer"] == other["exit_layer"]
            assert one["macs"] == other["macs"]
            assert one["scores"] == pytest.approx(other["scores"], abs=1e-4)
    assert not (run_folder / ".cache").exists(), "a run folder carries no compiled code"
