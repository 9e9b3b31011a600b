"""Result files become entries, lines and tables; what is damaged is named."""

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


def sheet(seed: int, full: float, spots: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """What `eval --curve` writes."""
    curve = [{"share_of_full": share, "metrics": {"accuracy": score}} for share, score in spots]
    first = cell(score=full, seed=seed, chosen={"by": "full", "value": None}, curve=curve)
    picked = cell(share=0.4, score=full - 0.01, seed=seed, chosen={"by": "max_loss", "value": 0.01})
    return [first, picked]


def bench() -> dict[str, Any]:
    """What `bench --json` writes, as far as reports read it."""
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


def timed() -> dict[str, Any]:
    """What `lengths --json` writes."""
    groups = [{"mean_tokens": 2.0**n, "ms": 1.0 * n, "ms_full": 2.0 * n} for n in (3, 4, 5)]
    return {"method": "branchynet", "model": "tiny", "data": "sst2", "hardware": "h", "engine": "torch",
            "precision": "fp32", "batch_size": 32, "command": "offramp lengths", "lengths": groups}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = {
        "exits/a.json": sheet(1, 0.90, [(0.2, 0.80), (0.3, 0.895), (1.0, 0.90)]),
        "exits/b.json": sheet(2, 0.92, [(0.5, 0.915), (1.0, 0.92)]),
        "exits/full.json": cell("full", score=0.91, seed=1),
        "house/x-0.4.json": cell(share=0.4, score=0.8),
        "house/x-1.0.json": cell(share=1.0, score=0.9),
        "house/bench.json": bench(),
        "house/lengths.json": timed(),
        "house/other.json": {"anything": 1},
    }
    for name, content in made.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "exits/torn.json").write_text('{"method": ')
    bad = {"odd": cell(macs=None), "empty": cell(metrics={}), "nan": cell(score=float("nan"))}
    bad |= {"clock": {"hardware": "h", "rows": [1]}, "hands": {**bench(), "rows": [{"engine": "torch"}]}}
    for name, content in bad.items():
        (tmp_path / f"exits/{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_files_are_sorted_and_bad_ones_named(folder: Path) -> None:
    found = collect_results(folder)
    assert [one.files for one in found.entries] == [
        ("exits/a.json",), ("exits/b.json",), ("exits/full.json",), ("house/x-0.4.json", "house/x-1.0.json"),
    ]  # fmt: skip
    assert [Path(name).stem for name, _ in found.damaged] == ["clock", "empty", "hands", "nan", "odd", "torn"]
    assert [name for name, _ in found.lengths] == ["house/lengths.json"]
    assert found.others == ["house/other.json"] and [name for name, _ in found.benches] == ["house/bench.json"]
    pooled = found.entries[-1]
    assert pooled.full == CurvePoint(1.0, 0.9) and pooled.curve == (CurvePoint(0.4, 0.8), CurvePoint(1.0, 0.9))


def test_a_line_is_the_mean_over_seeds(folder: Path) -> None:
    found = table_lines(collect_results(folder).entries)
    both = next(line for line in found if line.section == "exits" and line.cells[0] == "branchynet")
    assert both.cells == ("branchynet", "tiny", "2", "accuracy", "91.0 ± 1.4", "–", "90.0 at 0.400", "0.400", "0.400",
                          "0.750", "0.400")  # fmt: skip
    assert both.files == ("exits/a.json", "exits/b.json")
    assert "| branchynet | tiny | 2 |" in markdown_tables(found) and r"91.0 $\pm$ 1.4" in latex_table(found)


def test_models_that_began_elsewhere_are_no_seeds_of_each_other(tmp_path: Path) -> None:
    for name, init in (("a", "runs/full"), ("b", None)):
        (tmp_path / f"{name}.json").write_text(json.dumps(cell(trained={"init": init})))
    assert [line.cells[0] for line in table_lines(collect_results(tmp_path).entries)] == [
        "branchynet, from the pretrained model", "branchynet",
    ]  # fmt: skip


def test_a_model_is_held_against_its_own_fine_tuning_only(folder: Path) -> None:
    other = [{**one, "model": "large"} for one in sheet(1, 0.95, [(0.1, 0.90), (1.0, 0.95)])]
    (folder / "exits/large.json").write_text(json.dumps(other))
    assert [line.cells[-2] for line in table_lines(collect_results(folder).entries) if line.cells[1] == "large"] == [
        "–"
    ]
    (folder / "exits/large-full.json").write_text(json.dumps(cell("full", score=0.91, model="large")))
    assert [line.cells[-2] for line in table_lines(collect_results(folder).entries) if line.cells[1] == "large"] == [
        "0.100",
        "1.000",
    ]


def penalised(penalty: str, spots: list[tuple[float, float, float]]) -> list[dict[str, Any]]:
    """A run trained with one penalty: share, score promised on calibration rows, score on the report rows."""
    curve = [
        {"share_of_full": share, "metrics": {"accuracy": score}, "expected": {"mac_share": share, "score": promised}}
        for share, promised, score in spots
    ]
    about = {"trained": {"options": {"penalty": penalty, "soft_lr": "0.1"}}, "chosen": {"by": "full", "value": None}}
    return [cell("power_bert", spots[-1][0], spots[-1][2], curve=curve, **about)]


def test_runs_that_differ_in_one_number_make_one_curve(tmp_path: Path) -> None:
    made = {
        "dear": penalised("1e-3", [(0.7, 0.85, 0.84), (0.8, 0.90, 0.91)]),
        "cheap": penalised("1e-2", [(0.2, 0.70, 0.89), (0.3, 0.892, 0.88)]),
        "other": [cell("power_bert", trained={"options": {"penalty": "1e-2", "soft_lr": "0.1", "scale": "any"}})],
        "plain": [cell("power_bert")],
        "few": [cell("deebert", trained={"options": {"depth": "3"}})],  # no option that sets the cost
        "many": [cell("deebert", trained={"options": {"depth": "6"}})],
    }
    for name, content in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (whole,) = join_families(collect_results(tmp_path).entries)
    assert whole.variant == "penalty=1e-3 or 1e-2, soft_lr=0.1" and whole.files == ("dear.json", "cheap.json")
    assert whole.full == CurvePoint(0.8, 0.91) and [spot.share for spot in whole.curve] == [0.2, 0.3, 0.7, 0.8]
    assert whole.chosen == {
        "0.005": CurvePoint(0.8, 0.91),
        "0.01": CurvePoint(0.3, 0.88),
        "0.02": CurvePoint(0.3, 0.88),
    }
    report(str(tmp_path), out=str(tmp_path / "made"))
    said = (tmp_path / "made" / "report.md").read_text(encoding="utf-8")
    assert "| power_bert (penalty=1e-3 or 1e-2, soft_lr=0.1) | tiny | 1 | accuracy | 91.0 | 91.0 at 0.800 |" in said
    assert said.count("| power_bert") == 5  # each run for itself too


def test_lowest_share_and_spread() -> None:
    spots = [CurvePoint(0.1, 0.5), CurvePoint(0.2, 0.895), CurvePoint(0.6, 0.899)]
    assert lowest_share(spots, 0.9, 0.005) == 0.2 and lowest_share(spots, 0.9, 0.0) is None
    assert mean_and_spread([1.0]) == "1.0" and mean_and_spread([1.0, 3.0]) == "2.0 ± 1.4"


def test_what_counts_as_a_loss_depends_on_the_metric(tmp_path: Path) -> None:
    spots = [{"share_of_full": share, "metrics": {"bleu": bleu}} for share, bleu in ((0.6, 34.3), (1.0, 34.5))]
    made = cell(metrics={"bleu": 34.5}, chosen={"by": "full", "value": None}, curve=spots)
    (tmp_path / "a.json").write_text(json.dumps(made))
    assert table_lines(collect_results(tmp_path).entries)[0].cells[7:9] == ("0.600", "0.600")


def test_timings_may_lie_in_another_folder(folder: Path) -> None:
    found = report(str(folder / "exits"), out=str(folder / "made"), speeds=str(folder / "house")).found
    assert len(found.benches) == len(found.lengths) == 1 and len(found.entries) == 3


def test_the_report_is_one_page_with_pictures_and_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["report", str(folder), "--out", str(folder / "made")])
    assert end.value.code == 0
    said = capsys.readouterr()
    assert "left out exits/torn.json" in said.err and "4 models" in said.out
    text = (folder / "made" / "report.html").read_text(encoding="utf-8")
    held = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert len(held["entries"]) == 4 and "6 damaged files left out" in held["about"]
    assert {row["name"] for row in held["benches"]} == {"branchynet", "hf-sdpa"}
    assert {row["data"] for row in [*held["benches"], *held["lengths"]]} == {"sst2"}
    assert max(row["score"] for row in held["benches"]) == 90.0 and len(held["lengths"]) == 3
    assert 'src="http' not in text and 'href="http' not in text  # nothing is fetched
    assert {path.suffix for path in (folder / "made").iterdir()} == {".html", ".md", ".tex", ".png", ".svg"}


def test_a_folder_of_one_experiment_is_named_by_its_data_alone(folder: Path) -> None:
    made = {path.name for path in report(str(folder / "exits"), out=str(folder / "made")).written}
    assert made == {"report.html", "report.md", "report.tex", "sst2.png", "sst2.svg"}
    assert (folder / "made" / "report.md").read_text(encoding="utf-8").startswith("### sst2")


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="none in"):
        report(str(tmp_path))
    with pytest.raises(OfframpError, match="missing"):
        report(str(tmp_path / "missing"))
