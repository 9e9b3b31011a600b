"""`offramp.train`, `calibrate`, `evaluate` and `load`: importable, lazy, and the functions of the commands."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import offramp
from offramp.commands import calibrate, evaluate, train
from tests import factories

FUNCTIONS = {"calibrate": calibrate.calibrate, "evaluate": evaluate.evaluate, "train": train.train}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_function_of_the_command_is_importable_and_documented(name: str) -> None:
    function = getattr(offramp, name)
    assert function is FUNCTIONS[name] and name in offramp.__all__ and name in dir(offramp)
    assert f"offramp.{name}(" in inspect.getdoc(function), "the docstring has an example"
    hints = inspect.signature(function)
    assert hints.return_annotation is not inspect.Signature.empty
    undocumented = [name for name in hints.parameters if f"{name}" not in inspect.getdoc(function)]
    assert not undocumented


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="frobnicate"):
        offramp.frobnicate  # noqa: B018
    with pytest.raises(ImportError):
        from offramp import frobnicate  # noqa: F401


def test_importing_a_name_does_not_import_the_others() -> None:
    script = "import offramp, sys; print([name for name in sys.modules if name.startswith('offramp.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['offramp.errors']"


def test_train_calibrate_evaluate_and_load_work_together(base: str, tmp_path: Path) -> None:
    rows = {name: factories.labelled_rows("classification", 40, seed) for seed, name in enumerate(("train", "test"))}
    files = {name: factories.write_jsonl(tmp_path / f"{name}.jsonl", content) for name, content in rows.items()}
    trained = offramp.train(
        model=base, train=files["train"], out=tmp_path / "run", method="branchynet", epochs=2, batch_size=8, lr=0.01
    )
    assert trained.folder == tmp_path / "run" and len(trained.log) == 2 and trained.points.points
    points = offramp.calibrate(trained.folder, files["test"])
    assert points.data["rows"] == 40
    cell = offramp.evaluate(trained.folder, files["test"], budget=0.5, json=tmp_path / "cell.json")
    assert cell["rows"] == 40 and cell["macs"]["share_of_full"] <= 0.6 and (tmp_path / "cell.json").is_file()
    assert cell["command"].startswith("offramp.evaluate(") and str(tmp_path) not in cell["command"]
    predictions = offramp.load(trained.folder).predict([row["text"] for row in rows["test"]], budget=0.5)
    right = sum(answer["label"] == row["label"] for answer, row in zip(predictions, rows["test"], strict=True))
    assert right / 40 == pytest.approx(cell["metrics"]["accuracy"])


def test_calibrate_refuses_a_guarantee_beside_a_search(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "own")
    rows = factories.write_jsonl(tmp_path / "rows.jsonl", factories.labelled_rows("classification", 10))
    with pytest.raises(offramp.OfframpError, match="--search and --risk"):
        offramp.calibrate(run, rows, search=True, risk=0.1)
    with pytest.raises(offramp.OfframpError, match="--search and --latency"):
        offramp.calibrate(run, rows, search=True, latency="5ms")
