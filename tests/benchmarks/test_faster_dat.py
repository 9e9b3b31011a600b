"""benchmarks/papers/faster_dat.py: tables of planned depths and depths of words, from tiny runs."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.papers import faster_dat
from benchmarks.papers.faster_dat import DepthHistogram
from matplotlib.image import imread

from offramp.training.schedule import Schedule
from tests.factories import labelled_rows, run_folder, write_jsonl

TRAINED: dict[str, tuple[str, dict[str, Any], int]] = {  # method, options, seed
    "one": ("alberta", {"start": 0.0}, 1),
    "two": ("alberta", {"start": 0.0}, 2),
    "softmax": ("alberta", {"start": 0.0, "revpc": False}, 1),
    "full": ("full", {}, 1),
}
Measure = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, each in a folder of its own, with rows to report on. Read only."""
    folder = tmp_path_factory.mktemp("planned")
    for name, (method, options, seed) in TRAINED.items():
        (folder / name).mkdir()
        schedule = Schedule(epochs=1, batch_size=16, lr=0.005, seed=seed)
        run_folder(base, folder / name, method, options=options, schedule=schedule)
    write_jsonl(folder / "test.jsonl", labelled_rows("classification", 12, seed=3))
    return folder


@pytest.fixture
def measure(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Run the script on some of the runs and return what it wrote."""

    def run(names: str, *more: str) -> dict[str, Any]:
        given = [str(folder / name / "run") for name in names.split()]
        how = ["--data", str(folder / "test.jsonl"), "--batch-sizes", "1,4", "--timed", "5", "--rounds", "1"]
        monkeypatch.setattr(
            sys, "argv", ["faster_dat.py", "table", *given, *how, "--json", str(tmp_path / "t.json"), *more]
        )
        faster_dat.main()
        written: dict[str, Any] = json.loads((tmp_path / "t.json").read_text())
        return written

    return run


def test_lines_are_named_by_what_differs_and_average_seeds(
    measure: Measure, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure("one two softmax")
    assert [(line["name"], line["seeds"]) for line in found["lines"]] == [("revpc=True", [1, 2]), ("revpc=False", [1])]
    seeds, alone = found["lines"]
    scores = [cell["metrics"]["accuracy"] for cell in seeds["cells"]]
    assert seeds["score"] == pytest.approx(statistics.fmean(scores), abs=1e-6)
    assert seeds["spread"] == pytest.approx(statistics.stdev(scores), abs=1e-6) and alone["spread"] is None
    assert found["metric"] == "accuracy" and found["rows"] == 12 and found["timed_rows"] == 5
    for size in ("1", "4"):
        full = found["whole_stack"][size]
        assert seeds["speed_up"][size] == pytest.approx(seeds["rows_per_second"][size] / full, rel=1e-3)
        assert seeds["rows_per_second_spread"][size] is not None and alone["rows_per_second_spread"][size] is None
    assert str(folder) not in json.dumps(found) and str(tmp_path) not in json.dumps(found)
    _, _, first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"| revpc=True | {seeds['score']:.4f} ± ") and "±" not in second
    assert second.startswith("| revpc=False |") and last.startswith("| the whole stack |")


def test_setting_is_varied_where_the_method_has_it(measure: Measure) -> None:
    found = measure("one full", "--setting", "gamma", "--values", "0,1")
    lines = {line["name"]: line for line in found["lines"]}
    assert list(lines) == ["method=alberta, gamma=0", "method=alberta, gamma=1", "method=full"]
    deep, short, full = lines.values()
    assert [line["mean_exit_layer"] for line in (deep, short, full)] == [3.0, 2.0, 3.0]
    assert short["mac_share"] < deep["mac_share"] and full["mac_share"] == 1.0
    assert short["cells"][0]["settings"]["gamma"] == 1.0


def test_line_is_named_by_its_method_if_nothing_differs(measure: Measure) -> None:
    found = measure("one two", "--set", "gamma=1", "--limit", "4")
    (line,) = found["lines"]
    assert line["name"] == "alberta" and line["seeds"] == [1, 2] and line["mean_exit_layer"] == 2.0


def test_average_lines_joins_runs_of_one_name() -> None:
    compute = {"macs": {"share_of_full": 0.5}, "mean_exit_layer": 2.0, "mean_tokens_kept": 8.0}
    cells = [{"seed": seed, "metrics": {"f1": score}, **compute} for seed, score in ((1, 0.5), (2, 0.7))]
    cells[0]["tokens_by_layer"], cells[1]["tokens_by_layer"] = [1.0, 0.5], [1.0, 1.0]
    names = [("a", 0), ("a", 1)]
    speeds = {"8": {faster_dat.FULL: 10.0, names[0]: 20.0, names[1]: 40.0}}
    (line,) = faster_dat.average_lines(dict(zip(names, cells, strict=True)), speeds, "f1")
    assert (line["name"], line["score"], line["spread"]) == ("a", 0.6, 0.141421)
    assert line["mean_token_depth"] == 1.75 and line["mac_share"] == 0.5
    assert line["rows_per_second"] == {"8": 30.0} and line["speed_up"] == {"8": 3.0}


@pytest.mark.parametrize(
    ("names", "more", "part"),
    [
        ("one one", [], "alike in options and seed"),
        ("one", ["--setting", "gama", "--values", "0"], "gamma"),
        ("one", ["--setting", "gamma"], "belong together"),
        ("one", ["--set", "gamma=1", "--max-loss", "0.1"], "not both"),
        ("one", ["--set", "gamma"], "name=value"),
    ],
)
def test_bad_table_options_are_refused(
    measure: Measure, tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str, more: list[str], part: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        measure(names, *more)
    assert stop.value.code != 0 and part in f"{stop.value.code}{capsys.readouterr().err}"
    assert not (tmp_path / "t.json").exists()


HISTOGRAM = DepthHistogram(3, ["a", "$5", "gem"], [3, 2, 1], different=[1, 1, 8], running=[10, 4, 6])


def test_histogram_lines_show_words_shares_and_the_mean() -> None:
    lines = faster_dat.histogram_lines(HISTOGRAM)
    assert [line.split() for line in lines[:3]] == [["a", "3", "███"], ["$5", "2", "██"], ["gem", "1", "█"]]
    assert lines[5].split() == ["1", "1", "10.0%", "10", "50.0%"] and "1.80 of 3" in lines[-1]
    assert HISTOGRAM.to_json()["mean_depth"] == pytest.approx(1.8)


@pytest.mark.parametrize(("words", "size"), [(3, (960, 1080, 4)), (0, (480, 1080, 4))])
def test_draw_word_depths_with_or_without_a_sentence(tmp_path: Path, words: int, size: tuple[int, ...]) -> None:
    histogram = DepthHistogram(3, HISTOGRAM.words[:words], HISTOGRAM.depths[:words], [1, 1, 8], [10, 4, 6])
    faster_dat.draw_word_depths(histogram, "a title", tmp_path / "d.png")
    assert imread(tmp_path / "d.png").shape == size


@pytest.fixture(scope="module")
def planned(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    return run_folder(base, folder, "faster_dat", schedule=Schedule(epochs=1, batch_size=16))


def word_depths(*words: object) -> dict[str, Any]:
    """Run `words` with --json as the last argument and return what it wrote."""
    faster_dat.main(["words", *map(str, words)])
    numbers: dict[str, Any] = json.loads(Path(str(words[-1])).read_text())
    return numbers


def test_words_shows_a_sentence_and_counts_words(
    planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, path = "the good playing", tmp_path / "d.json"
    all_words = word_depths(planned, text, "--json", path)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:3]] == text.split()
    rows = [json.loads(line) for line in (planned.parent / "train.jsonl").read_text().splitlines()]
    running = [word for row in rows for word in row["text"].split()]
    assert sum(all_words["different"]) == len(set(running)) and sum(all_words["running"]) == len(running)
    of_rows = word_depths(planned, "--data", planned.parent / "train.jsonl", "--json", path)
    assert of_rows["running"] == all_words["running"]
    assert word_depths(planned, text, "--set", "cap=1", "--json", path)["depths"] == [1, 1, 1]


def test_words_refuses_other_methods_and_too_many_texts(planned: Path, trained: Path) -> None:
    with pytest.raises(SystemExit, match="branchynet"):
        faster_dat.main(["words", str(trained), "the film"])
    with pytest.raises(SystemExit, match="2 texts"):
        faster_dat.main(["words", str(planned), "the film", "is good"])
