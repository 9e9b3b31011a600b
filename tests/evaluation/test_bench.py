"""The bench: who is measured, what the numbers mean, what happens to those who cannot start."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offramp.cli.printing.bench_tables import bench_cells, bench_table, print_bench
from offramp.errors import OfframpError
from offramp.evaluation import bench as benches
from offramp.evaluation import bench_file as benchfile
from offramp.evaluation.bench import BenchMeasurement, BenchOutput, BenchPlan, run_bench
from offramp.evaluation.bench_figure import draw_bench
from offramp.evaluation.contenders import Contender, ContenderOutput, Contenders, settings_for_budget
from offramp.evaluation.course import BenchData, prepare_bench_data
from offramp.evaluation.peers import BenchModel
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from tests import runs

FIELDS = {"engine", "precision", "batch_size", "budget", "rows_per_second", "p50_ms", "p95_ms", "peak_mb", "metrics",
          "mac_share", "realised_over_promised"}  # fmt: skip
SMALL = BenchPlan((1, 4), ("1.0", "0.5"), ("torch",), against=("hf",), precisions=("fp32",), rounds=1, memory=False)
LABELS = [("1.0", "loose"), ("0.5", "tight"), ("default", "tight")]


class Silent:
    """Nobody watches."""

    def phase(self, name: str, total: int) -> None:
        pass

    def tick(self) -> None:
        pass


def made(run: Path, folder: Path, plan: BenchPlan = SMALL, kind: str = "classification") -> dict[str, Any]:
    where = BenchOutput(folder / "bench.json", str(folder), "offramp bench")
    return run_bench(str(run), runs.rows(kind, 12, 3), "tiny/test.jsonl", plan, where, Silent())


def test_every_field_of_the_design(trained: Path, tmp_path: Path) -> None:
    found = made(trained, tmp_path)
    assert found == json.loads((tmp_path / "bench.json").read_text())
    assert {"hardware", "data", "model", "rows", "threads", "seed", "command", "date", "versions", "row_count",
            "measured"} <= found.keys()  # fmt: skip
    assert (found["data"], found["row_count"], found["seed"], found["unfinished"]) == ("tiny/test", 12, 42, [])
    assert all(entry.keys() >= FIELDS for entry in found["rows"])
    places = [(e["engine"], e["budget"], e["batch_size"], e["order"]) for e in found["rows"]]
    who = [("torch", 1.0), ("torch", 0.5), ("hf-eager", None), ("hf-sdpa", None)]
    assert places == [(*one, *group) for group in [(1, "given"), (4, "given"), (4, "sorted")] for one in who]
    assert str(trained.parent) not in json.dumps(found)


def test_everybody_answers_the_same_question(trained: Path, tmp_path: Path) -> None:
    model, rows = Predictor.load(trained, "torch"), runs.rows("classification", 12, 3)
    right = {budget: [a["label"] == r["label"] for a, r in zip(model.predict(rows, budget), rows, strict=True)]
             for budget in (1.0, 0.5)}  # fmt: skip
    for entry in made(trained, tmp_path)["rows"]:
        assert entry["metrics"]["accuracy"] == pytest.approx(np.mean(right[entry["budget"] or 1.0]), abs=1e-6)
        assert (entry["mac_share"] < 1.0) is (entry["budget"] == 0.5)
        assert entry["rows_per_second"] > 0 and 0 < entry["p50_ms"] <= entry["p95_ms"]


def test_our_engines_and_their_precisions(trained: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(trained, tmp_path / "own"))  # the engine keeps compiled pieces in the run
    plan = BenchPlan((4,), ("1.0",), ("openvino",), ("torch",), ("fp32", "bf16"), ("given",), rounds=1, memory=False)
    found = made(own, tmp_path, plan)
    assert [(e["engine"], e["precision"]) for e in found["rows"]] == [
        ("openvino", "fp32"), ("openvino", "bf16"), ("torch", "fp32")]  # fmt: skip
    assert found["rows"][0]["metrics"] == found["rows"][2]["metrics"]
    exact, half, other = (e["disagrees_with_fp32"] for e in found["rows"])
    assert exact is other is None and 0 <= half["answers"] <= 1 and half["exits"] == 0  # everybody goes to the end
    (missing,) = found["failed"]  # torch has one precision on a CPU
    assert (missing["engine"], missing["precision"]) == ("torch", "bf16")


@pytest.mark.parametrize("kind", ["tagging", "question_answering", "masked_lm", "regression"])
def test_every_task(every_task: dict[str, Path], tmp_path: Path, kind: str) -> None:
    plan = BenchPlan((5,), ("1.0",), ("torch",), against=("hf",), precisions=("fp32",), rounds=1, memory=False)
    found = made(every_task[kind], tmp_path, plan, kind)
    assert found["failed"] == [] and len(found["rows"]) == 6
    first, *others = [entry["metrics"][found["metric"]] for entry in found["rows"]]
    assert others == pytest.approx([first] * 5, abs=1e-3)


def measured(share: float | None, *seconds: list[float]) -> BenchMeasurement:
    return BenchMeasurement(np.array(seconds), {"accuracy": 0.9}, share, 12.34)


def test_savings_of_a_plan_are_held_against_every_layer(base: str, tmp_path: Path) -> None:
    run = runs.train(base, tmp_path, "faster_dat", "classification")
    found = made(run, tmp_path, replace(SMALL, batch_sizes=(4,), budgets=("1.0",), against=()))
    whole, planned = found["rows"][:2]
    assert (whole["budget"], whole["mac_share"], whole["realised_over_promised"]) == ("every layer", 1.0, 1.0)
    assert planned["budget"] == 1.0 and planned["mac_share"] < 1.0 and planned["speed_up"] != 1.0


def test_realised_over_promised() -> None:
    """Four times fewer MACs, three times faster: three quarters of the promise came true."""
    ours = {settings: Contender("torch", "fp32", None, settings) for settings in ("loose", "tight")}
    peer = Contender("hf-sdpa", "fp32", "hf")
    found = {
        ours["loose"]: measured(1.0, [3.0, 3.0, 9.0], [6.0, 6.0, 6.0]),
        ours["tight"]: measured(0.25, [1.0, 1.0, 1.0], [9.0, 2.0, 1.5]),
        peer: measured(None, [2.0, 2.0, 2.0], [4.0, 4.0, 4.0]),
    }
    full, tight, same, other = benchfile.bench_entries(found, LABELS, 6, (1, "given"))
    assert (full["rows_per_second"], full["realised_over_promised"], full["speed_up"]) == (0.667, 1.0, 1.0)
    assert (tight["speed_up"], tight["realised_over_promised"]) == (3.0, 0.75)
    assert tight["realised_over_promised_best"] == pytest.approx(9 / 2.5 * 0.25)
    assert same["budget"] == "default" and {**same, "budget": 0.5} == tight
    assert (tight["p50_ms"], tight["p95_ms"], tight["peak_mb"]) == (1500.0, 1950.0, 12.3)
    assert other["realised_over_promised"] is None and other["budget"] is None and other["mac_share"] == 1.0
    assert tight["over_fastest_peer"] == 2.0 and full["over_fastest_peer"] == pytest.approx(2 / 3, abs=1e-3)


def said(run: Path, answers: dict[Contender, tuple[list[float], list[int]]]) -> tuple[Contenders, BenchData]:
    """A field of puppets: each says of every row how sure it is of the second label, and where the row left."""
    rows = [{"text": "a film", "label": "good"}] * 4
    lane = prepare_bench_data(Predictor.load(run, "torch"), rows, "rows")
    field = Contenders(BenchModel(str(run), "", "", 1), LABELS)
    for who, (sure, left) in answers.items():
        logits = [np.array([0.0, one]) for one in sure]
        spent = (None, None) if who.peer else (np.ones(4), np.array(left, dtype=np.float64))
        field.opened[who] = lambda batch, given=(logits, *spent): ContenderOutput(*given)
    return field, lane


def test_how_often_less_precision_departs_from_fp32(trained: Path) -> None:
    sure = [1.0, 1.0, -1.0, -1.0]
    who = {
        Contender("openvino", "bf16", None, "tight"): ([1.0, -2.0, -1.0, -1.0], [1, 2, 2, 3]),  # before its fp32
        Contender("openvino", "fp32", None, "tight"): (sure, [1, 2, 3, 2]),
        Contender("openvino", "bf16", None, "loose"): (sure, [3, 3, 3, 3]),  # nobody in fp32 to compare with
        Contender("hf-sdpa", "fp32", "hf"): (sure, []),
        Contender("hf-sdpa", "bf16", "hf"): ([1.0, 2.0, 1.0, 3.0], []),
    }
    plan = BenchPlan((4,), orders=("given",), rounds=1, memory=False)
    found = benches.measure_group(*said(trained, who), (4, "given"), plan, Silent())
    told = [one.disagrees for one in found.values()]
    assert told == [{"answers": 0.25, "exits": 0.5}, None, None, None, {"answers": 0.5, "exits": None}]
    entries = benchfile.bench_entries(found, LABELS[:2], 4, (4, "given"))
    assert [entry["disagrees_with_fp32"] for entry in entries] == told
    wide, usual = (bench_table(part, "accuracy", "") for part in (entries, entries[1:4]))
    assert len(wide.columns) == len(usual.columns) + 2  # told only where somebody has it
    assert sorted(wide.columns[-2]._cells) == ["", "", "", "25.00%", "50.00%"]


def test_a_row_in_windows_left_elsewhere_if_any_window_did(every_task: dict[str, Path]) -> None:
    lane = prepare_bench_data(
        Predictor.load(every_task["question_answering"], "torch"), runs.rows("question_answering", 4, 3), "rows"
    )
    twice = replace(lane, data=Data(lane.data.rows, [row for row in lane.data.encoded for _ in range(2)]))
    usual = np.full(len(twice.data.encoded), 3.0)
    other = usual.copy()
    other[[0, 2, 3]] = 1.0
    assert twice.moved(usual, usual) == 0.0 and twice.moved(other, usual) == 0.5


def test_who_cannot_start_is_told_and_the_rest_goes_on(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)

    def broken(*_: Any, **__: Any) -> Any:
        def answer(batch: Any) -> Any:
            raise RuntimeError("no such kernel\nand a long story")

        return answer

    monkeypatch.setattr("offramp.evaluation.peers.openvino.load", broken)
    static = ("onnxruntime", "openvino")
    plan = BenchPlan((4,), ("1.0",), ("torch",), static, ("fp32",), rounds=1, memory=False)
    found = made(trained, tmp_path, plan)
    assert {entry["engine"] for entry in found["rows"]} == {"torch"}
    assert [(one["engine"], one["precision"]) for one in found["failed"]] == [
        ("onnxruntime", "fp32"), ("openvino-graph", "fp32")]  # fmt: skip
    assert "pip install 'offramp[bench]'" in found["failed"][0]["reason"]
    assert found["failed"][1]["reason"] == "RuntimeError: no such kernel"


def test_a_file_cut_short_is_gone_on_with(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made(trained, tmp_path)
    cut = {**whole, "rows": [e for e in whole["rows"] if e["batch_size"] == 1], "unfinished": [[4, "given"]]}
    cut["rows"][0] = {**cut["rows"][0], "rows_per_second": 12.5}
    (tmp_path / "bench.json").write_text(json.dumps(cut))
    groups = list[tuple[int, str]]()
    real = benches.measure_group
    monkeypatch.setattr(benches, "measure_group", lambda *a: groups.append(a[2]) or real(*a))
    again = made(trained, tmp_path)
    assert groups == [(4, "given"), (4, "sorted")] and again["rows"][0]["rows_per_second"] == 12.5
    assert len(again["rows"]) == len(whole["rows"]) and again["unfinished"] == []
    made(trained, tmp_path)  # a finished file is measured anew
    assert len(groups) == 5


def test_memory_is_measured_in_fresh_processes(trained: Path, tmp_path: Path) -> None:
    plan = BenchPlan((4,), ("1.0",), ("torch",), against=("hf",), precisions=("fp32",), orders=("given",), rounds=1)
    for entry in made(trained, tmp_path, plan)["rows"]:
        assert 0 < entry["peak_mb"] < 4000


def test_the_course(trained: Path) -> None:
    lane = prepare_bench_data(Predictor.load(trained, "torch"), runs.rows("classification", 10, 3), "rows")
    lengths = [len(row.ids) for row in lane.data.encoded]
    assert lane.calls(4, "given") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    ordered = [lengths[i] for call in lane.calls(4, "sorted") for i in call]
    assert ordered == sorted(lengths) and len(ordered) == 10
    (heaviest,) = lane.heaviest(lane.calls(4, "sorted"), 1)
    assert len(heaviest) * max(len(row.ids) for row in heaviest) == max(
        len(call) * max(lengths[i] for i in call) for call in lane.calls(4, "sorted"))  # fmt: skip


def test_budgets_as_they_are_written(trained: Path) -> None:
    model = Predictor.load(trained, "torch")
    assert (
        settings_for_budget(model, "0.5") == model.settings(0.5)
        and settings_for_budget(model, "default") == model.settings()
    )
    assert settings_for_budget(model, "max-loss=0.02") == model.settings(max_loss=0.02)
    for wrong in ("half", "max-loss=", "7", "risk=0.01", "latency=5"):
        with pytest.raises(OfframpError):
            settings_for_budget(model, wrong)


@pytest.mark.parametrize("wrong", [{"orders": ("random",)}, {"batch_sizes": (0,)}, {"rounds": 0}, {"engines": ()}])
def test_plans_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(OfframpError):
        BenchPlan(**wrong)


@pytest.mark.parametrize("wrong", [{"engines": ("hf",)}, {"against": ("tensorflow",)}])
def test_names_that_there_are_not(trained: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(OfframpError, match="use some of"):
        made(trained, tmp_path, replace(SMALL, **wrong))


def test_the_table_and_the_picture(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = made(trained, tmp_path)
    found["failed"] = [{"engine": "x", "precision": "int8", "reason": "not [installed]"}]
    print_bench(found)
    said = capsys.readouterr().out
    assert "batch 4, rows sorted by length" in said and "x int8 is missing: not [installed]" in said
    assert f"hardware: {found['hardware']}; threads: 1" in said and "token ids to logits" in said
    ours = next(e for e in found["rows"] if e["budget"] == 0.5)
    words = bench_cells(ours, "accuracy")
    assert words[0] == "offramp torch" and words[2] == "0.5" and f"{ours['mac_share']:.3f}" in words
    draw_bench(found, tmp_path / "new" / "curve.png")
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")
