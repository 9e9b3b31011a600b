"""The bench: what is measured, what the numbers mean, and what happens to contenders that cannot run."""

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
from offramp.evaluation.bench import BenchMeasurement, BenchOutput, BenchPlan, SilentWatcher, bench_entries, run_bench
from offramp.evaluation.bench_data import BenchData, prepare_bench_data
from offramp.evaluation.bench_figure import draw_bench
from offramp.evaluation.contenders import Contender, ContenderOutput, Contenders, settings_for_budget
from offramp.evaluation.peers import BenchModel
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from offramp.nn.outputs import RunOutput
from tests.factories import labelled_rows, make_task, run_folder

FIELDS = {"engine", "precision", "batch_size", "budget", "rows_per_second", "p50_ms", "p95_ms", "peak_mb", "metrics",
          "mac_share", "realised_over_promised"}  # fmt: skip
SMALL = BenchPlan((1, 4), ("1.0", "0.5"), ("torch",), against=("hf",), precisions=("fp32",), rounds=1, memory=False)
LABELS = [("1.0", "loose"), ("0.5", "tight"), ("default", "tight")]


def bench(run: Path, folder: Path, plan: BenchPlan = SMALL, kind: str = "classification") -> dict[str, Any]:
    """Measure twelve rows and return the bench file, which is also written to `folder`."""
    output = BenchOutput(folder / "bench.json", str(folder), "offramp bench")
    return run_bench(str(run), labelled_rows(kind, 12, 3), "tiny/test.jsonl", plan, output, SilentWatcher())


def test_bench_file_has_every_field(trained: Path, tmp_path: Path) -> None:
    found = bench(trained, tmp_path)
    assert found == json.loads((tmp_path / "bench.json").read_text())
    assert {"hardware", "data", "model", "rows", "threads", "seed", "command", "date", "versions", "row_count",
            "measured"} <= found.keys()  # fmt: skip
    assert (found["data"], found["row_count"], found["seed"], found["unfinished"]) == ("tiny/test", 12, 42, [])
    assert all(entry.keys() >= FIELDS for entry in found["rows"])
    measured = [(e["engine"], e["budget"], e["batch_size"], e["order"]) for e in found["rows"]]
    contenders = [("torch", 1.0), ("torch", 0.5), ("hf-eager", None), ("hf-sdpa", None)]
    assert measured == [(*one, *group) for group in [(1, "given"), (4, "given"), (4, "sorted")] for one in contenders]
    assert str(trained.parent) not in json.dumps(found)


def test_all_contenders_score_as_predict_does(trained: Path, tmp_path: Path) -> None:
    model, rows = Predictor.load(trained, "torch"), labelled_rows("classification", 12, 3)
    right = {budget: [a["label"] == r["label"] for a, r in zip(model.predict(rows, budget), rows, strict=True)]
             for budget in (1.0, 0.5)}  # fmt: skip
    for entry in bench(trained, tmp_path)["rows"]:
        assert entry["metrics"]["accuracy"] == pytest.approx(np.mean(right[entry["budget"] or 1.0]), abs=1e-6)
        assert (entry["mac_share"] < 1.0) is (entry["budget"] == 0.5)
        assert entry["rows_per_second"] > 0 and 0 < entry["p50_ms"] <= entry["p95_ms"]


def test_engines_and_precisions_are_compared_with_fp32(trained: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(trained, tmp_path / "own"))  # the engine keeps compiled pieces in the run
    plan = BenchPlan((4,), ("1.0",), ("openvino",), ("torch",), ("fp32", "bf16"), ("given",), rounds=1, memory=False)
    found = bench(own, tmp_path, plan)
    assert [(e["engine"], e["precision"]) for e in found["rows"]] == [
        ("openvino", "fp32"), ("openvino", "bf16"), ("torch", "fp32")]  # fmt: skip
    assert found["rows"][0]["metrics"] == found["rows"][2]["metrics"]
    exact, half, other = (e["disagrees_with_fp32"] for e in found["rows"])
    assert (
        exact is other is None and 0 <= half["answers"] <= 1 and half["exits"] == 0
    )  # every row goes through all layers
    (missing,) = found["failed"]  # torch has one precision on a CPU
    assert (missing["engine"], missing["precision"]) == ("torch", "bf16")


@pytest.mark.parametrize("kind", ["tagging", "question_answering", "masked_lm", "regression"])
def test_bench_of_every_task(every_task: dict[str, Path], tmp_path: Path, kind: str) -> None:
    plan = BenchPlan((5,), ("1.0",), ("torch",), against=("hf",), precisions=("fp32",), rounds=1, memory=False)
    found = bench(every_task[kind], tmp_path, plan, kind)
    assert found["failed"] == [] and len(found["rows"]) == 6
    first, *others = [entry["metrics"][found["metric"]] for entry in found["rows"]]
    assert others == pytest.approx([first] * 5, abs=1e-3)


def measurement(share: float | None, *seconds: list[float]) -> BenchMeasurement:
    return BenchMeasurement(np.array(seconds), {"accuracy": 0.9}, share, 12.34)


