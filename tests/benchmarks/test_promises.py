"""benchmarks/promises.py: runs are trained and recorded once, calibrations on drawn rows are measured on the others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import promises
from offramp import methods
from tests.factories import labelled_rows


def test_every_method_that_replays_is_in_the_study() -> None:
    assert set(promises.METHODS) == {name for name in methods.names() if methods.get(name).replays}


def test_a_tiny_study_is_written_and_continued(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "data" / "toy" / "all.jsonl.gz"
    source.parent.mkdir(parents=True)
    source.write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in labelled_rows("classification", 260, 6)).encode())
    )
    monkeypatch.setattr(promises, "SETS", {"toy": promises.StudySet(("all",), 40, 120, 60)})
    monkeypatch.setattr(promises, "DEV", 30)
    monkeypatch.setattr(promises, "MODEL", base)
    target, figure = tmp_path / "found.json", tmp_path / "figure.svg"
    words = ["--data", str(tmp_path / "data"), "--work", str(tmp_path / "work"), "--sets", "toy", "--json", str(target)]
    words += ["--methods", "deebert,fastbert,branchynet,pabee", "--figure", str(figure), "--trials"]
    for trials in ("1", "2"):
        promises.main([*words, trials])
    assert capsys.readouterr().out.count("recorded") == 2, "two recordings, not repeated"
    study = json.loads(target.read_text())
    assert list(study["runs"]["toy"]) == ["deebert", "fastbert", "branchynet", "pabee"]
    for run in study["runs"]["toy"].values():
        assert [line["trials"] for line in run["summary"]] == [2] * 6
        assert all(0.0 <= line["broken"] <= 1.0 and 0.0 < line["mac_share"] <= 1.2 for line in run["summary"])
    assert study["total"][0]["trials"] == 8 and "max_loss = 0.005" in figure.read_text()


def test_a_shared_recording_equals_one_recorded_alone(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    rows = labelled_rows("classification", 130, 6)
    for name, part in (("train", rows[:40]), ("dev", rows[40:70]), ("held_out", rows[70:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    monkeypatch.setattr(promises, "MODEL", base)
    promises.train_runs(folder, promises.StudySet(("all",), 40, 60, 30), ["deebert", "fastbert"])
    promises.record_runs(folder, ["deebert", "fastbert"])
    together = promises.load_file(promises.recording_file(folder, "fastbert"))
    promises.recording_file(folder, "fastbert").unlink()
    promises.record_runs(folder, ["fastbert"])
    alone = promises.load_file(promises.recording_file(folder, "fastbert"))
    assert together.keys() == alone.keys()
    assert all((together[key] - alone[key]).abs().max() < 1e-5 for key in alone)
