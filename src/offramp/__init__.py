"""Offramp: Transformers that spend only the compute an input needs.

    import offramp

    offramp.attach("my-finetuned-model", "texts.txt", "runs/attached")
    offramp.train(model="minilm", train="train.jsonl", out="runs/mine", method="deebert")
    offramp.calibrate("runs/mine", "calibration.jsonl", risk=0.02)
    offramp.evaluate("runs/mine", "test.jsonl", budget=0.5)["metrics"]
    offramp.load("runs/mine").predict(["a gem of a film"], budget=0.5)

`attach`, `train`, `calibrate` and `evaluate` are the functions behind the commands of the same names (`offramp eval` is
`evaluate`). `import offramp` is quick because torch is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offramp.errors import OfframpError

if TYPE_CHECKING:
    from offramp.commands.attach import attach
    from offramp.commands.calibrate import calibrate
    from offramp.commands.evaluate import evaluate
    from offramp.commands.train import train
    from offramp.inference.hub import push_to_hub
    from offramp.inference.predictor import Predictor

__version__ = "0.1.0"
__all__ = ["OfframpError", "__version__", "attach", "calibrate", "evaluate", "load", "push_to_hub", "train"]


def load(
    folder: str | Path,
    engine: str = "auto",
    precision: Literal["fp32", "bf16", "int8"] = "fp32",
    threads: int | None = None,
    revision: str | None = None,
    cache: str | Path | None = None,
) -> Predictor:
    """Open a run folder written by `offramp train` or `offramp attach`, or one on the hub, ready to predict.

        model = offramp.load("runs/mine")
        model.predict(["a gem of a film", "a waste of time"], budget=0.5)

    Args:
        folder: the run folder, or its name on the Hugging Face hub, "user/name".
        engine: how layers are executed: "native" (C++), "openvino", "torch", or "auto": the first of these that is
            installed and serves the model.
        precision: of the layers; "bf16" and "int8" need the native engine or OpenVINO.
        threads: processor threads; all cores if left out.
        revision: of a run on the hub: a branch, a tag or a commit.
        cache: where compiled graphs are kept, by default the user's cache folder; "none": nowhere.
    """
    from offramp.inference.predictor import Predictor

    return Predictor.load(folder, engine, precision, threads, revision, cache)


def __getattr__(name: str) -> Any:
    """Import a command's function when it is first used."""
    if name == "distributed":
        return import_module("offramp.distributed")
    if name in ("attach", "calibrate", "evaluate", "train"):
        return getattr(import_module(f"offramp.commands.{name}"), name)
    if name == "push_to_hub":
        return getattr(import_module("offramp.inference.hub"), name)
    raise AttributeError(f"module 'offramp' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, also those that are not imported yet."""
    return sorted({*globals(), *__all__})
