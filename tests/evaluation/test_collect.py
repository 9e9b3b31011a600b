"""Result files become model results, table lines and a report; damaged files are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offramp.cli import main
from offramp.commands.report import report
from offramp.errors import OfframpError
from offramp.evaluation.collect import CurvePoint, collect_results, join_families, lowest_share
from offramp.evaluation.tables import latex_table, markdown_tables, mean_and_spread, table_lines


def cell(method: str = "branchynet", share: float = 1.0, score: float = 0.9, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "settings": {}, "model": "tiny", "data": "sst2", "split": "dev", "rows": 10, "seed": 42,
        "metrics": {"accuracy": score}, "macs": {"mean": 1, "share_of_full": share}, "mean_exit_layer": 1.0,
        "exit_histogram": {"0": 4, "1": 6}, "mean_tokens_kept": 1.0, "hardware": "h", "command": "offramp eval",
        "version": "0", "date": "2026-01-01", **more,
    }  # fmt: skip


def curve_cells(seed: int, full: float, points: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """Return what `eval --curve` writes."""
    curve = [{"share_of_full": share, "metrics": {"accuracy": score}} for share, score in points]
    first = cell(score=full, seed=seed, chosen={"by": "full", "value": None}, curve=curve)
    picked = cell(share=0.4, score=full - 0.01, seed=seed, chosen={"by": "max_loss", "value": 0.01})
    return [first, picked]


def bench() -> dict[str, Any]:
    """Return the fields of a bench file that reports read."""
    rows = [
        {"engine": engine, "precision": "fp32", "peer": engine == "hf-sdpa", "batch_size": size, "order": "given",
         "rows_per_second": rate * size, "metrics": {"f1": 0.1, "accuracy": score}, "budget": budget, "mac_share": 0.5}
        for size in (1, 32)
        for engine, budget, rate, score in (
            ("torch", 1.0, 90, 0.9), ("torch", 0.5, 170, 0.88), ("hf-sdpa", None, 60, 0.9),
        )
    ]  # fmt: skip
    about = {"data": "sst2/dev", "model": "tiny", "method": "branchynet", "metric": "accuracy", "seed": 42}
    return {**about, "hardware": "h", "command": "offramp bench", "rows": rows}


def speed_by_length() -> dict[str, Any]:
    """Return what benchmarks/speed_by_length.py writes."""
    groups = [{"mean_tokens": 2.0**n, "ms": 1.0 * n, "ms_full": 2.0 * n} for n in (3, 4, 5)]
    return {"method": "branchynet", "model": "tiny", "data": "sst2", "hardware": "h", "engine": "torch",
            "precision": "fp32", "batch_size": 32, "command": "speed_by_length.py", "lengths": groups}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "exits/a.json": curve_cells(1, 0.90, [(0.2, 0.80), (0.3, 0.895), (1.0, 0.90)]),
        "exits/b.json": curve_cells(2, 0.92, [(0.5, 0.915), (1.0, 0.92)]),
        "exits/full.json": cell("full", score=0.91, seed=1),
        "speed/x-0.4.json": cell(share=0.4, score=0.8),
        "speed/x-1.0.json": cell(share=1.0, score=0.9),
        "speed/bench.json": bench(),
        "speed/lengths.json": speed_by_length(),
        "speed/other.json": {"anything": 1},
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "exits/torn.json").write_text('{"method": ')
    bad = {"no-macs": cell(macs=None), "empty": cell(metrics={}), "nan": cell(score=float("nan"))}
    bad |= {"no-method": {"hardware": "h", "rows": [1]}, "no-precision": {**bench(), "rows": [{"engine": "torch"}]}}
    for name, content in bad.items():
        (tmp_path / f"exits/{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_collect_results_sorts_files_and_names_damaged_ones(folder: Path) -> None:
    found = collect_results(folder)
    assert [one.files for one in found.entries] == [
        ("exits/a.json",), ("exits/b.json",), ("exits/full.json",), ("speed/x-0.4.json", "speed/x-1.0.json"),
    ]  # fmt: skip
    assert [Path(name).stem for name, _ in found.damaged] == [
        "empty",
        "nan",
        "no-macs",
        "no-method",
        "no-precision",
        "torn",
    ]
    assert [name for name, _ in found.lengths] == ["speed/lengths.json"]
    assert found.others == ["speed/other.json"] and [name for name, _ in found.benches] == ["speed/bench.json"]
    pooled = found.entries[-1]
    assert pooled.full == CurvePoint(1.0, 0.9) and pooled.curve == (CurvePoint(0.4, 0.8), CurvePoint(1.0, 0.9))


def test_table_line_is_the_mean_over_seeds(folder: Path) -> None:
    found = table_lines(collect_results(folder).entries)
    both = next(line for line in found if line.section == "exits" and line.cells[0] == "branchynet")
    assert both.cells == ("branchynet", "tiny", "2", "accuracy", "91.0 ± 1.4", "–", "90.0 at 0.400", "0.400", "0.400",
                          "0.750", "0.400")  # fmt: skip
    assert both.files == ("exits/a.json", "exits/b.json")
    assert "| branchynet | tiny | 2 |" in markdown_tables(found) and r"91.0 $\pm$ 1.4" in latex_table(found)


def test_models_from_different_starts_are_not_averaged(tmp_path: Path) -> None:
    for name, init in (("a", "runs/full"), ("b", None)):
        (tmp_path / f"{name}.json").write_text(json.dumps(cell(trained={"init": init})))
    assert [line.cells[0] for line in table_lines(collect_results(tmp_path).entries)] == [
        "branchynet, from the pretrained model", "branchynet",
    ]  # fmt: skip


def test_model_is_compared_with_fine_tuning_of_the_same_model(folder: Path) -> None:
    other = [{**one, "model": "large"} for one in curve_cells(1, 0.95, [(0.1, 0.90), (1.0, 0.95)])]
    (folder / "exits/large.json").write_text(json.dumps(other))
    assert [line.cells[-2] for line in table_lines(collect_results(folder).entries) if line.cells[1] == "large"] == [
        "–"
    ]
    (folder / "exits/large-full.json").write_text(json.dumps(cell("full", score=0.91, model="large")))
    assert [line.cells[-2] for line in table_lines(collect_results(folder).entries) if line.cells[1] == "large"] == [
        "0.100",
        "1.000",
    ]


def penalised(penalty: str, points: list[tuple[float, float, float]]) -> list[dict[str, Any]]:
    """Return the cells of a run trained with one penalty; a point is share, expected score, measured score."""
    curve = [
        {"share_of_full": share, "metrics": {"accuracy": score}, "expected": {"mac_share": share, "score": expected}}
        for share, expected, score in points
    ]
    about = {"trained": {"options": {"penalty": penalty, "soft_lr": "0.1"}}, "chosen": {"by": "full", "value": None}}
    return [cell("power_bert", points[-1][0], points[-1][2], curve=curve, **about)]


def test_join_families_joins_runs_that_differ_in_one_number(tmp_path: Path) -> None:
    files = {
        "expensive": penalised("1e-3", [(0.7, 0.85, 0.84), (0.8, 0.90, 0.91)]),
        "cheap": penalised("1e-2", [(0.2, 0.70, 0.89), (0.3, 0.892, 0.88)]),
        "other": [cell("power_bert", trained={"options": {"penalty": "1e-2", "soft_lr": "0.1", "scale": "any"}})],
        "plain": [cell("power_bert")],
        "few": [cell("deebert", trained={"options": {"depth": "3"}})],  # no option that sets the cost
        "many": [cell("deebert", trained={"options": {"depth": "6"}})],
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (family,) = join_families(collect_results(tmp_path).entries)
    assert family.variant == "penalty=1e-3 or 1e-2, soft_lr=0.1" and family.files == ("expensive.json", "cheap.json")
    assert family.full == CurvePoint(0.8, 0.91) and [point.share for point in family.curve] == [0.2, 0.3, 0.7, 0.8]
    assert family.chosen == {
        "0.005": CurvePoint(0.8, 0.91),
        "0.01": CurvePoint(0.3, 0.88),
        "0.02": CurvePoint(0.3, 0.88),
    }
    report(str(tmp_path), out=str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "| power_bert (penalty=1e-3 or 1e-2, soft_lr=0.1) | tiny | 1 | accuracy | 91.0 | 91.0 at 0.800 |" in text
    assert text.count("| power_bert") == 5  # the family, and each run by itself


def test_lowest_share_and_mean_and_spread() -> None:
    points = [CurvePoint(0.1, 0.5), CurvePoint(0.2, 0.895), CurvePoint(0.6, 0.899)]
    assert lowest_share(points, 0.9, 0.005) == 0.2 and lowest_share(points, 0.9, 0.0) is None
    assert mean_and_spread([1.0]) == "1.0" and mean_and_spread([1.0, 3.0]) == "2.0 ± 1.4"


def test_loss_is_measured_in_the_units_of_the_metric(tmp_path: Path) -> None:
    curve = [{"share_of_full": share, "metrics": {"bleu": bleu}} for share, bleu in ((0.6, 34.3), (1.0, 34.5))]
    content = cell(metrics={"bleu": 34.5}, chosen={"by": "full", "value": None}, curve=curve)
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert table_lines(collect_results(tmp_path).entries)[0].cells[7:9] == ("0.600", "0.600")


def test_report_takes_timings_from_another_folder(folder: Path) -> None:
    found = report(str(folder / "exits"), out=str(folder / "report"), speeds=str(folder / "speed")).found
    assert len(found.benches) == len(found.lengths) == 1 and len(found.entries) == 3


def test_report_writes_one_page_with_pictures_and_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["report", str(folder), "--out", str(folder / "report")])
    assert end.value.code == 0
    printed = capsys.readouterr()
    assert "left out exits/torn.json" in printed.err and "4 models" in printed.out
    text = (folder / "report" / "report.html").read_text(encoding="utf-8")
    held = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert len(held["entries"]) == 4 and "6 damaged files left out" in held["about"]
    assert {row["name"] for row in held["benches"]} == {"branchynet", "hf-sdpa"}
    assert {row["data"] for row in [*held["benches"], *held["lengths"]]} == {"sst2"}
    assert max(row["score"] for row in held["benches"]) == 90.0 and len(held["lengths"]) == 3
    assert 'src="http' not in text and 'href="http' not in text  # nothing is fetched
    assert {path.suffix for path in (folder / "report").iterdir()} == {".html", ".md", ".tex", ".png", ".svg"}


def test_report_of_one_experiment_is_named_by_its_data(folder: Path) -> None:
    names = {path.name for path in report(str(folder / "exits"), out=str(folder / "report")).written}
    assert names == {"report.html", "report.md", "report.tex", "sst2.png", "sst2.svg"}
    assert (folder / "report" / "report.md").read_text(encoding="utf-8").startswith("### sst2")


def test_report_refuses_an_empty_or_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="none in"):
        report(str(tmp_path))
    with pytest.raises(OfframpError, match="missing"):
        report(str(tmp_path / "missing"))
