"""`run_training`: what it writes, where it may write, and what it starts from."""

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
from offramp.commands.train import TrainRequest, read_training_rows, run_training
from offramp.errors import OfframpError
from offramp.inference import run_folder as folders
from offramp.inference.finetuned import find_model
from offramp.training import checkpoint
from offramp.training.schedule import Schedule
from offramp.utils.run_paths import is_run
from tests import factories, processes

QUICK = Schedule(epochs=1, batch_size=8, lr=0.01)


@pytest.fixture
def arguments(base: str, tmp_path: Path) -> dict[str, Any]:
    """The arguments of a small request in a folder of its own."""
    data = {name: factories.write_jsonl(tmp_path / f"{name}.jsonl", factories.labelled_rows("classification", 16, seed))
            for name, seed in (("train", 0), ("dev", 1))}  # fmt: skip
    return {"model": base, "out": str(tmp_path / "run"), "method": "branchynet", "schedule": QUICK, **data}


@pytest.fixture(scope="module")
def full(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the plain method, to start from."""
    return factories.run_folder(base, tmp_path_factory.mktemp("full"), "full")


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, without the files of rows."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".jsonl")


def test_run_training_writes_all_files_and_leaves_nothing_else(arguments: dict[str, Any], tmp_path: Path) -> None:
    trained = run_training(TrainRequest(**arguments))
    assert names_in(tmp_path) == ["run"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "offramp.json", "offramp.safetensors", "points.json",
            "recipe.yaml", "README.md"} <= factories.read_files(tmp_path / "run").keys()  # fmt: skip
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert recipe["method"] == "branchynet" and recipe["schedule"]["seed"] == 42 and recipe["log"] == trained.log
    card = (tmp_path / "run" / "README.md").read_text()
    assert "share of full MACs" in card and str(tmp_path) not in card
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "offramp"


@pytest.mark.parametrize("method", ["deebert", "branchynet"])
def test_init_starts_from_the_fine_tuned_weights(full: Path, base: str, tmp_path: Path, method: str) -> None:
    run = factories.run_folder(base, tmp_path, method, init=str(full), schedule=QUICK)
    stages = [entry["stage"] for entry in yaml.safe_load((run / "recipe.yaml").read_text())["log"]]
    before, after = (load_file(folder / "model.safetensors") for folder in (full, run))
    if method == "deebert":  # stage 1 was done already, and stage 2 does not touch the backbone
        assert stages == ["exit heads"]
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    else:
        assert stages == ["joint"]
        assert not all(torch.equal(before[name], after[name]) for name in before)


def test_init_refuses_a_run_with_other_labels(full: Path, arguments: dict[str, Any], tmp_path: Path) -> None:
    other = [{**row, "label": row["label"].upper()} for row in factories.labelled_rows("classification", 16)]
    arguments.update(train=factories.write_jsonl(tmp_path / "train.jsonl", other), dev=None, init=str(full))
    with pytest.raises(OfframpError) as caught:
        run_training(TrainRequest(**arguments))
    assert "'good'" in str(caught.value) and "'GOOD'" in str(caught.value) and "--init" in caught.value.fix
    assert names_in(tmp_path) == []
    with pytest.raises(OfframpError, match="no such folder"):
        run_training(TrainRequest(**{**arguments, "init": str(tmp_path / "nowhere")}))


def test_init_of_masked_lm_needs_no_exit_heads_of_its_own(base: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    first = factories.run_folder(base, tmp_path / "a", "full", "masked_lm", schedule=QUICK)
    second = factories.run_folder(base, tmp_path / "b", "deebert", "masked_lm", init=str(first), schedule=QUICK)
    assert is_run(second)


def test_read_training_rows_holds_out_the_same_rows_every_time(arguments: dict[str, Any]) -> None:
    split = TrainRequest(**{**arguments, "dev": None, "dev_split": 0.25})
    rows = read_training_rows(split)
    assert (len(rows.train), len(rows.dev)) == (12, 4) and "held out" in rows.dev_name
    assert read_training_rows(split) == rows
    all_rows = [str(row) for row in factories.labelled_rows("classification", 16)]
    assert sorted(str(row) for row in [*rows.train, *rows.dev]) == sorted(all_rows)
    for share in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(OfframpError, match="--dev-split"):
            read_training_rows(TrainRequest(**{**arguments, "dev": None, "dev_split": share}))


def test_a_refused_request_leaves_nothing_behind(arguments: dict[str, Any], tmp_path: Path) -> None:
    for mistake in ({"options": {"pool": "best"}}, {"options": {"pol": "mean"}}, {"model": str(tmp_path / "none")}):
        with pytest.raises(OfframpError):
            run_training(TrainRequest(**{**arguments, **mistake}))
        assert names_in(tmp_path) == []
    run_training(TrainRequest(**arguments))


def test_train_takes_two_methods_without_a_recipe(arguments: dict[str, Any], tmp_path: Path) -> None:
    files = {name: arguments[name] for name in ("model", "train", "dev", "out")}
    pair = "length_adaptive+branchynet"
    trained = training.train(**files, method=pair, epochs=1, batch_size=8, lr=0.01, options={"pool": "mean"})
    assert trained.model.method.name == pair and trained.folder == tmp_path / "run"
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["options"] == {"pool": "mean"}


def test_an_existing_folder_is_replaced_by_force_only(arguments: dict[str, Any], tmp_path: Path) -> None:
    run_training(TrainRequest(**arguments))
    before = factories.read_files(tmp_path / "run")
    other = TrainRequest(**{**arguments, "method": "full"})
    with pytest.raises(OfframpError, match="a finished run there") as caught:
        run_training(other)
    assert "--force" in caught.value.fix
    assert factories.read_files(tmp_path / "run") == before and names_in(tmp_path) == ["run"]
    run_training(other, force=True)
    assert folders.read_description(tmp_path / "run")["method"] == "full" and names_in(tmp_path) == ["run"]
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(OfframpError, match="something else there"):
        run_training(TrainRequest(**{**arguments, "out": str(tmp_path / "notes")}))
    with pytest.raises(OfframpError, match="--out"):
        run_training(TrainRequest(**{**arguments, "out": "/"}))


def test_the_old_run_stays_until_the_new_one_is_complete(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_training(TrainRequest(**arguments))
    before = factories.read_files(tmp_path / "run")
    for module, name in ((checkpoint, "save_file"), (folders, "save_file"), (training, "render_model_card")):
        with monkeypatch.context() as broken:
            broken.setattr(module, name, _full_disk)
            with pytest.raises(OfframpError, match="No space left") as caught:
                run_training(TrainRequest(**{**arguments, "method": "full"}), force=True)
        assert ".new" not in str(caught.value), "the message names the run, not the temporary folder"
        assert factories.read_files(tmp_path / "run") == before and names_in(tmp_path) == ["run", "run.partial"]
    run_training(TrainRequest(**{**arguments, "method": "full"}), force=True)
    assert folders.read_description(tmp_path / "run")["method"] == "full" and names_in(tmp_path) == ["run"]


def _full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_unfinished_run_of_another_request_is_kept(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(training, "find_operating_points", _full_disk)
        with pytest.raises(OSError, match="No space"):
            run_training(TrainRequest(**arguments))
    before = factories.read_files(tmp_path / "run.partial")
    other = TrainRequest(**{**arguments, "schedule": Schedule(**{**vars(QUICK), "seed": 1})})
    with pytest.raises(OfframpError, match="an unfinished run with other settings"):
        run_training(other)
    assert factories.read_files(tmp_path / "run.partial") == before
    with pytest.raises(OfframpError, match="not finished"):
        folders.load_run(tmp_path / "run")
    (tmp_path / "run.partial" / checkpoint.CHECKPOINT_FILE).write_bytes(b"damaged")
    with pytest.raises(OfframpError, match="damaged"):
        run_training(TrainRequest(**arguments))
    run_training(TrainRequest(**arguments), force=True)
    assert names_in(tmp_path) == ["run"]


def limit_files() -> None:
    """Let no file of this process grow beyond a few kilobytes, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))


