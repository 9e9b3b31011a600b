"""Result cells: the record of one setting on labelled rows that every experiment writes and `report` collects."""

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
from offramp.utils.command_line import last_two_parts, model_name
from offramp.utils.hardware import hardware


@dataclass(frozen=True)
class Origin:
    """Where a result comes from."""

    data: str
    split: str
    command: str
    recipe: Mapping[str, Any]  # how the model was trained


def data_and_split(source: str) -> tuple[str, str]:
    """Return the data set and the split of a file of rows: the names of its folder and of the file."""
    path = Path(source).resolve() if Path(source).exists() else Path(source)
    return path.parent.name or path.name, path.name.split(".")[0]


@dataclass(frozen=True)
class Measurement:
    """What was measured of one setting on labelled rows."""

    data: Data
    settings: Any
    metrics: Mapping[str, float]
    outcome: RunOutput
    batch_size: int
    seconds: float | None = None  # None: replayed, so not timed


def evaluate_setting(
    predictor: Predictor, rows: Sequence[Mapping[str, Any]], settings: Any, origin: Origin, batch_size: int = 32
) -> dict[str, Any]:
    """Return a result cell: metrics, compute and time of one setting on labelled rows."""
    data = labelled_data(predictor, rows, origin)
    policy = predictor.model.method.policy(predictor.network, settings)
    started = time.perf_counter()
    metrics, outcome = score_policy(predictor.network, predictor.engine, policy, data, batch_size)
    seconds = time.perf_counter() - started
    return result_cell(predictor, Measurement(data, settings, metrics, outcome, batch_size, seconds), origin)


def labelled_data(predictor: Predictor, rows: Sequence[Mapping[str, Any]], origin: Origin) -> Data:
    """Check and encode labelled rows."""
    predictor.task.check_rows(rows, origin.data)
    return Data(rows, predictor.prepare(rows, origin.data))


def result_cell(predictor: Predictor, measurement: Measurement, origin: Origin) -> dict[str, Any]:
    """Return the result cell of one measurement."""
    return {
        "method": predictor.model.method.name,
        "settings": {**asdict(predictor.model.options), **asdict(measurement.settings)},
        "model": model_name(predictor.model.base_model),
        "data": origin.data,
        "split": origin.split,
        "rows": len(measurement.data.rows),
        "seed": origin.recipe.get("schedule", {}).get("seed"),
        "metrics": {name: round(value, 6) for name, value in measurement.metrics.items()},
        "higher_is_better": predictor.task.higher_is_better,
        **compute_fields(predictor, measurement.data, measurement.outcome),
        "seconds": None if measurement.seconds is None else round(measurement.seconds, 3),
        "engine": predictor.engine_name,
        "precision": predictor.how.precision,
        "batch_size": measurement.batch_size,
        "truncated_rows": measurement.data.truncated_rows,
        "hardware": hardware(),
        "command": origin.command,
        "trained": _trained(origin.recipe),
        "calibrated_on": _calibrated(predictor),
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }


def _calibrated(predictor: Predictor) -> dict[str, Any] | None:
    """Return which rows the operating points were chosen on, by a name without the folders of one machine."""
    if predictor.points is None:
        return None
    about = predictor.points.data
    return {**about, "name": last_two_parts(about["name"])}


def _trained(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe without the folders of one machine; it includes the loss and scores of every epoch."""
    short = {key: value for key, value in recipe.items() if key not in ("dev_fingerprint", "train_fingerprint")}
    for key in ("model", "train", "dev", "init"):
        if isinstance(short.get(key), str):
            short[key] = last_two_parts(short[key])
    return short


def compute_fields(predictor: Predictor, data: Data, outcome: RunOutput) -> dict[str, Any]:
    """Return the fields of a result cell that describe the compute spent and where rows exited."""
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
    """Return the share of all tokens that each layer computed, if that was counted."""
    if outcome.tokens_by_layer is None:
        return {}
    total = sum(len(one.ids) for one in data.encoded)
    return {"tokens_by_layer": [round(float(fed) / total, 4) for fed in outcome.tokens_by_layer]}
