"""benchmarks/papers/adapler.py: metrics computed by hand, the study end to end, and no work repeated."""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.papers import adapler
from benchmarks.papers.adapler import STRATEGIES, RationaleStudy

from offramp.commands.train import run_training
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.inference import run_folder as folders
from offramp.nn.batches import pack_rows
from offramp.training.schedule import Schedule
from tests.factories import FILLERS, read_files, write_jsonl


def marks(*values: int) -> Any:
    return np.array(values)


def test_average_precision_by_hand() -> None:
    """Hits at ranks 1 and 3: (1/1 + 2/3) / 2."""
    assert adapler.average_precision(np.array([0.5, 0.3, 0.2]), marks(1, 0, 1)) == pytest.approx((1 + 2 / 3) / 2)
    assert adapler.average_precision(np.array([0.1, 0.9]), marks(1, 0)) == pytest.approx(0.5)
    assert adapler.average_precision(np.array([0.7, 0.2, 0.1]), marks(1, 0, 0)) == 1.0


def test_average_precision_counts_equal_scores_as_one_step() -> None:
    """If all tokens were dropped there is no order: the precision is that of taking every word."""
    flat = np.zeros(4)
    for values in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1)):
        assert adapler.average_precision(flat, marks(*values)) == 0.25


def test_average_precision_equals_scikit_learn() -> None:
    from sklearn.metrics import average_precision_score

    draw = np.random.default_rng(0)
    for _ in range(20):
        scores, values = draw.integers(0, 6, 15) / 10, np.append(draw.integers(0, 2, 14), 1)
        assert adapler.average_precision(scores, values) == pytest.approx(average_precision_score(values, scores))


def test_false_positive_rate_by_hand() -> None:
    """One of three unmarked words scores above the level."""
    scores = np.array([0.4, 0.3, 0.2, 0.1])
    assert adapler.false_positive_rate(scores, marks(1, 0, 0, 0), 0.25) == pytest.approx(1 / 3)
    assert adapler.false_positive_rate(scores, marks(1, 1, 1, 1), 0.25) == 0.0


def test_word_scores_sum_word_pieces() -> None:
    encoded = Encoded([2, 5, 6, 7, 3], [0] * 5, 0, [-1, 0, 0, 1, -1], [], 0)
    row = adapler.MarkedRow(encoded, marks(1, 0), "x", ["ab", "c"])
    assert row.word_scores(np.array([0.5, 0.1, 0.2, 0.15, 0.05])).tolist() == pytest.approx([0.3, 0.15])
    assert row.units == 4


