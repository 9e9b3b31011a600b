"""Model results become table lines: means over seeds, shares at a loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offramp.evaluation.collect import collect_results, model_result
from offramp.evaluation.tables import COLUMNS, latex_table, markdown_tables, mean_and_spread, table_lines
from tests.evaluation.result_files import cell, curve_cells, perplexity_cells, write_results

BELOW = COLUMNS.index("≤ 1.0 below full")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_results(tmp_path)


def test_table_line_is_the_mean_over_seeds(folder: Path) -> None:
    found = table_lines(collect_results(folder).entries)
    both = next(line for line in found if line.section == "exits" and line.cells[0] == "branchynet")
    assert both.cells == ("branchynet", "tiny", "91.0 ± 1.4", "90.0 at 0.400", "–", "–", "0.400", "0.400", "0.750",
                          "0.400", "–", "accuracy", "2")  # fmt: skip
    assert both.files == ("exits/a.json", "exits/b.json")
    assert "| branchynet | tiny | 91.0 ± 1.4 |" in markdown_tables(found) and r"91.0 $\pm$ 1.4" in latex_table(found)


def test_models_from_different_starts_are_not_averaged(tmp_path: Path) -> None:
    for name, init in (("a", "runs/full"), ("b", None)):
        (tmp_path / f"{name}.json").write_text(json.dumps(cell(trained={"init": init})))
    assert [line.cells[0] for line in table_lines(collect_results(tmp_path).entries)] == [
        "branchynet, from the pretrained model", "branchynet",
    ]  # fmt: skip


def test_model_is_compared_with_fine_tuning_of_the_same_model(folder: Path) -> None:
    other = [{**one, "model": "large"} for one in curve_cells(1, 0.95, [(0.1, 0.90), (1.0, 0.95)])]
    (folder / "exits/large.json").write_text(json.dumps(other))
    assert [line.cells[BELOW] for line in table_lines(collect_results(folder).entries) if line.cells[1] == "large"] == [
        "–"
    ]
    (folder / "exits/large-full.json").write_text(json.dumps(cell("full", score=0.91, model="large")))
    assert [line.cells[BELOW] for line in table_lines(collect_results(folder).entries) if line.cells[1] == "large"] == [
        "0.100",
        "1.000",
    ]


def test_lowest_share_and_mean_and_spread() -> None:
    one = model_result(curve_cells(1, 0.9, [(0.1, 0.5), (0.2, 0.895), (0.6, 0.899)]), "a.json")
    assert one.lowest_share(0.9, 0.005) == 0.2 and one.lowest_share(0.9, 0.0) is None
    assert mean_and_spread([1.0]) == "1.0" and mean_and_spread([1.0, 3.0]) == "2.0 ± 1.4"


def test_loss_is_measured_in_the_units_of_the_metric(tmp_path: Path) -> None:
    curve = [{"share_of_full": share, "metrics": {"bleu": bleu}} for share, bleu in ((0.6, 34.3), (1.0, 34.5))]
    content = cell(metrics={"bleu": 34.5}, chosen={"by": "full", "value": None}, curve=curve)
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert table_lines(collect_results(tmp_path).entries)[0].cells[6:8] == ("0.600", "0.600")


@pytest.mark.parametrize("more", [{}, {"higher_is_better": False}])  # cells of earlier versions have no such field
def test_a_perplexity_loses_where_it_grows(tmp_path: Path, more: dict[str, Any]) -> None:
    first, picked = perplexity_cells(5.0, [(0.2, 9.0), (0.6, 5.04), (1.0, 5.0)])
    (tmp_path / "a.json").write_text(json.dumps([{**first, **more}, {**picked, **more}]))
    (tmp_path / "full.json").write_text(json.dumps({**perplexity_cells(4.97, [(1.0, 4.97)])[0], "method": "full"}))
    line = next(one for one in cells_of(tmp_path) if one["method"] == "branchynet")
    assert (line["curve ≤ 0.5"], line["curve ≤ 1.0"]) == ("1.000", "0.600")
    assert (line["≤ 1.0 below full"], line["≤ 2.0 below full"]) == ("1.000", "0.600")


def test_the_direction_of_an_unknown_metric_is_that_of_its_cell() -> None:
    other = {"metrics": {"surprise": 5.0}, "curve": [], "higher_is_better": False}
    assert model_result([cell(**other)], "a.json").loss_of(5.5, 5.0) == pytest.approx(0.1)
    assert model_result([cell()], "a.json").loss_of(0.85, 0.9) == pytest.approx(0.05)
    assert model_result([cell(metrics={"bleu": 30.0})], "a.json").loss_of(29.0, 30.0) == pytest.approx(0.01)


def cells_of(folder: Path, benches: Sequence[Any] = ()) -> list[dict[str, str]]:
    lines = table_lines(collect_results(folder).entries, benches)
    return [dict(zip(("table", *COLUMNS), (line.table, *line.cells), strict=True)) for line in lines]


@pytest.mark.parametrize(
    "more", [{"chosen": {"by": "budget", "value": 0.1}}, {"command": "offramp eval r --budget 0.1"}]
)
def test_a_cell_of_a_budget_is_not_full_depth(tmp_path: Path, more: dict[str, Any]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(cell(share=0.098, score=0.71, **more)))
    (line,) = cells_of(tmp_path)
    assert line["full depth"] == "–" and line["other points"] == "budget 0.1: 71.0 at 0.098"
    (tmp_path / "b.json").write_text(json.dumps(cell(share=1.0, score=0.9, chosen={"by": "full", "value": None})))
    (line,) = cells_of(tmp_path)
    assert line["full depth"] == "90.0" and line["other points"] == "budget 0.1: 71.0 at 0.098"
    assert line["curve ≤ 1.0"] == "1.000"


def test_two_files_of_one_folder_are_two_lines_without_a_spread(tmp_path: Path) -> None:
    for split, score in (("easy", 0.9), ("hard", 0.6)):
        (tmp_path / f"{split}.json").write_text(json.dumps(cell("full", score=score, split=split)))
    lines = cells_of(tmp_path)
    assert [(one["table"], one["full depth"]) for one in lines] == [("sst2/easy", "90.0"), ("sst2/hard", "60.0")]


def test_times_come_from_the_bench_that_is_named_after_the_result(tmp_path: Path) -> None:
    (tmp_path / "default-tiny-s1.json").write_text(json.dumps(cell()))
    rows = [{"engine": "torch", "precision": "fp32", "batch_size": 1, "order": "given", "rows_per_second": rate,
             "budget": budget} for budget, rate in ((1.0, 100.0), ("max-loss=0.01", 250.0))]  # fmt: skip
    timed = {"data": "sst2/dev", "method": "branchynet", "model": "tiny", "rows": rows}
    assert [one["ms a row"] for one in cells_of(tmp_path, [("sst2/bench/branchynet-tiny-s1.json", timed)])] == [
        "10.00 → 4.00"
    ]
    assert [one["ms a row"] for one in cells_of(tmp_path, [("sst2/bench/other-tiny-s1.json", timed)])] == ["–"]
