"""`offramp eval` as a function: one result cell, the record that every experiment writes and `compare` collects."""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offramp import __version__
from offramp.inference.batching import RunOutput, per_input_row, score_policy
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data
from offramp.utils.hardware import hardware


@dataclass(frozen=True)
class Origin:
    """Where a result comes from."""

    data: str
    split: str
    command: str
    recipe: Mapping[str, Any]  # how the model was trained


def data_and_split(source: str) -> tuple[str, str]:
    """What a file of rows is called in results: its folder (the data set) and its name (the split)."""
    path = Path(source).resolve() if Path(source).exists() else Path(source)
    return path.parent.name or path.name, path.name.split(".")[0]


def model_name(source: str) -> str:
    """A model by its folder or hub name; a folder merely called "model" is known by the one around it."""
    parts = Path(source).parts
    return parts[-2] if parts[-1] == "model" and len(parts) > 1 else parts[-1]


@dataclass(frozen=True)
class Measurement:
    """One setting on labelled rows."""

    data: Data
    settings: Any
    metrics: Mapping[str, float]
    outcome: RunOutput
    batch_size: int
    seconds: float | None = None  # None: replayed, no clock ran


def evaluate_setting(
    predictor: Predictor, rows: Sequence[Mapping[str, Any]], settings: Any, origin: Origin, batch_size: int = 32
) -> dict[str, Any]:
    """A result cell: metrics, compute and time of one setting on labelled rows."""
    data = labelled_data(predictor, rows, origin)
    policy = predictor.model.method.policy(predictor.network, settings)
    started = time.perf_counter()
    metrics, outcome = score_policy(predictor.network, predictor.engine, policy, data, batch_size)
    seconds = time.perf_counter() - started
    return result_cell(predictor, Measurement(data, settings, metrics, outcome, batch_size, seconds), origin)


def labelled_data(predictor: Predictor, rows: Sequence[Mapping[str, Any]], origin: Origin) -> Data:
    """Rows checked and encoded."""
    predictor.task.check_rows(rows, origin.data)
    return Data(rows, predictor.prepare(rows, origin.data))


def result_cell(predictor: Predictor, made: Measurement, origin: Origin) -> dict[str, Any]:
    """The record of one measurement."""
    return {
        "method": predictor.model.method.name,
        "settings": {**asdict(predictor.model.options), **asdict(made.settings)},
        "model": model_name(predictor.model.base_model),
        "data": origin.data,
        "split": origin.split,
        "rows": len(made.data.rows),
        "seed": origin.recipe.get("schedule", {}).get("seed"),
        "metrics": {name: round(value, 6) for name, value in made.metrics.items()},
        **compute_fields(predictor, made.data, made.outcome),
        "seconds": None if made.seconds is None else round(made.seconds, 3),
        "engine": predictor.engine_name,
        "precision": predictor.how.precision,
        "batch_size": made.batch_size,
        "truncated_rows": made.data.truncated_rows,
        "hardware": hardware(),
        "command": origin.command,
        "trained": _trained(origin.recipe),
        "calibrated_on": _calibrated(predictor),
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }


def _calibrated(predictor: Predictor) -> dict[str, Any] | None:
    """The rows that operating points were chosen on, by a name without the folders of one machine."""
    if predictor.points is None:
        return None
    about = predictor.points.data
    return {**about, "name": "/".join(Path(about["name"]).parts[-2:])}


def _trained(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe without the folders of one machine; the loss and scores of every epoch are part of it."""
    short = {key: value for key, value in recipe.items() if key not in ("dev_fingerprint", "train_fingerprint")}
    for key in ("model", "train", "dev", "init"):
        if isinstance(short.get(key), str):
            short[key] = "/".join(Path(short[key]).parts[-2:])
    return short


def compute_fields(predictor: Predictor, data: Data, outcome: RunOutput) -> dict[str, Any]:
    """What was spent, and where rows left."""
    layers, kept, macs = per_input_row(outcome, data.encoded, len(data.rows))
    exits = Counter(round(layer) for layer in layers.tolist())
    return {
        "macs": {
            "mean": round(float(macs.mean())),
            "share_of_full": round(float(macs.sum()) / predictor.full_macs(data.encoded, outcome), 6),
        },
        "mean_exit_layer": round(float(layers.mean()), 4),
        "exit_histogram": {str(layer): exits.get(layer, 0) for layer in range(predictor.network.depth + 1)},
        "mean_tokens_kept": round(float(kept.mean()), 3),
        **_by_layer(data, outcome),
    }


def _by_layer(data: Data, outcome: RunOutput) -> dict[str, list[float]]:
    """The share of all tokens that each layer still computed, where that was counted."""
    if outcome.tokens_by_layer is None:
        return {}
    total = sum(len(one.ids) for one in data.encoded)
    return {"tokens_by_layer": [round(float(fed) / total, 4) for fed in outcome.tokens_by_layer]}