def test_rollout_by_hand() -> None:
    first, second = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    flow = adapler.rollout(torch.stack([first, second]))
    lower, upper = torch.tensor([[1.0, 0.0], [0.25, 0.75]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    assert torch.allclose(flow[0], lower) and torch.allclose(flow[1], upper @ lower)


def reviews(count: int, seed: int) -> list[dict[str, Any]]:
    """Reviews whose marked word decides the label; the first row of each split has its mark beyond the window."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        words = draw.choices(FILLERS, k=draw.randint(6, 14))
        place, good = draw.randrange(len(words)), number % 2 == 0
        words[place] = "good" if good else "bad"
        rationale = [int(i == place) for i in range(len(words))]
        rows.append({"tokens": words, "rationale": rationale, "label": int(good)})
    rows[0] = {"tokens": ["film"] * 40, "rationale": [0] * 39 + [1], "label": 1}
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reviews")
    for split, count, seed in (("train", 32, 0), ("dev", 12, 1)):
        write_jsonl(folder / f"{split}.jsonl", reviews(count, seed))
    return folder


@pytest.fixture(scope="module")
def finished(base: str, data: Path, tmp_path_factory: pytest.TempPathFactory) -> RationaleStudy:
    """A finished study."""
    quick = Schedule(epochs=2, batch_size=8, lr=0.01)
    out = str(tmp_path_factory.mktemp("study") / "out")
    options, command = {"phi": 0.05, "cut_lr": 0.1}, f"{adapler.PROGRAM} data --out out"
    study = RationaleStudy(str(data), out, base, max_length=24, options=options, schedule=quick, command=command)
    adapler.measure_agreement(study, run_training)
    adapler.measure_selection(study, run_training)
    return study


def test_study_writes_tables_and_a_picture(finished: RationaleStudy) -> None:
    agreement = json.loads(finished.path("agreement.json").read_text())
    assert set(agreement["techniques"]) == {"saliency", "attention", "attention rollout", "contribution predictors"}
    assert agreement["rows"] == 11 and agreement["rows_without_marked_words"] == 1
    assert (agreement["command"], agreement["lr"]) == (finished.command, 0.01)
    for own in agreement["techniques"].values():
        for values in own.values():
            assert len(values) == 3 and all(0 <= value <= 1 for value in values)
    assert finished.path("agreement.png").read_bytes()[:4] == b"\x89PNG"
    selection = json.loads(finished.path("selection.json").read_text())["strategies"]
    assert list(selection) == ["full input", *STRATEGIES] and selection["full input"]["mac_share"] == 1.0
    shares = {name: cell["mac_share"] for name, cell in selection.items()}
    assert all(0 < shares[name] < 0.9 for name in STRATEGIES)
    assert shares["saliency"] == shares["human"], "each keeps one word of one piece"


def never(_: Any) -> None:
    raise AssertionError("trained again")


def test_study_repeats_no_finished_work(finished: RationaleStudy) -> None:
    before = read_files(Path(finished.out))
    again = adapler.measure_agreement(replace(finished, command="another command"), never)
    finished.path("selection.json").unlink()
    assert adapler.measure_selection(finished, never)["strategies"] and read_files(Path(finished.out)) == before
    assert again["techniques"]


def test_folder_with_another_study_is_refused(finished: RationaleStudy) -> None:
    with pytest.raises(OfframpError, match="--out"):
        adapler.measure_agreement(replace(finished, max_length=32), run_training)


def test_bad_options_are_refused_before_anything_is_written(finished: RationaleStudy, tmp_path: Path) -> None:
    fresh = replace(finished, out=str(tmp_path / "out"))
    for wrong in ({"scale": -1.0}, {"scale": float("nan")}, {"options": {"colour": "red"}}, {"options": {"phi": "-1"}}):
        for part in (adapler.measure_agreement, adapler.measure_selection):
            with pytest.raises(OfframpError):
                part(replace(fresh, **wrong), never)
    assert not Path(fresh.out).exists()


def test_another_scale_is_measured_on_the_same_runs(finished: RationaleStudy, tmp_path: Path) -> None:
    own = replace(finished, out=str(shutil.copytree(finished.out, tmp_path / "own")))
    first, other = (adapler.measure_agreement(replace(own, scale=scale), never) for scale in (1.0, 4.0))
    assert (first["scale"], other["scale"]) == (1.0, 4.0) and first["techniques"] != other["techniques"]
    assert json.loads(own.path("agreement.json").read_text()) == other
    known = json.loads(own.path("study.json").read_text())
    own.path("study.json").write_text(json.dumps({**known, "scale": 1.0}))  # as older versions wrote it
    assert adapler.measure_agreement(own, never) == first


def test_importance_shares_of_a_row_sum_to_one(finished: RationaleStudy) -> None:
    full, trained = (folders.load_run(finished.path("runs", name)) for name in ("full", "adapler"))
    row = adapler.encode_marked(full, adapler.read_marked_rows(finished.data, "dev", None))[0]
    for name, layers in adapler.importance_shares(full, trained, row, 1.0).items():
        assert layers.shape == (3, len(row.encoded.ids)), name
        assert layers.sum(1) == pytest.approx(np.ones(3), abs=1e-4), name


def test_saliency_can_choose_words_without_labels(finished: RationaleStudy) -> None:
    full = folders.load_run(finished.path("runs", "full"))
    rows = adapler.encode_marked(full, adapler.read_marked_rows(finished.data, "dev", None))
    labels = sorted({row.label for row in rows}, key=str)
    for row in rows[:6]:
        chosen = [adapler.choose_words(full, replace(row, label=label), "saliency", False) for label in labels]
        assert all(words == chosen[0] for words in chosen)


def test_attention_equals_the_scores_of_the_encoder(finished: RationaleStudy) -> None:
    full = folders.load_run(finished.path("runs", "full"))
    row = adapler.encode_marked(full, adapler.read_marked_rows(finished.data, "dev", None))[0]
    received = adapler.attentions(full.network, row.encoded.ids).mean(1)
    packed, network = pack_rows(full.network.task, [row.encoded]), full.network
    with torch.no_grad():
        states = network.encoder.embed(packed)
        _, scores = network.encoder.layers[0].attend(states, states, packed.layout, True, None)
    assert torch.allclose(received[0], scores.columns / len(row.encoded.ids), atol=1e-5)
    assert network.hf.config._attn_implementation != "eager"


def test_joined_text_and_words_give_the_same_token_ids(finished: RationaleStudy) -> None:
    """Training reads the joined text; scoring reads the words."""
    full = folders.load_run(finished.path("runs", "full"))
    rows = adapler.read_marked_rows(finished.data, "dev", None)[1:]
    texts = [{"text": " ".join(row["tokens"])} for row in rows]
    encoded = full.network.task.encode(full.tokenizer, texts, 24)
    assert [row.encoded.ids for row in adapler.encode_marked(full, rows)] == [item.ids for item in encoded]


def test_script_prints_both_tables(
    finished: RationaleStudy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [finished.data, "--out", finished.out, "--model", finished.model, "--max-length", "24", "--epochs", "2"]
    more = ["--batch-size", "8", "--lr", "0.01", "--set", "phi=0.05", "--set", "cut_lr=0.1"]
    finished.path("study.json").unlink()  # options from the command line are text, those of the fixture numbers
    monkeypatch.setattr(sys, "argv", ["adapler.py", *words, *more])
    adapler.main()
    printed = capsys.readouterr().out
    assert "rollout" in printed and "attention from [CLS]" in printed


def test_bad_folders_and_rows_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OfframpError, match="train and dev"):
        adapler.read_marked_rows(str(tmp_path), "train", None)
    write_jsonl(tmp_path / "train.jsonl", [{"tokens": ["a", "b"], "rationale": [1], "label": 0}])
    with pytest.raises(OfframpError, match="row 1"):
        adapler.read_marked_rows(str(tmp_path), "train", None)
    with pytest.raises(SystemExit) as stop:
        adapler.main([str(tmp_path), "--out", str(tmp_path / "o"), "--model", "x", "--part", "all"])
    assert stop.value.code == 2 and "agreement" in capsys.readouterr().err
