"""Result files become model results; damaged files are named, and families of runs become one curve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offramp.commands.report import report
from offramp.evaluation.collect import CurvePoint, collect_results, join_families
from tests.evaluation.result_files import cell, penalised, perplexity_cells, write_results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_results(tmp_path)


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
    assert found.others == ["speed/other.json", "speed/study.json"] and [name for name, _ in found.benches] == [
        "speed/bench.json"
    ]
    pooled = found.entries[-1]
    assert pooled.full == CurvePoint(1.0, 0.9) and pooled.curve == (CurvePoint(0.4, 0.8), CurvePoint(1.0, 0.9))


def test_studies_of_attach_are_curves_with_their_baseline(tmp_path: Path) -> None:
    full, point = cell("attached"), cell("attached", 0.3, 0.89, chosen={"kind": "disagreement", "value": 0.01})
    study = {"what": "speed of a study", "method": "fastbert", "hardware": "h", "rows": [{"budget": "proven"}]}
    for name, content in {"cells": [full, point, cell("tfidf", 0.0, 0.8)], "study": study}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    found = collect_results(tmp_path)
    attached, baseline = found.entries
    assert attached.full == CurvePoint(1.0, 0.9) and attached.others == {"max_disagreement 0.01": CurvePoint(0.3, 0.89)}
    assert baseline.method == "tfidf" and baseline.curve == (CurvePoint(0.0, 0.8),)
    assert found.others == ["study.json"] and not found.damaged


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
    assert (
        "| power_bert (penalty=1e-3 or 1e-2, soft_lr=0.1) | tiny | 91.0 | 88.0 at 0.300 | – | 91.0 at 0.800 |" in text
    )
    assert text.count("| power_bert") == 5  # the family, and each run by itself


def test_a_family_of_perplexities_loses_where_they_grow(tmp_path: Path) -> None:
    for penalty, points in (("1e-3", [(0.7, 5.3), (0.8, 5.0)]), ("1e-2", [(0.2, 9.0), (0.3, 5.04)])):
        trained = {"trained": {"options": {"penalty": penalty}}}
        cells = [{**one, **trained} for one in perplexity_cells(points[-1][1], points)]
        cells = [{**one, "macs": {"mean": 1, "share_of_full": points[-1][0]}} for one in cells]
        (tmp_path / f"{penalty}.json").write_text(json.dumps(cells))
    (family,) = join_families(collect_results(tmp_path).entries)
    assert family.chosen == {
        "0.005": CurvePoint(0.8, 5.0),
        "0.01": CurvePoint(0.3, 5.04),
        "0.02": CurvePoint(0.3, 5.04),
    }


@pytest.mark.parametrize(
    ("file", "section"),
    [
        ("a.json", ""),
        ("sst2/branchynet/default-tiny-s42.json", ""),
        ("sst2/branchynet/heads/default-tiny-s42.json", "heads"),
        ("exits/sst2/branchynet/a.json", "exits/sst2/branchynet"),
    ],
)
def test_collect_results_reads_folders_of_any_depth(tmp_path: Path, file: str, section: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(json.dumps(cell()))
    (found,) = collect_results(tmp_path).entries
    assert (found.files, found.section) == ((file,), section)
