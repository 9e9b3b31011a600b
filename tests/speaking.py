"""A tiny translation task, learned in seconds: letters are copied, and so is their number."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from offramp.commands.train import TrainRequest, run_training
from offramp.training.schedule import Schedule
from tests import runs

LETTERS = "abcdefgh"
SPLITS = (("train", 800, 0), ("dev", 60, 1))  # name, rows, seed
SHAPE = {
    "model_type": "marian",
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 24,
    "vocab_size": 300,
    "init_std": 0.15,
    "dropout": 0.0,
    "activation_function": "relu",
}


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sentences of two to five letters and what they mean: themselves."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(LETTERS, k=draw.randint(2, 5))) for _ in range(count)]
    return [{"src": text, "tgt": text} for text in texts]


def configuration(folder: Path, **shape: Any) -> str:
    """A model to be made."""
    path = folder / "tiny.json"
    path.write_text(json.dumps({**SHAPE, **shape}))
    return str(path)


def train(folder: Path, epochs: int = 4, method: str = "depth_adaptive", **options: Any) -> Path:
    """A finished run `folder/run`; its rows beside it. By default all of it in one stage, labels not smoothed."""
    given = {name: runs.jsonl(folder / f"{name}.jsonl", rows(count, seed)) for name, count, seed in SPLITS}
    if method == "depth_adaptive":
        options = {"together": True, "smoothing": 0.0, **options}
    schedule = Schedule(epochs=epochs, batch_size=16, lr=0.005, precision="fp32")
    about = {"task": "translation", "method": method, "options": options, "schedule": schedule}
    run_training(TrainRequest(model=configuration(folder), out=str(folder / "run"), **about, **given))
    return folder / "run"
