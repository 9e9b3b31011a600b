"""Planned depths at run time: idle tokens, rows that end with their deepest word, caps, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from offramp import engines, methods, tasks
from offramp.core import cost
from offramp.core.attention import AttentionScores, Layout, layout
from offramp.core.loop import run
from offramp.core.packed import Packed
from offramp.data.tokenization import Encoded
from offramp.engines.torch import TorchEngine
from offramp.errors import OfframpError
from offramp.inference import run_folder as folder
from offramp.methods.faster_dat.mutual_information import depths_by_information
from offramp.methods.faster_dat.options import FasterDATOptions, FasterDATSettings
from offramp.methods.faster_dat.policy import FasterDATPolicy
from offramp.methods.faster_dat.word_depths import TableScope, depth_table, vocabulary
from offramp.nn.batches import Data, pack_rows
from offramp.nn.network import Network
from offramp.nn.words import words_of
from offramp.training.forward import forward_all_layers
from tests import factories

ROWS = [{"text": "a", "label": i % 3} for i in range(3)]
IDS = [[2, 10, 11, 12, 3], [2, 20, 21, 3], [2, 10, 3]]
WORDS = [[-1, 0, 0, 1, -1], [-1, 0, 1, -1], [-1, 0, -1]]
DEPTHS = {(10, 11): 1, (12,): 2, (20,): 3, (21,): 1, (10,): 1}  # rows end after 2, 3 and 1


def planned_network(backbone: str = "bert", **options: Any) -> tuple[Network, Packed]:
    """Return a network whose table has the words of IDS, and those rows."""
    task = tasks.get("classification").from_rows(ROWS, "rows")
    net = folder.build_network(
        factories.hf_model(backbone), task, methods.get("faster_dat"), FasterDATOptions(**options)
    )
    net.eval()
    rows = [Encoded(ids, [0] * len(ids), i, WORDS[i], [], 0) for i, ids in enumerate(IDS)]
    packed = pack_rows(task, rows)
    found, ids = vocabulary(words_of(packed)), packed.tokens["id"]
    known = [tuple(ids[f : f + n].tolist()) for f, n in zip(found.first.tolist(), found.size.tolist(), strict=True)]
    depths = torch.tensor([[float(DEPTHS[word])] for word in known])
    net.added["depths"].fill(depth_table(ids, found, depths, torch.zeros(1), 0))  # type: ignore[operator]  # a ModuleDict
    return net, packed


class RecordingEngine(TorchEngine):
    """Records the inputs of every layer."""

    inputs: dict[int, tuple[Tensor, Tensor]]

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, AttentionScores | None]:
        self.inputs[layer] = (queries, keys)
        return super().attend(layer, queries, keys, where, scores)


@torch.no_grad()
def test_idle_tokens_are_copied_and_attended_to() -> None:
    net, packed = planned_network()
    first = packed.keep_rows(torch.tensor([True, False, False]))
    engine = RecordingEngine(net.encoder)
    object.__setattr__(engine, "inputs", {})
    result = run(engine, net, FasterDATPolicy(net, FasterDATSettings()), first)
    assert sorted(engine.inputs) == [1, 2] and result.exit_layer.tolist() == [2.0]  # no row reaches layer 3
    (queries1, keys1), (queries2, keys2) = engine.inputs[1], engine.inputs[2]
    assert len(queries1) == len(keys1) == 5
    assert len(queries2) == 3 and len(keys2) == 5  # "10 11" is idle, and still attended to
    layer = net.encoder.layers[0]
    after = layer.feed(layer.attend(keys1, keys1, first.layout, False, None)[0])
    assert torch.allclose(keys2, after, atol=1e-6)
    assert torch.equal(queries2, keys2[[0, 3, 4]])
    counts = {(e.kind, e.layer): e.tokens.tolist() for e in result.trace if e.kind in ("attend", "feed")}
    assert counts == {("attend", 1): [5], ("feed", 1): [5], ("attend", 2): [3], ("feed", 2): [3]}
    head = net.added["final_head"]  # the head also reads the idle states, unchanged since layer 1
    halves = net.encoder.layers[1]
    states = keys2.clone()
    attended, _ = halves.attend(queries2, keys2, _layout(first, [0, 3, 4]), False, None)
    states[[0, 3, 4]] = halves.feed(attended)
    assert torch.allclose(result.logits, head(first.with_states(states)), atol=1e-5)


def _layout(packed: Packed, live: list[int]) -> Layout:
    position = packed.tokens["position"]
    return layout(packed.lengths, position, torch.tensor([len(live)]), position[live])


@torch.no_grad()
@pytest.mark.parametrize("backbone", ["bert", "modernbert"])
def test_row_ends_with_its_own_deepest_word_in_any_batch(backbone: str) -> None:
    net, packed = planned_network(backbone)
    engine = engines.make("torch", net.encoder)
    together = run(engine, net, FasterDATPolicy(net, FasterDATSettings()), packed)
    assert together.exit_layer.tolist() == [2.0, 3.0, 1.0]
    spent = cost.macs(together.trace, net, 3)
    for row in range(3):
        alone = run(engine, net, FasterDATPolicy(net, FasterDATSettings()), packed.keep_rows(torch.arange(3) == row))
        assert torch.allclose(alone.logits[0], together.logits[row], atol=1e-5)
        own = [e._replace(rows=torch.zeros_like(e.rows)) for e in alone.trace]
        assert cost.macs(own, net, 1).item() == pytest.approx(spent[row].item())


@torch.no_grad()
def test_full_depths_are_the_plain_model_and_a_cap_ends_it() -> None:
    net, packed = planned_network()
    net.added["depths"].fill({**net.added["depths"].state_dict(), "depths": torch.full((5, 1), 3.0)})  # type: ignore[operator]
    engine = engines.make("torch", net.encoder)
    result = run(engine, net, FasterDATPolicy(net, FasterDATSettings()), packed)
    states = forward_all_layers(net.encoder, packed)
    assert torch.allclose(result.logits, net(3, states.after(3)), atol=1e-5)
    capped = run(engine, net, FasterDATPolicy(net, FasterDATSettings(cap=2)), packed)
    assert capped.exit_layer.tolist() == [2.0] * 3
    assert torch.allclose(capped.logits, net(2, states.after(2)), atol=1e-5)


def test_layers_above_the_largest_depth_are_neither_trained_nor_run() -> None:
    net, packed = planned_network(layers=2)
    with torch.no_grad():
        result = run(engines.make("torch", net.encoder), net, FasterDATPolicy(net, FasterDATSettings()), packed)
    assert result.exit_layer.tolist() == [2.0, 2.0, 1.0]
    fine_tuning, planned = methods.get("faster_dat").stages(net, FasterDATOptions(layers=2))
    assert fine_tuning.fine_tuning and not fine_tuning.is_done_in({})  # a plain run has another head
    for stage in (fine_tuning, planned):
        names = [name for name, _ in stage.trainable()]
        assert any("layer.1." in name for name in names) and not any("layer.2." in name for name in names)
        assert not any("classifier" in name or "pooler" in name for name in names)
        assert "added.final_head.project.weight" in names


def test_informative_words_can_go_deep_instead() -> None:
    rows = factories.labelled_rows("classification", 24)
    task = tasks.get("classification").from_rows(rows, "rows")
    data = Data(rows, task.encode(factories.wordpiece_tokenizer(), rows, 64))
    tables = [depths_by_information(task, data, TableScope(3), 0.1, deep) for deep in (False, True)]
    assert torch.equal(tables[0]["pieces"], tables[1]["pieces"])
    assert torch.equal(tables[0]["depths"], 4 - tables[1]["depths"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layers": -1}, "layers=-1"),
        ({"smoothing": 0.0}, "smoothing"),
        ({"least": 0.0}, "least=0"),
        ({"least": 1.0}, "least=1"),
        ({"penalty": 2.0}, "penalty"),
        ({"spacing": 1}, "spacing=1"),  # no context is left
        ({"transductive": True}, "estimation=reconstruction"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OfframpError, match=match):
        FasterDATOptions(**options)


def test_rare_and_unseen_words_go_deep_by_information_only() -> None:
    assert FasterDATOptions().table_scope(6) == (6, 5, 6)
    assert FasterDATOptions(estimation="reconstruction").table_scope(6) == (6, 1, 0)  # 0: the median
    assert FasterDATOptions(least_count=2, unseen=3).table_scope(6) == (6, 2, 3)
    assert FasterDATOptions(unseen=-1).table_scope(6) == (6, 5, 0)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(OfframpError, match="cap=-1"):
        FasterDATSettings(cap=-1)
    with pytest.raises(OfframpError, match="this model has 3"):
        planned_network(layers=4)
    net, _ = planned_network()
    with pytest.raises(OfframpError, match="use cap"):
        FasterDATPolicy(net, FasterDATSettings(penalty=0.2))
