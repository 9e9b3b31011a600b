"""PlannedDepthsStage depths in training: how words get them, what is saved, and runs that go on where they stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import offramp
from offramp.calibration.calibrate import candidate_settings
from offramp.errors import OfframpError
from offramp.inference import run_folder as folder
from offramp.methods.faster_dat.options import FasterDATSettings
from offramp.methods.faster_dat.reconstruction import MaskedPasses, estimate_depths
from offramp.methods.faster_dat.training import MaskedModelStage, PlannedDepthsStage
from offramp.nn.batches import Batch, pack_rows
from offramp.training.schedule import Schedule
from offramp.training.stage import Backward, Stage
from tests import factories


@pytest.mark.parametrize(("options", "depth", "others"), [({}, 3, 1), ({"deep": "rare"}, 1, 3)])
def test_mi_run_trains_and_answers_the_same_alone_and_in_a_batch(
    base: str, tmp_path: Path, options: dict[str, str], depth: int, others: int
) -> None:
    run_folder = factories.run_folder(base, tmp_path, "faster_dat", options=options)
    (full, *_) = reversed(json.loads((run_folder / "points.json").read_text())["points"])
    assert full["settings"] == {"cap": 0, "penalty": -1.0} and full["mac_share"] < 1.01
    losses = [entry["loss"] for entry in folder.read_recipe(run_folder)["log"]]
    assert losses[-1] < 0.9 * losses[0]
    model = offramp.load(run_folder)
    depths = model.network.added["depths"]
    informative, other = (
        [*map(model.model.tokenizer.convert_tokens_to_ids, words)] for words in (["good", "bad"], factories.FILLERS)
    )
    by_word = dict(zip(depths.pieces.tolist(), depths.depths_for(0.0)[0].tolist(), strict=True))  # type: ignore[operator]
    assert [by_word[i] for i in informative] == [depth, depth]  # words that decide the label are the deepest
    assert others in {by_word[i] for i in other}
    texts = [row["text"] for row in factories.labelled_rows("classification", 8, seed=3)]
    together = model.predict(texts, budget=1.0)
    alone = [model.predict([text], budget=1.0)[0] for text in texts]
    assert [a["label"] for a in together] == [a["label"] for a in alone]
    assert [a["macs"] for a in together] == [a["macs"] for a in alone]


def test_higher_floor_of_information_sends_words_deeper(base: str, tmp_path: Path) -> None:
    quick, spent = Schedule(epochs=1, batch_size=16), []
    for least in (1e-12, 0.02):
        (tmp_path / str(least)).mkdir()
        run_folder = factories.run_folder(
            base,
            tmp_path / str(least),
            "faster_dat",
            options={"bins": "width", "least": least, "deep": "rare"},
            schedule=quick,
        )
        spent.append(json.loads((run_folder / "points.json").read_text())["points"][-1]["mac_share"])
    assert spent[0] < spent[1]


@pytest.mark.parametrize("layers", [1, 2])
def test_calibration_skips_caps_that_change_nothing(base: str, tmp_path: Path, layers: int) -> None:
    quick = Schedule(epochs=4, batch_size=8, lr=0.01)
    run_folder = factories.run_folder(base, tmp_path, "faster_dat", options={"layers": layers}, schedule=quick)
    model = offramp.load(run_folder)
    tried = candidate_settings(model.network, model.model.method, None)  # type: ignore[arg-type]  # no recording is needed
    assert tried == [{"cap": cap} for cap in range(1, layers)] and model.points is not None
    assert not [w for w in model.points.warnings if "no setting is cheaper" in w or "collapsed" in w]


@pytest.mark.parametrize("kind", ["tagging", "pairs"])
def test_mi_serves_tagging_and_text_pairs(base: str, tmp_path: Path, kind: str) -> None:
    run_folder = factories.run_folder(base, tmp_path, "faster_dat", kind, schedule=Schedule(epochs=1, batch_size=16))
    assert json.loads((run_folder / "points.json").read_text())["points"][-1]["mac_share"] < 1.0


def test_mi_without_classes_is_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="estimation=reconstruction"):
        factories.run_folder(base, tmp_path, "faster_dat", "question_answering")


def test_reconstruction_stores_only_the_table(base: str, tmp_path: Path) -> None:
    options = {"estimation": "reconstruction", "spacing": 3, "rows": 20}
    quick = Schedule(epochs=1, batch_size=8, lr=0.005)
    run_folder = factories.run_folder(base, tmp_path, "faster_dat", "regression", options=options, schedule=quick)
    stages = [entry["stage"] for entry in folder.read_recipe(run_folder)["log"]]
    assert stages == ["train masked model", "fine-tune", "fine-tune planned depths"]
    saved = load_file(run_folder / "offramp.safetensors")
    assert not any(name.startswith("masked.model") for name in saved) and saved["depths.depths"].shape[1] == 8
    model = offramp.load(run_folder)
    texts = [row["text"] for row in factories.labelled_rows("regression", 6, seed=3)]
    rows = model.prepare([{"text": text} for text in texts])
    kept = [model.run(rows, FasterDATSettings(penalty=p)).tokens_kept.sum() for p in (0.0, 0.1, 0.2, 1.0)]
    assert kept == sorted(kept, reverse=True)  # a larger penalty never sends a word deeper
    assert model.run(rows, FasterDATSettings()).tokens_kept.sum() == kept[1]


@pytest.mark.parametrize("stage", [MaskedModelStage, PlannedDepthsStage])
def test_interrupted_run_resumes_to_the_same_result(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: type[Stage]
) -> None:
    def train(target: Path) -> Path:
        target.mkdir(exist_ok=True)
        options = {"estimation": "reconstruction", "rows": 10, "layers": 2}
        schedule = Schedule(epochs=1, batch_size=16, lr=0.005, save_seconds=0.0)
        return factories.run_folder(base, target, "faster_dat", options=options, schedule=schedule)

    uninterrupted = train(tmp_path / "uninterrupted")
    steps, real = 0, stage.step

    def fail_once(self: Stage, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise RuntimeError("interrupted")
        return real(self, batch, backward)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="interrupted"):
        patch.setattr(stage, "step", fail_once)
        train(tmp_path / "interrupted")
    again = train(tmp_path / "interrupted")
    for name in ("model.safetensors", "offramp.safetensors"):
        assert (again / name).read_bytes() == (uninterrupted / name).read_bytes()


def test_transductive_form_masks_every_word_and_counts_the_cost(base: str, tmp_path: Path) -> None:
    options = {"estimation": "reconstruction", "transductive": True}
    quick = Schedule(epochs=1, batch_size=16, lr=0.005)
    run_folder = factories.run_folder(base, tmp_path, "faster_dat", options=options, schedule=quick)
    model = offramp.load(run_folder)
    (full, *_) = reversed(json.loads((run_folder / "points.json").read_text())["points"])
    assert full["mac_share"] > 2.0
    rows = model.prepare([{"text": "the film is good"}, {"text": "a bad film"}])
    together, alone = model.run(rows, FasterDATSettings()), [model.run([row], FasterDATSettings()) for row in rows]
    assert together.macs.tolist() == [one.macs[0] for one in alone]
    assert together.exit_layer.tolist() == [one.exit_layer[0] for one in alone]
    passes = 4  # words of the first text, each masked once in a row of six tokens
    assert together.tokens_kept[0] >= passes * 6 + 6 / 3


def test_transductive_form_trains_words_at_their_run_time_depth(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """λ lies between those of the table, where an interpolated depth would be another one."""
    options = {"estimation": "reconstruction", "transductive": True, "penalty": 0.0021}
    stages: list[PlannedDepthsStage] = []
    real = PlannedDepthsStage.prepare
    monkeypatch.setattr(PlannedDepthsStage, "prepare", lambda self, *inputs: stages.append(self) or real(self, *inputs))
    run_folder = factories.run_folder(
        base, tmp_path, "faster_dat", options=options, schedule=Schedule(epochs=1, batch_size=16)
    )
    model = offramp.load(run_folder)
    rows = model.prepare(factories.labelled_rows("classification", 48, 0))
    packed = pack_rows(model.task, rows)
    masked, passes = model.network.added["masked"], MaskedPasses(3, 0)
    exact = estimate_depths(masked, packed, passes, torch.tensor([0.0021])).squeeze(1).long()  # type: ignore[arg-type]  # a Module
    assert torch.equal(torch.cat(stages[-1].own), exact)
