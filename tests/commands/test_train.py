"""`offramp train` as a function: what it writes, where it may write, and what it starts from."""

from __future__ import annotations

import errno
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from offramp.commands import train as training
from offramp.commands.train import TrainRequest, rows_of, run_training
from offramp.errors import OfframpError
from offramp.inference import run_folder as folders
from offramp.training import checkpoint
from offramp.training.schedule import Schedule
from offramp.utils.run_paths import is_run
from tests import runs

QUICK = Schedule(epochs=1, batch_size=8, lr=0.01)


@pytest.fixture
def asked(base: str, tmp_path: Path) -> dict[str, Any]:
    """A small job in a folder of its own."""
    data = {name: runs.jsonl(tmp_path / f"{name}.jsonl", runs.rows("classification", 16, seed))
            for name, seed in (("train", 0), ("dev", 1))}  # fmt: skip
    return {"model": base, "out": str(tmp_path / "run"), "method": "branchynet", "schedule": QUICK, **data}


@pytest.fixture(scope="module")
def full(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the plain method, to start from."""
    return runs.train(base, tmp_path_factory.mktemp("full"), "full")


def beside(folder: Path) -> list[str]:
    """What stands in a folder, without the rows."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".jsonl")


def test_the_folder_is_whole_and_nothing_else_is_left(asked: dict[str, Any], tmp_path: Path) -> None:
    finished = run_training(TrainRequest(**asked))
    assert beside(tmp_path) == ["run"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "offramp.json", "offramp.safetensors", "points.json",
            "recipe.yaml", "README.md"} <= runs.files(tmp_path / "run").keys()  # fmt: skip
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert recipe["method"] == "branchynet" and recipe["schedule"]["seed"] == 42 and recipe["log"] == finished.log
    card = (tmp_path / "run" / "README.md").read_text()
    assert "share of full MACs" in card and str(tmp_path) not in card
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "offramp"


@pytest.mark.parametrize("method", ["deebert", "branchynet"])
def test_init_starts_from_the_fine_tuned_weights(full: Path, base: str, tmp_path: Path, method: str) -> None:
    run = runs.train(base, tmp_path, method, init=str(full), schedule=QUICK)
    stages = [entry["stage"] for entry in yaml.safe_load((run / "recipe.yaml").read_text())["log"]]
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (full, run))
    if method == "deebert":  # stage 1 was done already, and stage 2 does not touch the backbone
        assert stages == ["off-ramps"]
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    else:
        assert stages == ["joint"]
        assert not all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_init_refuses_other_answers(full: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    other = [{**row, "label": row["label"].upper()} for row in runs.rows("classification", 16)]
    asked.update(train=runs.jsonl(tmp_path / "train.jsonl", other), dev=None, init=str(full))
    with pytest.raises(OfframpError) as caught:
        run_training(TrainRequest(**asked))
    assert "'good'" in str(caught.value) and "'GOOD'" in str(caught.value) and "--init" in caught.value.fix
    assert beside(tmp_path) == []
    with pytest.raises(OfframpError, match="no such folder"):
        run_training(TrainRequest(**{**asked, "init": str(tmp_path / "nowhere")}))


def test_masked_lm_can_be_continued_and_needs_no_ramps_of_its_own(base: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    first = runs.train(base, tmp_path / "a", "full", "masked_lm", schedule=QUICK)
    second = runs.train(base, tmp_path / "b", "deebert", "masked_lm", init=str(first), schedule=QUICK)
    assert is_run(second)


def test_held_out_rows_are_the_same_every_time(asked: dict[str, Any]) -> None:
    split = TrainRequest(**{**asked, "dev": None, "dev_split": 0.25})
    rows = rows_of(split)
    assert (len(rows.train), len(rows.dev)) == (12, 4) and "held out" in rows.dev_name
    assert rows_of(split) == rows
    everything = [str(row) for row in runs.rows("classification", 16)]
    assert sorted(str(row) for row in [*rows.train, *rows.dev]) == sorted(everything)
    for share in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(OfframpError, match="--dev-split"):
            rows_of(TrainRequest(**{**asked, "dev": None, "dev_split": share}))


def test_a_mistake_leaves_nothing_that_hinders_the_next_try(asked: dict[str, Any], tmp_path: Path) -> None:
    for mistake in ({"options": {"pool": "best"}}, {"options": {"pol": "mean"}}, {"model": str(tmp_path / "none")}):
        with pytest.raises(OfframpError):
            run_training(TrainRequest(**{**asked, **mistake}))
        assert beside(tmp_path) == []
    run_training(TrainRequest(**asked))


def test_what_is_there_is_only_replaced_by_force(asked: dict[str, Any], tmp_path: Path) -> None:
    run_training(TrainRequest(**asked))
    before = runs.files(tmp_path / "run")
    other = TrainRequest(**{**asked, "method": "full"})
    with pytest.raises(OfframpError, match="a finished run there") as caught:
        run_training(other)
    assert "--force" in caught.value.fix
    assert runs.files(tmp_path / "run") == before and beside(tmp_path) == ["run"]
    run_training(other, force=True)
    assert folders.read_description(tmp_path / "run")["method"] == "full" and beside(tmp_path) == ["run"]
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(OfframpError, match="something else there"):
        run_training(TrainRequest(**{**asked, "out": str(tmp_path / "notes")}))
    with pytest.raises(OfframpError, match="--out"):
        run_training(TrainRequest(**{**asked, "out": "/"}))


def test_the_old_run_stands_until_the_new_one_is_complete(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_training(TrainRequest(**asked))
    before = runs.files(tmp_path / "run")
    for module, name in ((checkpoint, "save_file"), (folders, "save_file"), (training, "render_model_card")):
        with monkeypatch.context() as broken:
            broken.setattr(module, name, _full_disk)
            with pytest.raises(OfframpError, match="No space left") as caught:
                run_training(TrainRequest(**{**asked, "method": "full"}), force=True)
        assert ".new" not in str(caught.value), "people know the run by its own name"
        assert runs.files(tmp_path / "run") == before and beside(tmp_path) == ["run", "run.partial"]
    run_training(TrainRequest(**{**asked, "method": "full"}), force=True)
    assert folders.read_description(tmp_path / "run")["method"] == "full" and beside(tmp_path) == ["run"]


def _full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_unfinished_run_of_another_job_is_not_thrown_away(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(training, "calibrate", _full_disk)
        with pytest.raises(OSError, match="No space"):
            run_training(TrainRequest(**asked))
    before = runs.files(tmp_path / "run.partial")
    other = TrainRequest(**{**asked, "schedule": Schedule(**{**vars(QUICK), "seed": 1})})
    with pytest.raises(OfframpError, match="an unfinished run with other settings"):
        run_training(other)
    assert runs.files(tmp_path / "run.partial") == before
    with pytest.raises(OfframpError, match="not finished"):
        folders.load_run(tmp_path / "run")
    (tmp_path / "run.partial" / checkpoint.CHECKPOINT_FILE).write_bytes(b"damaged")
    with pytest.raises(OfframpError, match="damaged"):
        run_training(TrainRequest(**asked))
    run_training(TrainRequest(**asked), force=True)
    assert beside(tmp_path) == ["run"]


def limit_files() -> None:
    """In the command: no file may grow beyond a few kilobytes, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))


def test_a_really_full_disk(asked: dict[str, Any], tmp_path: Path) -> None:
    """The operating system itself refuses, in the middle of a file that a library writes."""
    words = ["--model", asked["model"], "--train", asked["train"], "--dev", asked["dev"], "--out", asked["out"]]
    process = runs.start(["train", *words, "--epochs", "1", "--save-seconds", "0"], tmp_path / "log", limit_files)
    assert runs.finish(process) == 2
    said = (tmp_path / "log").read_text()
    assert "File too large" in said and "make room" in said and "Traceback" not in said
    assert runs.files(tmp_path / "run.partial").keys() == {"lock", "recipe.json"}
