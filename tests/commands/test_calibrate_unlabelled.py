"""`offramp calibrate` on texts without labels: points for a disagreement, beside those that labelled rows found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import offramp
from offramp.data.readers import read_rows
from offramp.engines import EngineOptions
from offramp.errors import OfframpError
from offramp.inference.operating_points import load_points
from tests import factories


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A run of its own, to write to."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def texts(folder: Path, count: int = 400) -> str:
    """Write unlabelled texts, one a line."""
    rows = factories.labelled_rows("classification", count, seed=21)
    path = folder / "texts.txt"
    path.write_text("".join(f"{row['text']}\n" for row in rows), encoding="utf-8")
    return str(path)


def labelled(folder: Path, count: int = 200) -> str:
    return factories.write_jsonl(folder / "rows.jsonl", factories.labelled_rows("classification", count, seed=22))


def test_texts_without_labels_add_points_for_a_disagreement(run: Path, tmp_path: Path) -> None:
    before = load_points(run)
    with pytest.warns(UserWarning, match="have no 'label': only points for a disagreement"):
        found = offramp.calibrate(run, texts(tmp_path))
    assert found.points == before.points and found.metric == before.metric  # what labelled rows found is kept
    assert [one.limit for one in found.disagreements] == sorted(one.limit for one in found.disagreements)
    assert {(one.engine, one.precision, one.rows) for one in found.disagreements} == {("torch", "fp32", 267)}
    model, full = offramp.load(run), offramp.load(run).predict(["a good film"] * 2, budget=1.0)
    assert model.predict(["a good film"] * 2, max_disagreement=0.05)[0]["label"] == full[0]["label"]


@pytest.mark.filterwarnings("ignore:rows of")
def test_labelled_rows_keep_the_points_for_a_disagreement(run: Path, tmp_path: Path) -> None:
    offramp.calibrate(run, texts(tmp_path))
    before = load_points(run).disagreements
    after = offramp.calibrate(run, labelled(tmp_path), force=True)
    assert before and after.disagreements == before == load_points(run).disagreements


def test_a_risk_is_not_proven_on_training_rows(run: Path, trained: Path) -> None:
    before = (run / "points.json").read_bytes()
    with pytest.raises(OfframpError, match="rows the model was trained on"):
        offramp.calibrate(run, trained.parent / "train.jsonl", risk=0.5, confidence=0.5, force=True)
    assert (run / "points.json").read_bytes() == before


@pytest.mark.filterwarnings("ignore:rows of")
def test_texts_that_were_seen_in_training_are_left_out(run: Path, trained: Path, tmp_path: Path) -> None:
    seen = [{"text": row["text"]} for row in read_rows(str(trained.parent / "train.jsonl"))]
    new = [{"text": row["text"]} for row in factories.labelled_rows("classification", 120, seed=23)]
    new = [row for row in new if row not in seen]
    source = factories.write_jsonl(tmp_path / "mixed.jsonl", [*seen[:30], *new])
    with pytest.warns(UserWarning, match=f"30 of {30 + len(new)} rows(.|\\n)*left out"):
        found = offramp.calibrate(run, source)
    assert {one.rows for one in found.disagreements} == {len(new) - len(new) // 3}


@pytest.mark.filterwarnings("ignore:rows of")
def test_a_risk_is_proven_without_labels(run: Path, tmp_path: Path) -> None:
    found = offramp.calibrate(run, texts(tmp_path), risk=0.05)
    assert [one.risk for one in found.guarantees] == [0.05]
    assert offramp.load(run).settings(risk=0.05)


def test_too_few_texts_are_refused_and_change_nothing(run: Path, tmp_path: Path) -> None:
    before = (run / "points.json").read_bytes()
    with pytest.raises(OfframpError, match="--column label="):
        offramp.calibrate(run, texts(tmp_path, 5))
    assert (run / "points.json").read_bytes() == before


def test_far_fewer_texts_than_before_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning):
        offramp.calibrate(run, texts(tmp_path))
    with pytest.raises(OfframpError, match="267"), pytest.warns(UserWarning):
        offramp.calibrate(run, texts(tmp_path, 60))


def test_what_needs_labels_is_refused_without(run: Path, tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="--latency"):
        offramp.calibrate(run, texts(tmp_path), latency="5ms")
    with pytest.raises(OfframpError, match="--close-exit"):
        offramp.calibrate(run, texts(tmp_path), closed_exits=[0])


@pytest.mark.filterwarnings("ignore:rows of")
def test_texts_that_were_trained_on_prove_nothing(run: Path, trained: Path, tmp_path: Path) -> None:
    rows = [{"text": row["text"]} for row in read_rows(str(trained.parent / "train.jsonl"))]
    source = factories.write_jsonl(tmp_path / "trained-on.jsonl", rows)
    with pytest.warns(UserWarning, match="nothing is proven"):
        found = offramp.calibrate(run, source)
    assert not any(one.proven for one in found.disagreements)


@pytest.mark.filterwarnings("ignore:rows of")
def test_a_disagreement_in_another_precision_is_warned_about(run: Path, tmp_path: Path) -> None:
    offramp.calibrate(run, texts(tmp_path))
    model = offramp.load(run)
    model.how = EngineOptions("bf16")
    with pytest.warns(UserWarning, match=r"max_disagreement=0\.05 was tested on torch fp32(.|\n)*--precision bf16"):
        model.settings(max_disagreement=0.05)
