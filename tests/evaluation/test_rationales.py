"""Agreement with people, counted by hand; the study from end to end, and again without doing anything twice."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offramp import cli
from offramp.commands.train import run_training
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.evaluation import importance, rationale_runs, rationales
from offramp.evaluation.rationale_runs import STRATEGIES, Study
from offramp.inference import run_folder as folders
from offramp.nn.batches import pack_rows
from offramp.training.schedule import Schedule
from tests import runs


def truth(*marks: int) -> Any:
    return np.array(marks)


def test_average_precision_by_hand() -> None:
    """Right at ranks 1 and 3: (1/1 + 2/3) / 2."""
    assert rationales.average_precision(np.array([0.5, 0.3, 0.2]), truth(1, 0, 1)) == pytest.approx((1 + 2 / 3) / 2)
    assert rationales.average_precision(np.array([0.1, 0.9]), truth(1, 0)) == pytest.approx(0.5)
    assert rationales.average_precision(np.array([0.7, 0.2, 0.1]), truth(1, 0, 0)) == 1.0


def test_equal_scores_are_one_step() -> None:
    """All tokens gone: no order, so the precision of taking everything, wherever the marks stand."""
    flat = np.zeros(4)
    for marks in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1)):
        assert rationales.average_precision(flat, truth(*marks)) == 0.25


def test_average_precision_is_scikit_learns() -> None:
    from sklearn.metrics import average_precision_score

    draw = np.random.default_rng(0)
    for _ in range(20):
        scores, marks = draw.integers(0, 6, 15) / 10, np.append(draw.integers(0, 2, 14), 1)
        assert rationales.average_precision(scores, marks) == pytest.approx(average_precision_score(marks, scores))


def test_false_positive_rate_by_hand() -> None:
    """Of three unmarked words one stands above the level."""
    scores = np.array([0.4, 0.3, 0.2, 0.1])
    assert rationales.false_positive_rate(scores, truth(1, 0, 0, 0), 0.25) == pytest.approx(1 / 3)
    assert rationales.false_positive_rate(scores, truth(1, 1, 1, 1), 0.25) == 0.0


def test_pieces_are_summed_to_words() -> None:
    encoded = Encoded([2, 5, 6, 7, 3], [0] * 5, 0, [-1, 0, 0, 1, -1], [], 0)
    row = rationales.Marked(encoded, truth(1, 0), "x", ["ab", "c"])
    assert row.words(np.array([0.5, 0.1, 0.2, 0.15, 0.05])).tolist() == pytest.approx([0.3, 0.15])
    assert row.units == 4


def test_rollout_by_hand() -> None:
    first, second = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    made = importance.rollout(torch.stack([first, second]))
    lower, upper = torch.tensor([[1.0, 0.0], [0.25, 0.75]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    assert torch.allclose(made[0], lower) and torch.allclose(made[1], upper @ lower)


def reviews(count: int, seed: int) -> list[dict[str, Any]]:
    """Reviews whose marked words say everything; one row of each split has its mark beyond the window."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        words = draw.choices(runs.WORDS, k=draw.randint(6, 14))
        place, good = draw.randrange(len(words)), number % 2 == 0
        words[place] = "good" if good else "bad"
        marks = [int(i == place) for i in range(len(words))]
        made.append({"tokens": words, "rationale": marks, "label": int(good)})
    made[0] = {"tokens": ["film"] * 40, "rationale": [0] * 39 + [1], "label": 1}
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reviews")
    for split, count, seed in (("train", 32, 0), ("dev", 12, 1)):
        runs.jsonl(folder / f"{split}.jsonl", reviews(count, seed))
    return folder


