"""What was timed, as the page of results shows it: benches, and speed against length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offramp.evaluation.collect import metric_of
from offramp.evaluation.tables import metric_scale


def report_bench_rows(name: str, bench: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of a bench file that were measured. Ours go by their method, peers by their engine."""
    data = _data(bench)
    made = []
    for row in bench["rows"]:
        rate, metrics = row.get("rows_per_second"), row.get("metrics") or {}
        if not rate:
            continue
        metric = bench.get("metric") or (metric_of({"data": data, "metrics": metrics}) if metrics else "")
        score = metrics.get(metric)
        peer = row.get("peer", row["engine"] not in ("torch", "openvino"))
        made.append(
            {
                "data": data,
                "file": name,
                "seed": bench.get("seed"),
                "command": bench.get("command", ""),
                "model": bench["model"],
                "name": row["engine"] if peer else bench["method"],
                "peer": peer,
                "engine": row["engine"],
                "precision": row["precision"],
                "batch": row["batch_size"],
                "order": row.get("order"),
                "budget": None if row.get("budget") is None else str(row["budget"]),
                "rate": rate,
                "ms": 1000.0 / rate,
                "metric": metric,
                "score": None if score is None else metric_scale(metric) * score,
                "share": row.get("mac_share"),
                "realised": row.get("realised_over_promised"),
            }
        )
    return made


def report_length_rows(name: str, timed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups of rows of about one length: milliseconds a row at full depth and at the setting asked for."""
    about = {
        "data": _data(timed),
        "file": name,
        "command": timed.get("command", ""),
        "model": timed["model"],
        "name": timed["method"],
        "engine": timed.get("engine"),
        "precision": timed.get("precision"),
        "batch": timed.get("batch_size"),
    }
    wanted = ("mean_tokens", "ms", "ms_full")
    return [{**about, **{key: group[key] for key in wanted}} for group in timed["lengths"]]


def _data(timed: Mapping[str, Any]) -> str:
    """The data set, without the split that benches put behind it."""
    return str(timed["data"]).split("/")[0]
