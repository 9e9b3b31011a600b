"""benchmarks/papers/depth_adaptive.py: what is measured of a model that has learned to copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from benchmarks.papers import depth_adaptive

import offramp
from offramp.errors import OfframpError
from offramp.training.checkpoint import snapshot_name, write_weights
from tests.factories import translation_rows, write_jsonl


def test_exits_trade_off_and_oracles(translation_run: Path, tmp_path: Path) -> None:
    model = offramp.load(translation_run)
    data = depth_adaptive.prepare_data(model, translation_rows(20, seed=4), "rows")
    table = depth_adaptive.bleu_by_exit(model, data)
    assert set(table["bleu"]) == {"1", "2", "3"} and table["bleu"]["3"] > 90 and table["uniform"] > 50
    points = depth_adaptive.trade_off(model, data)
    assert points[-1]["average_exit"] == 3.0 and points[-1]["mac_share"] == 1.0
    assert all(1.0 <= point["average_exit"] <= 3.0 and 0 < point["mac_share"] <= 1.1 for point in points)
    depth_adaptive.draw_trade_off({"geometric": points}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    found = depth_adaptive.oracle_depths(model, data, (0.0, 0.3, 5.0), (0.0, 2.0))
    words = [one["exit"] for one in found if (one["oracle"], one["of"], one["sigma"]) == ("likelihood", "words", 0.0)]
    assert words == sorted(words, reverse=True) and words[-1] == 1.0 < words[0], "a higher penalty, an earlier exit"
    assert len(found) == 2 * 3 * 3


def test_decoder_speed_reports_every_setting_and_batch_size(translation_run: Path) -> None:
    model = offramp.load(translation_run)
    data = depth_adaptive.prepare_data(model, translation_rows(6, seed=4), "rows")
    settings = {"full": model.settings(1.0), "one block": model.settings(given={"depth": 1})}
    found = depth_adaptive.decoder_speed(model, data, settings, (1, 3), rounds=1)
    assert [(row["setting"], row["batch_size"], row["average_exit"]) for row in found["rows"]] == [
        ("full", 1, 3.0),
        ("one block", 1, 1.0),
        ("full", 3, 3.0),
        ("one block", 3, 1.0),
    ]
    assert found["rows"][0]["speed_up"] == 1.0 and found["rows"][0]["words_per_second"] > 0


def test_curve_measures_every_snapshot_once(translation_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(translation_run, run)
    network = offramp.load(run).network
    for epoch in (1, 2):
        with torch.no_grad():
            network.hf.get_parameter("model.decoder.layers.0.fc2.weight").mul_(0.0 if epoch == 1 else 1.0)
        write_weights(run / "snapshots" / snapshot_name(0, epoch), network)
    data, kept = write_jsonl(tmp_path / "dev.jsonl", translation_rows(12, seed=4)), tmp_path / "curve.json"
    command = ["curve", str(run), "--dev", data, "--data", data, "--json", str(kept), "--png", str(tmp_path / "a.png")]
    depth_adaptive.main(command)
    found = json.loads(kept.read_text())["snapshots"]
    assert list(found) == ["stage-0-epoch-0001", "stage-0-epoch-0002"] and (tmp_path / "a.png").is_file()
    assert found["stage-0-epoch-0001"]["points"][-1]["average_exit"] == 3.0
    (run / "snapshots" / snapshot_name(0, 1)).write_bytes(b"damaged")
    depth_adaptive.main(command)  # nothing is read or measured again
    with pytest.raises(SystemExit, match="--snapshots 4"):
        depth_adaptive.main(["curve", str(translation_run), "--dev", data, "--data", data])


def test_exits_over_words_aligns_exits_with_pieces(translation_run: Path) -> None:
    model = offramp.load(translation_run)
    lines = depth_adaptive.exits_over_words(model, ["a b c"], model.settings(given={"depth": 1})).splitlines()
    assert lines[0].strip() == "a b c" and lines[1].split()[:3] == ["1", "1", "1"]
    assert lines[2].split() == ["a", "b", "c"]


def test_prepare_data_refuses_other_tasks(trained: Path) -> None:
    with pytest.raises(OfframpError, match="a run for classification"):
        depth_adaptive.prepare_data(offramp.load(trained), [{"src": "a", "tgt": "b"}], "rows")


def test_script_writes_exits_and_prints_a_plan(
    translation_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, kept = write_jsonl(tmp_path / "dev.jsonl", translation_rows(4, seed=4)), tmp_path / "exits.json"
    depth_adaptive.main(["exits", str(translation_run), "--data", data, "--json", str(kept)])
    found = json.loads(kept.read_text())
    assert found["rows"] == 4 and found["runs"]["run"]["blocks"] == 3
    assert found["trained"]["run"]["method"] == "depth_adaptive"
    capsys.readouterr()
    depth_adaptive.main(["plan", "--data", "data", "--out", str(tmp_path / "nmt")])
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == 16 and all(line.startswith("offramp train") for line in commands)
    assert len(list((tmp_path / "nmt").glob("marian-*.json"))) == 6


def test_runs_may_stand_after_options() -> None:
    parsed = depth_adaptive.build_parser().parse_intermixed_args(["exits", "--data", "test.jsonl", "one", "two"])
    assert parsed.runs == ["one", "two"] and parsed.part == "exits"