@pytest.fixture(scope="module")
def done(base: str, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A finished study."""
    quick = Schedule(epochs=2, batch_size=8, lr=0.01)
    out = str(tmp_path_factory.mktemp("study") / "out")
    options, asked = {"phi": 0.05, "cut_lr": 0.1}, "offramp rationales data --out out"
    study = Study(str(data), out, base, max_length=24, options=options, schedule=quick, command=asked)
    rationale_runs.compare(study, run_training)
    rationale_runs.select(study, run_training)
    return study


def test_the_study_writes_tables_and_a_picture(done: Study) -> None:
    agreement = json.loads(done.folder("agreement.json").read_text())
    assert set(agreement["techniques"]) == {"saliency", "attention", "attention rollout", "contribution predictors"}
    assert agreement["rows"] == 11 and agreement["rows_without_marked_words"] == 1
    assert (agreement["command"], agreement["lr"]) == (done.command, 0.01), "whoever reads it can ask for it again"
    for own in agreement["techniques"].values():
        for values in own.values():
            assert len(values) == 3 and all(0 <= value <= 1 for value in values)
    assert done.folder("agreement.png").read_bytes()[:4] == b"\x89PNG"
    selection = json.loads(done.folder("selection.json").read_text())["strategies"]
    assert list(selection) == ["full input", *STRATEGIES] and selection["full input"]["mac_share"] == 1.0
    shares = {name: cell["mac_share"] for name, cell in selection.items()}
    assert all(0 < shares[name] < 0.9 for name in STRATEGIES)
    assert shares["saliency"] == shares["human"], "one word each, all of one piece"


def never(_: Any) -> None:
    raise AssertionError("trained again")


def test_the_study_goes_on_without_doing_anything_twice(done: Study) -> None:
    before = runs.files(Path(done.out))
    again = rationale_runs.compare(replace(done, command="the same from elsewhere"), never)
    done.folder("selection.json").unlink()
    assert rationale_runs.select(done, never)["strategies"] and runs.files(Path(done.out)) == before
    assert again["techniques"]


def test_a_folder_with_another_study_is_refused(done: Study) -> None:
    other = Study(done.data, done.out, done.model, max_length=32, options=done.options, schedule=done.schedule)
    with pytest.raises(OfframpError, match="choose another --out"):
        rationale_runs.compare(other, run_training)


def test_what_adapler_cannot_do_is_refused_before_anything_is_written(done: Study, tmp_path: Path) -> None:
    fresh = replace(done, out=str(tmp_path / "out"))
    for wrong in ({"scale": -1.0}, {"scale": float("nan")}, {"options": {"colour": "red"}}, {"options": {"phi": "-1"}}):
        for part in (rationale_runs.compare, rationale_runs.select):
            with pytest.raises(OfframpError):
                part(replace(fresh, **wrong), never)
    assert not Path(fresh.out).exists()


def test_another_scale_is_the_same_study_watched_again(done: Study, tmp_path: Path) -> None:
    own = replace(done, out=str(shutil.copytree(done.out, tmp_path / "own")))
    first, other = (rationale_runs.compare(replace(own, scale=scale), never) for scale in (1.0, 4.0))
    assert (first["scale"], other["scale"]) == (1.0, 4.0) and first["techniques"] != other["techniques"]
    assert json.loads(own.folder("agreement.json").read_text()) == other
    known = json.loads(own.folder("study.json").read_text())
    own.folder("study.json").write_text(json.dumps({**known, "scale": 1.0}))  # as older versions wrote it
    assert rationale_runs.compare(own, never) == first


def test_each_technique_gives_shares_of_a_row(done: Study) -> None:
    full, adapler = (folders.load_run(done.folder("runs", name)) for name in ("full", "adapler"))
    row = rationales.marked(full, rationales.rows_in(done.data, "dev", None))[0]
    for name, layers in rationales.techniques(full, adapler, row, 1.0).items():
        assert layers.shape == (3, len(row.encoded.ids)), name
        assert layers.sum(1) == pytest.approx(np.ones(3), abs=1e-4), name


def test_saliency_chooses_words_of_new_rows_without_their_labels(done: Study) -> None:
    full = folders.load_run(done.folder("runs", "full"))
    rows = rationales.marked(full, rationales.rows_in(done.data, "dev", None))
    labels = sorted({row.label for row in rows}, key=str)
    for row in rows[:6]:
        seen = {str(rationales.chosen(full, replace(row, label=label), "saliency", told=False)) for label in labels}
        assert len(seen) == 1


def test_raw_attention_is_what_the_loop_sees(done: Study) -> None:
    full = folders.load_run(done.folder("runs", "full"))
    row = rationales.marked(full, rationales.rows_in(done.data, "dev", None))[0]
    seen = importance.attentions(full.network, row.encoded.ids).mean(1)
    packed, net = pack_rows(full.network.task, [row.encoded]), full.network
    with torch.no_grad():
        states = net.encoder.embed(packed)
        _, scores = net.encoder.layers[0].attend(states, states, packed.layout, True, None)
    assert torch.allclose(seen[0], scores.columns / len(row.encoded.ids), atol=1e-5)
    assert net.hf.config._attn_implementation != "eager"


def test_words_of_the_text_are_the_tokens_of_the_row(done: Study) -> None:
    """What is trained on (joined text) and what is scored (words) give the model the same ids."""
    full = folders.load_run(done.folder("runs", "full"))
    rows = rationales.rows_in(done.data, "dev", None)[1:]
    texts = [{"text": " ".join(row["tokens"])} for row in rows]
    theirs = full.network.task.encode(full.tokenizer, texts, 24)
    assert [row.encoded.ids for row in rationales.marked(full, rows)] == [one.ids for one in theirs]


def test_the_command_shows_both_tables(done: Study, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rationales", done.data, "--out", done.out, "--model", done.model, "--max-length", "24", "--epochs", "2"]
    more = ["--batch-size", "8", "--lr", "0.01", "--set", "phi=0.05", "--set", "cut_lr=0.1"]
    (done.folder("study.json")).unlink()  # options as typed are text, those of the fixture numbers
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, *more])
    said = capsys.readouterr().out
    assert not stop.value.code and "rollout" in said and "attention from [CLS]" in said


def test_bad_folders_and_rows_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OfframpError, match="train and dev"):
        rationales.rows_in(str(tmp_path), "train", None)
    runs.jsonl(tmp_path / "train.jsonl", [{"tokens": ["a", "b"], "rationale": [1], "label": 0}])
    with pytest.raises(OfframpError, match="row 1"):
        rationales.rows_in(str(tmp_path), "train", None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["rationales", str(tmp_path), "--out", str(tmp_path / "o"), "--model", "x", "--part", "all"])
    assert stop.value.code == 2 and "agreement, selection or both" in capsys.readouterr().err
