"""A command that was killed at any moment and run again ends in the same result, bit for bit."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from offramp.training import checkpoint
from tests.factories import labelled_rows, write_jsonl
from tests.processes import start_command, wait_for_command

METHODS = {"branchynet": 1, "deebert": 2, "adapler": 2}  # stages; adapler's have artifacts and two optimisers
EPOCHS, BATCH, ROWS = 3, 4, 16
STEPS = ROWS // BATCH
Moment = tuple[int, int, int]  # stage, epoch, steps done in it


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The rows: the same files for every run, because points.json contains their names."""
    folder = tmp_path_factory.mktemp("data")
    return {
        "--train": write_jsonl(folder / "train.jsonl", labelled_rows("classification", ROWS)),
        "--dev": write_jsonl(folder / "dev.jsonl", labelled_rows("classification", 8, 1)),
    }


def command(base: str, data: dict[str, str], method: str, out: Path) -> list[str]:
    """Return the command of a run with a checkpoint after every step."""
    fixed = {"--model": base, "--method": method, "--out": str(out), "--lr": "0.005", "--save-seconds": "0"}
    shape = {"--epochs": str(EPOCHS), "--batch-size": str(BATCH)}
    return ["train", *(word for pair in {**data, **fixed, **shape}.items() for word in pair)]


@pytest.fixture(scope="module")
def expected(base: str, data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The uninterrupted run of each method."""
    folder = tmp_path_factory.mktemp("expected")
    for method in METHODS:
        process = start_command(command(base, data, method, folder / method), folder / "log")
        assert wait_for_command(process) == 0, (folder / "log").read_text()
    return {method: folder / method for method in METHODS}


def assert_same(run: Path, other: Path) -> None:
    """Assert that weights, points and history are identical; only measured times may differ."""
    for name in ("model.safetensors", "offramp.safetensors", "offramp.json", "points.json", "config.json"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name
    one, two = (yaml.safe_load((folder / "recipe.yaml").read_text()) for folder in (run, other))
    assert one["log"] == two["log"]
    assert len(one["log"]) == EPOCHS * len({entry["stage"] for entry in one["log"]})


def wait_until(partial: Path, moment: Moment) -> Moment:
    """Wait until the checkpoint of a running command has reached a moment, and return the one it has reached.

    The file is replaced in one step, so it can be read at any time.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        progress = checkpoint.read_progress(partial)
        if progress and (progress.stage, progress.epoch, progress.step) >= moment:
            return progress.stage, progress.epoch, progress.step
        time.sleep(0.0005)
    raise AssertionError(f"never reached {moment}")


def slow_down() -> None:
    """Slow the command down, so that the test can stop it at the intended step."""
    real = os.replace

    def replace(a: Path, b: Path) -> None:
        real(a, b)
        time.sleep(0.01)

    os.replace = replace  # type: ignore[assignment]


def kill_at_replace(name: str, time: int, before: bool) -> None:
    """Kill the command just before or just after it replaces the file `name` for the n-th time."""
    real, count = os.replace, 0

    def replace(a: Path, b: Path) -> None:
        nonlocal count
        count += Path(b).name == name
        fatal = count == time and Path(b).name == name
        if not (fatal and before):
            real(a, b)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace  # type: ignore[assignment]


@pytest.mark.parametrize("method", METHODS)
def test_train_resumes_after_being_killed_twice(
    method: str, expected: dict[str, Path], base: str, data: dict[str, str], tmp_path: Path
) -> None:
    arguments, log = command(base, data, method, tmp_path / "run"), tmp_path / "log"
    last = METHODS[method] - 1
    for moment in [(last, 0, STEPS - 1), (last, 2, 2)]:
        process = start_command(arguments, log, slow_down)
        reached = wait_until(tmp_path / "run.partial", moment)
        process.kill()
        assert wait_for_command(process) == -signal.SIGKILL
        assert reached < (last, EPOCHS, 0), "the command was killed too late"
        assert not (tmp_path / "run").exists()
    assert wait_for_command(start_command(arguments, log)) == 0, log.read_text()
    assert log.read_text().count("unfinished run") == 2, "each resumed command reports that it resumes"
    assert_same(tmp_path / "run", expected[method])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "run"]


def test_train_resumes_after_being_killed_around_each_replaced_file(
    expected: dict[str, Path], base: str, data: dict[str, str], tmp_path: Path
) -> None:
    arguments, log = command(base, data, "branchynet", tmp_path / "run"), tmp_path / "log"
    for name, time_, before in [
        ("checkpoint.safetensors", 1, True),  # only the recipe is there yet
        ("checkpoint.safetensors", STEPS, True),  # the new checkpoint is written but not in its place
        ("best.safetensors", 1, False),  # the best weights are newer than the checkpoint
        ("checkpoint.safetensors", 2 * STEPS + 2, False),  # between the last step and calibration
        ("run", 1, True),  # the finished folder is written but not in its place
    ]:
        process = start_command(arguments, log, functools.partial(kill_at_replace, name, time_, before))
        assert wait_for_command(process) == -signal.SIGKILL, log.read_text()
        assert not (tmp_path / "run").exists()
    assert wait_for_command(start_command(arguments, log)) == 0, log.read_text()
    assert_same(tmp_path / "run", expected["branchynet"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "run"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_train_saves_the_last_step_on_ctrl_c_and_sigterm(
    number: signal.Signals, expected: dict[str, Path], base: str, data: dict[str, str], tmp_path: Path
) -> None:
    arguments, log = command(base, data, "branchynet", tmp_path / "run"), tmp_path / "log"
    arguments[arguments.index("--save-seconds") + 1] = "1000"  # only epochs' ends and Ctrl-C write a checkpoint
    process = start_command(arguments, log, slow_down)
    wait_until(tmp_path / "run.partial", (0, 1, 0))
    assert process.pid is not None
    os.kill(process.pid, number)
    assert wait_for_command(process) == 130
    assert "stopped" in log.read_text() and "Traceback" not in log.read_text()
    assert not (tmp_path / "run").exists()
    assert wait_for_command(start_command(arguments, log)) == 0, log.read_text()
    assert_same(tmp_path / "run", expected["branchynet"])