def test_speed_up_is_relative_to_every_layer_if_full_settings_save(base: str, tmp_path: Path) -> None:
    run = run_folder(base, tmp_path, "faster_dat", "classification")
    found = bench(run, tmp_path, replace(SMALL, batch_sizes=(4,), budgets=("1.0",), against=()))
    every_layer, planned = found["rows"][:2]
    assert (every_layer["budget"], every_layer["mac_share"], every_layer["realised_over_promised"]) == (
        "every layer",
        1.0,
        1.0,
    )
    assert planned["budget"] == 1.0 and planned["mac_share"] < 1.0 and planned["speed_up"] != 1.0


def test_realised_over_promised_is_speed_up_times_share() -> None:
    """Four times fewer MACs and three times faster: three quarters of the promise."""
    own = {settings: Contender("torch", "fp32", None, settings) for settings in ("loose", "tight")}
    peer = Contender("hf-sdpa", "fp32", "hf")
    found = {
        own["loose"]: measurement(1.0, [3.0, 3.0, 9.0], [6.0, 6.0, 6.0]),
        own["tight"]: measurement(0.25, [1.0, 1.0, 1.0], [9.0, 2.0, 1.5]),
        peer: measurement(None, [2.0, 2.0, 2.0], [4.0, 4.0, 4.0]),
    }
    full, tight, same, other = bench_entries(found, LABELS, 6, (1, "given"), make_task())
    assert (full["rows_per_second"], full["realised_over_promised"], full["speed_up"]) == (0.667, 1.0, 1.0)
    assert (tight["speed_up"], tight["realised_over_promised"]) == (3.0, 0.75)
    assert tight["realised_over_promised_best"] == pytest.approx(9 / 2.5 * 0.25)
    assert same["budget"] == "default" and {**same, "budget": 0.5} == tight
    assert (tight["p50_ms"], tight["p95_ms"], tight["peak_mb"]) == (1500.0, 1950.0, 12.3)
    assert other["realised_over_promised"] is None and other["budget"] is None and other["mac_share"] == 1.0
    assert tight["over_fastest_peer"] == 2.0 and full["over_fastest_peer"] == pytest.approx(2 / 3, abs=1e-3)


def test_the_fastest_static_runtime_may_have_any_precision_but_loses_little() -> None:
    own = Contender("native", "int8", None, "tight")
    peers = {
        Contender("a", "fp32", "a"): replace(measurement(None, [8.0]), metrics={"accuracy": 0.9}),
        Contender("b", "int8", "b"): replace(measurement(None, [4.0]), metrics={"accuracy": 0.89}),
        Contender("c", "int8", "c"): replace(measurement(None, [2.0]), metrics={"accuracy": 0.88}),
    }
    entries = bench_entries({own: measurement(0.5, [1.0]), **peers}, LABELS[:2], 6, (1, "given"), make_task())
    assert (entries[0]["over_fastest_static"], entries[0]["fastest_static"]) == (4.0, "b int8")
    assert entries[0]["over_fastest_peer"] == 2.0
    alone = bench_entries({own: measurement(0.5, [1.0])}, LABELS[:2], 6, (1, "given"), make_task())
    assert alone[0]["over_fastest_static"] is None and alone[0]["fastest_static"] is None


def fixed_contenders(
    run: Path, outputs: dict[Contender, tuple[list[float], list[int]]]
) -> tuple[Contenders, BenchData]:
    """Contenders that return fixed values: for every row the logit of the second label, and the exit layer."""
    rows = [{"text": "a film", "label": "good"}] * 4
    data = prepare_bench_data(Predictor.load(run, "torch"), rows, "rows")
    contenders = Contenders(BenchModel(str(run), "", "", 1), LABELS)
    for contender, (second, exits) in outputs.items():
        logits = [np.array([0.0, one]) for one in second]
        output = None if contender.peer else RunOutput(logits, np.array(exits, float), np.ones(4), np.ones(4))
        contenders.opened[contender] = lambda batch, given=(logits, output): ContenderOutput(*given)
    return contenders, data


def test_disagreement_of_low_precision_with_fp32(trained: Path) -> None:
    exact = [1.0, 1.0, -1.0, -1.0]
    outputs = {
        Contender("openvino", "bf16", None, "tight"): ([1.0, -2.0, -1.0, -1.0], [1, 2, 2, 3]),  # listed before its fp32
        Contender("openvino", "fp32", None, "tight"): (exact, [1, 2, 3, 2]),
        Contender("openvino", "bf16", None, "loose"): (exact, [3, 3, 3, 3]),  # not measured in fp32
        Contender("hf-sdpa", "fp32", "hf"): (exact, []),
        Contender("hf-sdpa", "bf16", "hf"): ([1.0, 2.0, 1.0, 3.0], []),
    }
    plan = BenchPlan((4,), orders=("given",), rounds=1, memory=False)
    found = benches.measure_group(*fixed_contenders(trained, outputs), (4, "given"), plan, SilentWatcher())
    disagreement = [one.disagrees for one in found.values()]
    assert disagreement == [{"answers": 0.25, "exits": 0.5}, None, None, None, {"answers": 0.5, "exits": None}]
    entries = bench_entries(found, LABELS[:2], 4, (4, "given"), make_task())
    assert [entry["disagrees_with_fp32"] for entry in entries] == disagreement
    wide, usual = (bench_table(part, "accuracy", "") for part in (entries, entries[1:4]))
    assert len(wide.columns) == len(usual.columns) + 2  # shown only if a contender has them
    assert sorted(wide.columns[-2].cells) == ["", "", "", "25.00%", "50.00%"]