def test_a_full_disk_is_one_message_and_leaves_no_damaged_file(arguments: dict[str, Any], tmp_path: Path) -> None:
    """The operating system refuses in the middle of a file that a library writes."""
    words = [
        "--model",
        arguments["model"],
        "--train",
        arguments["train"],
        "--dev",
        arguments["dev"],
        "--out",
        arguments["out"],
    ]
    process = processes.start_command(
        ["train", *words, "--epochs", "1", "--save-seconds", "0"], tmp_path / "log", limit_files
    )
    assert processes.wait_for_command(process) == 2
    printed = (tmp_path / "log").read_text()
    assert "File too large" in printed and "make room" in printed and "Traceback" not in printed
    assert factories.read_files(tmp_path / "run.partial").keys() == {"lock", "recipe.json"}


def test_training_on_a_fine_tuned_model_mentions_attach(trained: Path, base: str, tmp_path: Path) -> None:
    train = factories.write_jsonl(tmp_path / "train.jsonl", factories.labelled_rows("classification", 16))
    news: list[dict[str, Any]] = []
    for number, model in enumerate((trained, base)):
        run_training(
            TrainRequest(str(model), train, str(tmp_path / f"run{number}"), schedule=Schedule(epochs=1)),
            listener=lambda **entries: news.append(entries),
        )
    heads = [entries["trained_head"] for entries in news if "trained_head" in entries]
    assert heads == ["BertForSequenceClassification"]


def test_a_plain_fine_tuned_model_as_init_points_to_attach(trained: Path, tmp_path: Path) -> None:
    find_model(str(trained)).copy_to(tmp_path / "plain")
    train = factories.write_jsonl(tmp_path / "train.jsonl", factories.labelled_rows("classification", 16))
    request = TrainRequest("minilm", train, str(tmp_path / "run"), init=str(tmp_path / "plain"))
    with pytest.raises(OfframpError, match="offramp attach"):
        run_training(request)


def test_another_metric_chooses_the_operating_points(arguments: dict[str, Any], full: Path) -> None:
    trained = run_training(TrainRequest(**{**arguments, "metric": "matthews", "init": str(full)}))
    assert trained.points.metric == trained.model.network.task.metric == "matthews"
    assert trained.points.bounds is not None and trained.points.bounds.rows is None  # losses are estimated
    assert all("matthews" in epoch for epoch in trained.log)
    recipe = yaml.safe_load((Path(arguments["out"]) / "recipe.yaml").read_text())
    assert recipe["metric"] == "matthews" and folders.load_run(arguments["out"]).network.task.metric == "matthews"
