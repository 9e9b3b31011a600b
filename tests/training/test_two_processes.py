"""`accelerate launch` with two processes trains as one process does with the same batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from offramp.training.schedule import Schedule
from tests import factories

ROOT = Path(__file__).parents[2]
SCHEDULE = Schedule(epochs=2, batch_size=5, lr=0.002, precision="fp32")  # 48 rows: the last batches have 3


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """On tagging, where processes have different numbers of answers; without dropout, which each process draws."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    base = str(factories.model_folder(tmp_path / "base", **no_dropout))
    one = factories.run_folder(base, tmp_path, "full", "tagging", schedule=SCHEDULE)
    # with --cpu accelerate starts one process only, unless there is MPI; --multi_gpu starts two, with or without GPUs
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    more = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    shape = {"--epochs": "2", "--batch-size": "5", "--lr": "0.002", "--precision": "fp32", "--task": "tagging"}
    data = {"--train": str(tmp_path / "train.jsonl"), "--dev": str(tmp_path / "dev.jsonl")}
    arguments = {**data, **shape, "--model": base, "--method": "full", "--out": str(tmp_path / "two")}
    words = [word for pair in arguments.items() for word in pair]
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    done = subprocess.run(
        [*launch, *more, "--module", "offramp.cli", "train", *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1, "both processes reported"
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
