"""Invented result files, as `offramp eval`, `offramp bench` and the benchmarks write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def cell(method: str = "branchynet", share: float = 1.0, score: float = 0.9, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "settings": {}, "model": "tiny", "data": "sst2", "split": "dev", "rows": 10, "seed": 42,
        "metrics": {"accuracy": score}, "macs": {"mean": 1, "share_of_full": share}, "mean_exit_layer": 1.0,
        "exit_histogram": {"0": 4, "1": 6}, "mean_tokens_kept": 1.0, "hardware": "h", "command": "offramp eval",
        "version": "0", "date": "2026-01-01", **more,
    }  # fmt: skip


def curve_cells(seed: int, full: float, points: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """Return what `eval --curve` writes."""
    curve = [{"share_of_full": share, "metrics": {"accuracy": score}} for share, score in points]
    first = cell(score=full, seed=seed, chosen={"by": "full", "value": None}, curve=curve)
    picked = cell(share=0.4, score=full - 0.01, seed=seed, chosen={"by": "max_loss", "value": 0.01})
    return [first, picked]


def perplexity_cells(full: float, points: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """Return what `eval --curve` writes of a masked language model, where lower is better."""
    curve = [
        {"share_of_full": share, "metrics": {"perplexity": score}, "expected": {"mac_share": share, "score": score}}
        for share, score in points
    ]
    metrics = {"perplexity": full}
    first = cell(metrics=metrics, chosen={"by": "full", "value": None}, curve=curve)
    return [first, cell(metrics=metrics, chosen={"by": "max_loss", "value": 0.01})]


def bench() -> dict[str, Any]:
    """Return the fields of a bench file that reports read."""
    rows = [
        {"engine": engine, "precision": "fp32", "peer": engine == "hf-sdpa", "batch_size": size, "order": "given",
         "rows_per_second": rate * size, "metrics": {"f1": 0.1, "accuracy": score}, "budget": budget, "mac_share": 0.5}
        for size in (1, 32)
        for engine, budget, rate, score in (
            ("torch", 1.0, 90, 0.9), ("torch", 0.5, 170, 0.88), ("hf-sdpa", None, 60, 0.9),
        )
    ]  # fmt: skip
    about = {"data": "sst2/dev", "model": "tiny", "method": "branchynet", "metric": "accuracy", "seed": 42}
    return {**about, "hardware": "h", "command": "offramp bench", "rows": rows}


def speed_by_length() -> dict[str, Any]:
    """Return what benchmarks/speed_by_length.py writes."""
    groups = [{"mean_tokens": 2.0**n, "ms": 1.0 * n, "ms_full": 2.0 * n} for n in (3, 4, 5)]
    return {"method": "branchynet", "model": "tiny", "data": "sst2", "hardware": "h", "engine": "torch",
            "precision": "fp32", "batch_size": 32, "command": "speed_by_length.py", "lengths": groups}  # fmt: skip


def penalised(penalty: str, points: list[tuple[float, float, float]]) -> list[dict[str, Any]]:
    """Return the cells of a run trained with one penalty; a point is share, expected score, measured score."""
    curve = [
        {"share_of_full": share, "metrics": {"accuracy": score}, "expected": {"mac_share": share, "score": expected}}
        for share, expected, score in points
    ]
    about = {"trained": {"options": {"penalty": penalty, "soft_lr": "0.1"}}, "chosen": {"by": "full", "value": None}}
    return [cell("power_bert", points[-1][0], points[-1][2], curve=curve, **about)]


def write_results(folder: Path) -> Path:
    """Write result cells of two experiments, a bench, speeds by length and damaged files; return the folder."""
    files = {
        "exits/a.json": curve_cells(1, 0.90, [(0.2, 0.80), (0.3, 0.895), (1.0, 0.90)]),
        "exits/b.json": curve_cells(2, 0.92, [(0.5, 0.915), (1.0, 0.92)]),
        "exits/full.json": cell("full", score=0.91, seed=1),
        "speed/x-0.4.json": cell(share=0.4, score=0.8),
        "speed/x-1.0.json": cell(share=1.0, score=0.9),
        "speed/bench.json": bench(),
        "speed/lengths.json": speed_by_length(),
        "speed/other.json": {"anything": 1},
        "speed/study.json": {"what": "A study of its own.", "hardware": "h", "rows": [{"shape": 1}]},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    (folder / "exits/torn.json").write_text('{"method": ')
    bad = {"no-macs": cell(macs=None), "empty": cell(metrics={}), "nan": cell(score=float("nan"))}
    bad |= {"no-method": {"hardware": "h", "rows": [1]}, "no-precision": {**bench(), "rows": [{"engine": "torch"}]}}
    for name, content in bad.items():
        (folder / f"exits/{name}.json").write_text(json.dumps(content))
    return folder
