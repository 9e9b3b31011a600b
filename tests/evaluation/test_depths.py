"""Word depths as text, as numbers and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from offramp import cli
from offramp.evaluation.depths import Depths, draw, lines
from offramp.training.schedule import Schedule
from tests import runs

SHOWN = Depths(3, ["a", "$5", "gem"], [3, 2, 1], different=[1, 1, 8], running=[10, 4, 6])


def test_text_says_every_word_and_the_mean() -> None:
    told = lines(SHOWN)
    assert told[:3] == ["a       3  ███", "$5      2  ██", "gem     1  █"]
    assert told[5].split() == ["1", "1", "10.0%", "10", "50.0%"]
    assert told[-1] == "mean depth of running words: 1.80 of 3 layers"
    assert SHOWN.to_json()["mean_depth"] == pytest.approx(1.8)


@pytest.mark.parametrize(("words", "size"), [(3, (960, 1080, 4)), (0, (480, 1080, 4))])
def test_a_picture_with_or_without_a_sentence(tmp_path: Path, words: int, size: tuple[int, ...]) -> None:
    draw(Depths(3, SHOWN.words[:words], SHOWN.depths[:words], [1, 1, 8], [10, 4, 6]), "a title", tmp_path / "d.png")
    assert imread(tmp_path / "d.png").shape == size


@pytest.fixture(scope="module")
def planned(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    return runs.train(base, folder, "faster_dat", schedule=Schedule(epochs=1, batch_size=16))


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    told = capsys.readouterr()
    return int(stop.value.code or 0), told.out, told.err


def test_the_command_shows_a_sentence_and_counts_the_words_of_rows(
    planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = said(capsys, "depths", planned, "the good playing", "--json", tmp_path / "d.json")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[:3]] == ["the", "good", "playing"]
    whole = json.loads((tmp_path / "d.json").read_text())
    rows = [json.loads(line) for line in (planned.parent / "train.jsonl").read_text().splitlines()]
    running = [word for row in rows for word in row["text"].split()]
    assert sum(whole["different"]) == len(set(running)) and sum(whole["running"]) == len(running)
    again = ("--data", planned.parent / "train.jsonl", "--json", tmp_path / "e.json")
    assert said(capsys, "depths", planned, *again)[0] == 0
    assert json.loads((tmp_path / "e.json").read_text())["running"] == whole["running"]
    capped = ("--set", "cap=1", "--json", tmp_path / "f.json")
    assert said(capsys, "depths", planned, "the good playing", *capped)[0] == 0
    assert json.loads((tmp_path / "f.json").read_text())["depths"] == [1, 1, 1]


def test_bad_questions_get_one_clear_answer(planned: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "depths", trained, "the film")
    assert code == 2 and "give a run of faster_dat" in err
    code, _, err = said(capsys, "depths", planned, "the film", "is good")
    assert code == 2 and "2 texts" in err
