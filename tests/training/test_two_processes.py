"""`accelerate launch` with two processes trains as one process does with the same batches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from offramp.inference.run_folder import load_run
from offramp.training.schedule import Schedule
from tests import factories

ROOT = Path(__file__).parents[2]
NOTING = """
import os, sys
from pathlib import Path
from offramp import cli
from offramp.commands import train

def noted(name):
    real = getattr(train, name)
    def call(*arguments):
        Path(sys.argv[0]).with_name(f"{name}-of-{os.environ['RANK']}").touch()
        return real(*arguments)
    setattr(train, name, call)

noted("train_wordpiece_tokenizer")
noted("run_attach")
cli.main()
"""
SCHEDULE = Schedule(epochs=2, batch_size=5, lr=0.002, precision="fp32")  # 48 rows: the last batches have 3


def train_with_two_processes(options: dict[str, str], program: Sequence[str] = ("--module", "offramp.cli")) -> None:
    # with --cpu accelerate starts one process only, unless there is MPI; --multi_gpu starts two, with or without GPUs
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    more = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    words = [word for pair in options.items() for word in pair if word]
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    done = subprocess.run(
        [*launch, *more, *program, "train", *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1, "both processes reported"


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """On tagging, where processes have different numbers of answers; without dropout, which each process draws."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    base = str(factories.model_folder(tmp_path / "base", **no_dropout))
    one = factories.run_folder(base, tmp_path, "full", "tagging", schedule=SCHEDULE)
    shape = {"--epochs": "2", "--batch-size": "5", "--lr": "0.002", "--precision": "fp32", "--task": "tagging"}
    data = {"--train": str(tmp_path / "train.jsonl"), "--dev": str(tmp_path / "dev.jsonl")}
    arguments = {**data, **shape, "--model": base, "--method": "full", "--out": str(tmp_path / "two")}
    train_with_two_processes(arguments)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "dev.jsonl", "run", "train.jsonl", "two"]
    weights, of_two = (load_file(run / "model.safetensors") for run in (one, tmp_path / "two"))
    assert all(torch.allclose(weights[name], of_two[name], atol=2e-4) for name in weights)
    recipes = [yaml.safe_load((run / "recipe.yaml").read_text()) for run in (one, tmp_path / "two")]
    assert [recipe["processes"] for recipe in recipes] == [1, 2]
    losses = [[entry["loss"] for entry in recipe["log"]] for recipe in recipes]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    start = load_file(tmp_path / "base" / "model.safetensors")
    moved = max(float((weights[name] - start[name]).abs().max()) for name in weights if name in start)
    assert moved > 0.01, "nothing was learned, so nothing was compared"


def test_the_main_process_alone_learns_the_tokenizer_and_attaches(tmp_path: Path) -> None:
    rows = factories.labelled_rows("classification", 160)
    train = factories.write_jsonl(tmp_path / "train.jsonl", rows)
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{row['text']} {number}\n" for number, row in enumerate(rows)))
    (tmp_path / "noting.py").write_text(NOTING)
    shape = ["hidden_size=32", "num_attention_heads=4", "intermediate_size=48", "num_hidden_layers=2"]
    arguments = {"--model": "bert", "--from-scratch": "", "--vocabulary": "150", "--train": train, "--epochs": "1"}
    arguments |= {"--attach": str(texts), "--out": str(tmp_path / "two")}
    arguments |= {f"--shape={entry}": "" for entry in shape}
    train_with_two_processes(arguments, [str(tmp_path / "noting.py")])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "noting.py", "run_attach-of-0", "texts.txt", "train.jsonl", "train_wordpiece_tokenizer-of-0", "two", "two-full",
    ]  # fmt: skip
    assert load_run(tmp_path / "two").method.name == "attached"
