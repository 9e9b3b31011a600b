"""The file of a bench: entries with the fields that other people's scripts rely on, and how they were measured."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offramp import __version__
from offramp.evaluation.contenders import FULL, Contender, EveryLayer
from offramp.evaluation.course import BenchData
from offramp.evaluation.result_cells import data_and_split, model_name
from offramp.evaluation.subprocesses import HOW
from offramp.inference.predictor import Predictor
from offramp.utils.files import read_json, write_json
from offramp.utils.hardware import hardware

if TYPE_CHECKING:
    from offramp.evaluation.bench import BenchMeasurement

PACKAGES = ("torch", "transformers", "openvino", "onnxruntime", "onnx", "numpy")
CHANGES = ("date", "rows", "failed", "unfinished", "tokenise_ms_per_row", "command")  # between a run and its resumption
METHOD = {
    "clock": "from token ids (lists) to logits (arrays), packing or padding included, tokenising left out; one process",
    "order": "given: batches as the rows come; sorted: batches of rows sorted by length; everybody gets the same",
    "rounds": "contenders take turns of up to 32 calls, one call off the clock before each turn; a first pass warms up",
    "rows_per_second": "rows ÷ the sum over calls of the median over rounds; …_best: of the least over rounds",
    "p50_ms, p95_ms": "percentiles over calls (batches) of the median over rounds",
    "peak_mb": f"{HOW}; the two batches with most cells",
    "realised_over_promised": "speed-up over our own full model (every layer, where the loosest setting already saves) "
    "in the same engine, precision, batch size and order, "
    "times the share of MACs; mac_share counts what was really computed on these rows",
    "over_fastest_peer": "rows a second ÷ those of the fastest peer of equal precision, batch size and order",
    "disagrees_with_fp32": "held against the same engine and settings in fp32 in this bench, row by row; answers: the "
    "task's own departure, mean over rows (labels: the share of rows with another one; tags: of words; spans: 1 − F1; "
    "values: the difference, at most 1); exits: the share of rows that left at another layer; null: nothing to compare",
}


def bench_header(
    model: Predictor, lane: BenchData, source: str, command: str, plan: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything but the entries."""
    lengths = [len(row.ids) for row in lane.data.encoded]
    return {
        "hardware": hardware(),
        "data": "/".join(data_and_split(source)),
        "model": model_name(model.model.base_model),
        "method": model.model.method.name,
        "metric": lane.task.metric,
        "peers_run": "the plain Hugging Face model of the folder, which is "
        + ("our full model" if model.model.method.hf_equal else "not our full model: this method changes it"),
        "row_count": len(lane.data.rows),
        "tokens": {"mean": round(float(np.mean(lengths)), 2), "p95": float(np.percentile(lengths, 95))},
        "tokenise_ms_per_row": round(lane.tokenise_ms, 4),
        "measured": METHOD,
        "plan": {key: list(value) if isinstance(value, tuple) else value for key, value in plan.items()},
        "threads": plan["threads"],
        "seed": plan["seed"],
        "command": command,
        "version": __version__,
        "versions": package_versions(),
    }


def package_versions() -> dict[str, str]:
    """What is installed of the packages that matter here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def bench_entries(
    found: Mapping[Contender, BenchMeasurement], labels: Sequence[tuple[str, Any]], rows: int, group: tuple[int, str]
) -> list[dict[str, Any]]:
    """One entry for each peer and for each budget of ours."""
    made: list[dict[str, Any]] = []
    for contender, one in found.items():
        numbers = {"batch_size": group[0], "order": group[1], **_times(one, rows)}
        base = {"engine": contender.engine, "precision": contender.precision, "peer": contender.peer is not None}
        if contender.peer is not None:
            made.append({**base, "budget": None, **numbers, "mac_share": 1.0, "realised_over_promised": None})
            continue
        whole = dict(labels).get(EveryLayer.label, dict(labels)[FULL])
        full = found.get(Contender(contender.engine, contender.precision, None, whole))
        for label in (label for label, settings in labels if settings == contender.settings):
            paid = {"mac_share": round(one.share or 0.0, 6), **_realised(one, full)}
            made.append({**base, "budget": _number(label), **numbers, **paid})
    return [{**entry, **_against(entry, made)} for entry in made]


def _times(one: BenchMeasurement, rows: int) -> dict[str, Any]:
    """What was measured of one contender by itself."""
    middle, best = np.median(one.seconds, axis=1), one.seconds.min(axis=1)
    return {
        "rows_per_second": round(rows / float(middle.sum()), 3),
        "rows_per_second_best": round(rows / float(best.sum()), 3),
        "p50_ms": round(1000 * float(np.percentile(middle, 50)), 4),
        "p95_ms": round(1000 * float(np.percentile(middle, 95)), 4),
        "peak_mb": None if one.peak_mb is None else round(one.peak_mb, 1),
        "metrics": one.metrics,
        "disagrees_with_fp32": one.disagrees,
    }


def _realised(one: BenchMeasurement, full: BenchMeasurement | None) -> dict[str, Any]:
    """The speed-up that was measured, and what became of the one that the saved MACs promised."""
    if full is None or one.share is None or full.share is None:
        return {"speed_up": None, "realised_over_promised": None, "realised_over_promised_best": None}
    share = one.share / full.share
    faster = float(np.median(full.seconds, axis=1).sum() / np.median(one.seconds, axis=1).sum())
    best = float(full.seconds.min(axis=1).sum() / one.seconds.min(axis=1).sum())
    return {
        "speed_up": round(faster, 4),
        "realised_over_promised": round(faster * share, 4),
        "realised_over_promised_best": round(best * share, 4),
    }


def _against(entry: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How much faster than the fastest static peer of the same precision."""
    rates = [e["rows_per_second"] for e in group if e["peer"] and e["precision"] == entry["precision"]]
    fastest = max(rates, default=None)
    return {"over_fastest_peer": round(entry["rows_per_second"] / fastest, 4) if fastest else None}


def _number(budget: str) -> float | str:
    try:
        return float(budget)
    except ValueError:
        return budget


def write(path: Path, content: Mapping[str, Any]) -> None:
    """The file as far as it is."""
    write_json(path, content)


def finished_entries(path: Path | None, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Entries of a file that was cut short, if it is about the same thing on the same machine."""
    if path is None or not path.is_file():
        return []
    there = read_json(path)
    same = isinstance(there, dict) and all(there.get(k) == v for k, v in about.items() if k not in CHANGES)
    found: list[dict[str, Any]] = there["rows"] if same and there.get("unfinished") else []
    return found