def test_row_of_several_windows_moved_if_any_window_did(every_task: dict[str, Path]) -> None:
    data = prepare_bench_data(
        Predictor.load(every_task["question_answering"], "torch"), labelled_rows("question_answering", 4, 3), "rows"
    )
    twice = replace(data, data=Data(data.data.rows, [row for row in data.data.encoded for _ in range(2)]))
    usual = np.full(len(twice.data.encoded), 3.0)
    other = usual.copy()
    other[[0, 2, 3]] = 1.0
    assert twice.moved(usual, usual) == 0.0 and twice.moved(other, usual) == 0.5


def test_contender_that_fails_is_listed_and_the_others_are_measured(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)

    def broken(*_: Any, **__: Any) -> Any:
        def run(batch: Any) -> Any:
            raise RuntimeError("no such kernel\nand more lines")

        return run

    monkeypatch.setattr("offramp.evaluation.peers.openvino.load_peer", broken)
    static = ("onnxruntime", "openvino")
    plan = BenchPlan((4,), ("1.0",), ("torch",), static, ("fp32",), rounds=1, memory=False)
    found = bench(trained, tmp_path, plan)
    assert {entry["engine"] for entry in found["rows"]} == {"torch"}
    assert [(one["engine"], one["precision"]) for one in found["failed"]] == [
        ("onnxruntime", "fp32"), ("openvino-graph", "fp32")]  # fmt: skip
    assert "pip install 'offramp[bench]'" in found["failed"][0]["reason"]
    assert found["failed"][1]["reason"] == "RuntimeError: no such kernel"


def test_interrupted_bench_file_is_continued(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = bench(trained, tmp_path)
    cut = {**complete, "rows": [e for e in complete["rows"] if e["batch_size"] == 1], "unfinished": [[4, "given"]]}
    cut["rows"][0] = {**cut["rows"][0], "rows_per_second": 12.5}
    (tmp_path / "bench.json").write_text(json.dumps(cut))
    groups = list[tuple[int, str]]()
    real = benches.measure_group
    monkeypatch.setattr(benches, "measure_group", lambda *a: groups.append(a[2]) or real(*a))
    again = bench(trained, tmp_path)
    assert groups == [(4, "given"), (4, "sorted")] and again["rows"][0]["rows_per_second"] == 12.5
    assert len(again["rows"]) == len(complete["rows"]) and again["unfinished"] == []
    bench(trained, tmp_path)  # a finished file is measured again
    assert len(groups) == 5


def test_memory_is_measured_in_fresh_processes(trained: Path, tmp_path: Path) -> None:
    plan = BenchPlan((4,), ("1.0",), ("torch",), against=("hf",), precisions=("fp32",), orders=("given",), rounds=1)
    for entry in bench(trained, tmp_path, plan)["rows"]:
        assert 0 < entry["peak_mb"] < 4000


def test_bench_data_batches_and_heaviest_batches(trained: Path) -> None:
    data = prepare_bench_data(Predictor.load(trained, "torch"), labelled_rows("classification", 10, 3), "rows")
    lengths = [len(row.ids) for row in data.data.encoded]
    assert data.calls(4, "given") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    ordered = [lengths[i] for call in data.calls(4, "sorted") for i in call]
    assert ordered == sorted(lengths) and len(ordered) == 10
    (heaviest,) = data.heaviest(data.calls(4, "sorted"), 1)
    assert len(heaviest) * max(len(row.ids) for row in heaviest) == max(
        len(call) * max(lengths[i] for i in call) for call in data.calls(4, "sorted"))  # fmt: skip


def test_settings_for_budget_parses_every_form(trained: Path) -> None:
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
def test_bad_bench_plans_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OfframpError):
        BenchPlan(**wrong)


@pytest.mark.parametrize("wrong", [{"engines": ("hf",)}, {"against": ("tensorflow",)}])
def test_unknown_engines_and_runtimes_are_refused(trained: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(OfframpError, match="use some of"):
        bench(trained, tmp_path, replace(SMALL, **wrong))


def test_bench_is_printed_and_drawn(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(trained, tmp_path)
    found["failed"] = [{"engine": "x", "precision": "int8", "reason": "not [installed]"}]
    print_bench(found)
    printed = capsys.readouterr().out
    assert "batch 4" in printed and "x int8 is missing: not [installed]" in printed and found["hardware"] in printed
    entry = next(e for e in found["rows"] if e["budget"] == 0.5)
    texts = bench_cells(entry, "accuracy")
    assert texts[0] == "offramp torch" and texts[2] == "0.5" and f"{entry['mac_share']:.3f}" in texts
    draw_bench(found, tmp_path / "new" / "curve.png")
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")
