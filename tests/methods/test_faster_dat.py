"""Planned depths: idle tokens, rows that end with their deepest word, tables that are saved, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import offramp
from offramp import engines, methods, tasks
from offramp.budget.subject import candidates
from offramp.core import cost
from offramp.core.attention import Layout, Scores, layout
from offramp.core.loop import run
from offramp.core.packed import Packed
from offramp.engines.torch import TorchEngine
from offramp.errors import OfframpError
from offramp.methods.faster_dat import Options, Planned, Policy, Settings
from offramp.model import folder
from offramp.parts.batch import Batch, Data, packed_rows
from offramp.parts.masked import Passes, estimate
from offramp.parts.network import Network
from offramp.parts.plans import Extent, GuessWords, by_information
from offramp.parts.stage import Backward, Stage
from offramp.parts.trace import trace
from offramp.parts.words import table, vocabulary, words_of
from offramp.text.tokenise import Encoded
from offramp.training.schedule import Schedule
from tests import runs, tiny, tiny_tokenizers

ROWS = [{"text": "a", "label": i % 3} for i in range(3)]
IDS = [[2, 10, 11, 12, 3], [2, 20, 21, 3], [2, 10, 3]]
WORDS = [[-1, 0, 0, 1, -1], [-1, 0, 1, -1], [-1, 0, -1]]
DEPTHS = {(10, 11): 1, (12,): 2, (20,): 3, (21,): 1, (10,): 1}  # rows end after 2, 3 and 1


def planned(backbone: str = "bert", **options: Any) -> tuple[Network, Packed]:
    """A network that knows the words of IDS, and those rows."""
    task = tasks.get("classification").from_rows(ROWS, "rows")
    net = folder.assemble(tiny.model(backbone), task, methods.get("faster_dat"), Options(**options))
    net.eval()
    rows = [Encoded(ids, [0] * len(ids), i, WORDS[i], [], 0) for i, ids in enumerate(IDS)]
    packed = packed_rows(task, rows)
    found, ids = vocabulary(words_of(packed)), packed.tokens["id"]
    known = [tuple(ids[f : f + n].tolist()) for f, n in zip(found.first.tolist(), found.size.tolist(), strict=True)]
    depths = torch.tensor([[float(DEPTHS[word])] for word in known])
    net.added["depths"].fill(table(ids, found, depths, torch.zeros(1), 0))  # type: ignore[operator]  # a ModuleDict
    return net, packed


class Watching(TorchEngine):
    """Remembers what every layer was given."""

    seen: dict[int, tuple[Tensor, Tensor]]

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, Scores | None]:
        self.seen[layer] = (queries, keys)
        return super().attend(layer, queries, keys, where, scores)


@torch.no_grad()
def test_idle_tokens_are_copied_exactly_and_attended_to() -> None:
    net, packed = planned()
    first = packed.keep_rows(torch.tensor([True, False, False]))
    engine = Watching(net.encoder)
    object.__setattr__(engine, "seen", {})
    made = run(engine, net, Policy(net, Settings()), first)
    assert sorted(engine.seen) == [1, 2] and made.exit_layer.tolist() == [2.0]  # nobody is left for layer 3
    (queries1, keys1), (queries2, keys2) = engine.seen[1], engine.seen[2]
    assert len(queries1) == len(keys1) == 5
    assert len(queries2) == 3 and len(keys2) == 5  # "10 11" idles, and is still seen
    layer = net.encoder.layers[0]
    after = layer.feed(layer.attend(keys1, keys1, first.layout, False, None)[0])
    assert torch.allclose(keys2, after, atol=1e-6)
    assert torch.equal(queries2, keys2[[0, 3, 4]])
    counts = {(e.what, e.layer): e.tokens.tolist() for e in made.log if e.what in ("attend", "feed")}
    assert counts == {("attend", 1): [5], ("feed", 1): [5], ("attend", 2): [3], ("feed", 2): [3]}
    head = net.added["last"]  # the idle states are part of what the head reads, exactly as layer 1 left them
    halves = net.encoder.layers[1]
    states = keys2.clone()
    moved, _ = halves.attend(queries2, keys2, _layout(first, [0, 3, 4]), False, None)
    states[[0, 3, 4]] = halves.feed(moved)
    assert torch.allclose(made.logits, head(first.with_states(states)), atol=1e-5)


def _layout(packed: Packed, live: list[int]) -> Layout:
    position = packed.tokens["position"]
    return layout(packed.lengths, position, torch.tensor([len(live)]), position[live])


@torch.no_grad()
@pytest.mark.parametrize("backbone", ["bert", "modernbert"])
def test_a_row_ends_with_its_own_deepest_word_whatever_the_batch(backbone: str) -> None:
    net, packed = planned(backbone)
    engine = engines.make("torch", net.encoder)
    together = run(engine, net, Policy(net, Settings()), packed)
    assert together.exit_layer.tolist() == [2.0, 3.0, 1.0]
    spent = cost.macs(together.log, net, 3)
    for row in range(3):
        alone = run(engine, net, Policy(net, Settings()), packed.keep_rows(torch.arange(3) == row))
        assert torch.allclose(alone.logits[0], together.logits[row], atol=1e-5)
        own = [e._replace(rows=torch.zeros_like(e.rows)) for e in alone.log]
        assert cost.macs(own, net, 1).item() == pytest.approx(spent[row].item())


@torch.no_grad()
def test_unlimited_depths_are_the_plain_stack_and_a_cap_ends_it() -> None:
    net, packed = planned()
    net.added["depths"].fill({**net.added["depths"].state_dict(), "depths": torch.full((5, 1), 3.0)})  # type: ignore[operator]
    engine = engines.make("torch", net.encoder)
    made = run(engine, net, Policy(net, Settings()), packed)
    states = trace(net.encoder, packed)
    assert torch.allclose(made.logits, net(3, states.at(3)), atol=1e-5)
    capped = run(engine, net, Policy(net, Settings(cap=2)), packed)
    assert capped.exit_layer.tolist() == [2.0] * 3
    assert torch.allclose(capped.logits, net(2, states.at(2)), atol=1e-5)


def test_fewer_layers_are_trained_and_the_rest_never_run() -> None:
    net, packed = planned(layers=2)
    with torch.no_grad():
        made = run(engines.make("torch", net.encoder), net, Policy(net, Settings()), packed)
    assert made.exit_layer.tolist() == [2.0, 2.0, 1.0]
    (stage,) = methods.get("faster_dat").stages(net, Options(layers=2))
    names = [name for name, _ in stage.trainable()]
    assert any("layer.1." in name for name in names) and not any("layer.2." in name for name in names)
    assert not any("classifier" in name or "pooler" in name for name in names) and "added.last.project.weight" in names


def test_mi_trains_and_answers_after_saving_as_before(base: str, tmp_path: Path) -> None:
    run_folder = runs.train(base, tmp_path, "faster_dat")
    (loosest, *_) = reversed(json.loads((run_folder / "points.json").read_text())["points"])
    assert loosest["settings"] == {"cap": 0, "penalty": -1.0} and loosest["mac_share"] < 1.0
    losses = [entry["loss"] for entry in folder.read_recipe(run_folder)["log"]]
    assert losses[-1] < 0.8 * losses[0]
    model = offramp.load(run_folder)
    depths = model.network.added["depths"]
    tell, other = (
        [*map(model.model.tokenizer.convert_tokens_to_ids, words)] for words in (["good", "bad"], runs.WORDS)
    )
    by_word = dict(zip(depths.pieces.tolist(), depths.at(0.0)[0].tolist(), strict=True))  # type: ignore[operator]
    assert [by_word[i] for i in tell] == [1, 1]  # what tells the label goes least deep
    assert max(by_word[i] for i in other) == 3 and sum(by_word[i] for i in other) > len(other)
    texts = [row["text"] for row in runs.rows("classification", 8, seed=3)]
    together = model.predict(texts, budget=1.0)
    alone = [model.predict([text], budget=1.0)[0] for text in texts]
    assert [a["label"] for a in together] == [a["label"] for a in alone]
    assert [a["macs"] for a in together] == [a["macs"] for a in alone]


def test_telling_words_may_go_deep_instead() -> None:
    rows = runs.rows("classification", 24)
    task = tasks.get("classification").from_rows(rows, "rows")
    data = Data(rows, task.encode(tiny_tokenizers.wordpiece(), rows, 64))
    tables = [by_information(task, data, Extent(3), 0.1, telling) for telling in (False, True)]
    assert torch.equal(tables[0]["pieces"], tables[1]["pieces"])
    assert torch.equal(tables[0]["depths"], 4 - tables[1]["depths"])


def test_a_higher_floor_sends_words_deeper(base: str, tmp_path: Path) -> None:
    quick, spent = Schedule(epochs=1, batch_size=16), []
    for least in (1e-12, 0.02):
        (tmp_path / str(least)).mkdir()
        made = runs.train(base, tmp_path / str(least), "faster_dat", options={"least": least}, schedule=quick)
        spent.append(json.loads((made / "points.json").read_text())["points"][-1]["mac_share"])
    assert spent[0] < spent[1]


@pytest.mark.parametrize("layers", [1, 2])
def test_caps_that_change_nothing_are_not_tried(base: str, tmp_path: Path, layers: int) -> None:
    quick = Schedule(epochs=4, batch_size=8, lr=0.01)
    made = runs.train(base, tmp_path, "faster_dat", options={"layers": layers}, schedule=quick)
    model = offramp.load(made)
    tried = candidates(model.network, model.model.method, None)  # type: ignore[arg-type]  # no recording is looked at
    assert tried == [{"cap": cap} for cap in range(1, layers)] and model.points is not None
    assert not [told for told in model.points.warnings if "no setting is cheaper" in told or "collapsed" in told]


@pytest.mark.parametrize("kind", ["tagging", "pairs"])
def test_mi_serves_words_and_pairs(base: str, tmp_path: Path, kind: str) -> None:
    run_folder = runs.train(base, tmp_path, "faster_dat", kind, schedule=Schedule(epochs=1, batch_size=16))
    assert json.loads((run_folder / "points.json").read_text())["points"][-1]["mac_share"] < 1.0


def test_mi_without_classes_is_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="estimation=reconstruction"):
        runs.train(base, tmp_path, "faster_dat", "span")


def test_reconstruction_trains_and_keeps_only_the_table(base: str, tmp_path: Path) -> None:
    asked = {"estimation": "reconstruction", "spacing": 3, "rows": 20}
    quick = Schedule(epochs=1, batch_size=8, lr=0.005)
    run_folder = runs.train(base, tmp_path, "faster_dat", "regression", options=asked, schedule=quick)
    stages = [entry["stage"] for entry in folder.read_recipe(run_folder)["log"]]
    assert stages == ["guess hidden words", "fine-tune planned depths"]
    saved = load_file(run_folder / "offramp.safetensors")
    assert not any(name.startswith("masked.model") for name in saved) and saved["depths.depths"].shape[1] == 8
    model = offramp.load(run_folder)
    texts = [row["text"] for row in runs.rows("regression", 6, seed=3)]
    rows = model.prepare([{"text": text} for text in texts])
    kept = [model.run(rows, Settings(penalty=p)).tokens_kept.sum() for p in (0.0, 0.1, 0.2, 1.0)]
    assert kept == sorted(kept, reverse=True)  # a larger penalty never sends a word deeper
    assert model.run(rows, Settings()).tokens_kept.sum() == kept[1]


@pytest.mark.parametrize("stage", [GuessWords, Planned])
def test_an_interrupted_run_finds_its_table_and_goes_on_to_the_same_result(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: type[Stage]
) -> None:
    def train(folder_: Path) -> Path:
        folder_.mkdir(exist_ok=True)
        asked = {"estimation": "reconstruction", "rows": 10, "layers": 2}
        schedule = Schedule(epochs=1, batch_size=16, lr=0.005, save_seconds=0.0)
        return runs.train(base, folder_, "faster_dat", options=asked, schedule=schedule)

    whole = train(tmp_path / "whole")
    steps, real = 0, stage.step

    def stumble(self: Stage, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise RuntimeError("the power went")
        return real(self, batch, backward)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the power went"):
        patch.setattr(stage, "step", stumble)
        train(tmp_path / "halved")
    again = train(tmp_path / "halved")
    for name in ("model.safetensors", "offramp.safetensors"):
        assert (again / name).read_bytes() == (whole / name).read_bytes()


def test_the_transductive_form_asks_for_every_word_and_says_what_that_costs(base: str, tmp_path: Path) -> None:
    asked = {"estimation": "reconstruction", "transductive": True}
    quick = Schedule(epochs=1, batch_size=16, lr=0.005)
    run_folder = runs.train(base, tmp_path, "faster_dat", options=asked, schedule=quick)
    model = offramp.load(run_folder)
    (loosest, *_) = reversed(json.loads((run_folder / "points.json").read_text())["points"])
    assert loosest["mac_share"] > 2.0
    rows = model.prepare([{"text": "the film is good"}, {"text": "a bad film"}])
    together, alone = model.run(rows, Settings()), [model.run([row], Settings()) for row in rows]
    assert together.macs.tolist() == [one.macs[0] for one in alone]
    assert together.exit_layer.tolist() == [one.exit_layer[0] for one in alone]
    passes = 4  # words of the first text, each hidden once in a row of six tokens
    assert together.tokens_kept[0] >= passes * 6 + 6 / 3


def test_single_words_are_trained_at_the_depth_they_run_at(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """λ lies between those that tables keep, where the mean of two depths would be a third one."""
    asked = {"estimation": "reconstruction", "transductive": True, "penalty": 0.0021}
    seen: list[Planned] = []
    real = Planned.prepare
    monkeypatch.setattr(Planned, "prepare", lambda self, *given: seen.append(self) or real(self, *given))
    run_folder = runs.train(base, tmp_path, "faster_dat", options=asked, schedule=Schedule(epochs=1, batch_size=16))
    model = offramp.load(run_folder)
    rows = model.prepare(runs.rows("classification", 48, 0))
    packed = packed_rows(model.task, rows)
    masked, passes = model.network.added["masked"], Passes(3, 0)
    exact = estimate(masked, packed, passes, torch.tensor([0.0021])).squeeze(1).long()  # type: ignore[arg-type]  # a Module
    assert torch.equal(torch.cat(seen[-1].own), exact)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layers": -1}, "layers=-1"),
        ({"smoothing": 0.0}, "smoothing"),
        ({"least": 0.0}, "least=0"),
        ({"least": 1.0}, "least=1"),
        ({"penalty": 2.0}, "penalty"),
        ({"spacing": 1}, "spacing=1"),  # nothing left to guess from
        ({"transductive": True}, "estimation=reconstruction"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OfframpError, match=match):
        Options(**options)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(OfframpError, match="cap=-1"):
        Settings(cap=-1)
    with pytest.raises(OfframpError, match="this model has 3"):
        planned(layers=4)
    net, _ = planned()
    with pytest.raises(OfframpError, match="use cap"):
        Policy(net, Settings(penalty=0.2))
