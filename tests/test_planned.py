"""benchmarks/planned.py: lines go by what differs, seeds are one line with a spread, settings turn, JSON is written."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import planned

from offramp.training.schedule import Schedule
from tests import runs

TRAINED: dict[str, tuple[str, dict[str, Any], int]] = {  # method, options, seed
    "one": ("alberta", {"start": 0.0}, 1),
    "two": ("alberta", {"start": 0.0}, 2),
    "softmax": ("alberta", {"start": 0.0, "revpc": False}, 1),
    "full": ("full", {}, 1),
}
Measure = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs lie, each in a folder of its own, and rows to report on. Read only."""
    made = tmp_path_factory.mktemp("planned")
    for name, (method, options, seed) in TRAINED.items():
        (made / name).mkdir()
        schedule = Schedule(epochs=1, batch_size=16, lr=0.005, seed=seed)
        runs.train(base, made / name, method, options=options, schedule=schedule)
    runs.jsonl(made / "test.jsonl", runs.rows("classification", 12, seed=3))
    return made


@pytest.fixture
def measure(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """The script on some of the runs; what it wrote."""

    def run(names: str, *more: str) -> dict[str, Any]:
        given = [str(folder / name / "run") for name in names.split()]
        how = ["--data", str(folder / "test.jsonl"), "--batch-sizes", "1,4", "--timed", "5", "--rounds", "1"]
        monkeypatch.setattr(sys, "argv", ["planned.py", *given, *how, "--json", str(tmp_path / "t.json"), *more])
        planned.main()
        written: dict[str, Any] = json.loads((tmp_path / "t.json").read_text())
        return written

    return run


def test_lines_go_by_what_differs_and_seeds_are_one(
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
        whole = found["whole_stack"][size]
        assert seeds["speed_up"][size] == pytest.approx(seeds["rows_per_second"][size] / whole, rel=1e-3)
        assert seeds["rows_per_second_spread"][size] is not None and alone["rows_per_second_spread"][size] is None
    assert str(folder) not in json.dumps(found) and str(tmp_path) not in json.dumps(found)
    _, _, first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"| revpc=True | {seeds['score']:.4f} ± ") and "±" not in second
    assert second.startswith("| revpc=False |") and last.startswith("| the whole stack |")


def test_a_setting_turns_where_a_method_has_it(measure: Measure) -> None:
    found = measure("one full", "--setting", "gamma", "--values", "0,1")
    lines = {line["name"]: line for line in found["lines"]}
    assert list(lines) == ["method=alberta, gamma=0", "method=alberta, gamma=1", "method=full"]
    deep, short, full = lines.values()
    assert [line["mean_exit_layer"] for line in (deep, short, full)] == [3.0, 2.0, 3.0]
    assert short["mac_share"] < deep["mac_share"] and full["mac_share"] == 1.0
    assert short["cells"][0]["settings"]["gamma"] == 1.0


def test_where_nothing_differs_the_method_names_the_line(measure: Measure) -> None:
    found = measure("one two", "--set", "gamma=1", "--limit", "4")
    (line,) = found["lines"]
    assert line["name"] == "alberta" and line["seeds"] == [1, 2] and line["mean_exit_layer"] == 2.0


def test_a_line_is_the_mean_of_its_runs() -> None:
    compute = {"macs": {"share_of_full": 0.5}, "mean_exit_layer": 2.0, "mean_tokens_kept": 8.0}
    cells = [{"seed": seed, "metrics": {"f1": score}, **compute} for seed, score in ((1, 0.5), (2, 0.7))]
    cells[0]["tokens_by_layer"], cells[1]["tokens_by_layer"] = [1.0, 0.5], [1.0, 1.0]
    names = [("a", 0), ("a", 1)]
    speeds = {"8": {planned.FULL: 10.0, names[0]: 20.0, names[1]: 40.0}}
    (line,) = planned.lines_of(dict(zip(names, cells, strict=True)), speeds, "f1")
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
def test_bad_input_is_refused(
    measure: Measure, tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str, more: list[str], part: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        measure(names, *more)
    assert stop.value.code != 0 and part in f"{stop.value.code}{capsys.readouterr().err}"
    assert not (tmp_path / "t.json").exists()
