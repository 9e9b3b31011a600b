"""Collected results as tables (mean and spread over seeds, in Markdown and LaTeX) and as rows of the report page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offramp.evaluation.collect import CurvePoint, ModelResult, direction_of, metric_of, metric_scale

COLUMNS = ("method", "model", "full depth", "chosen ≤ 1.0", "ms a row", "chosen ≤ 0.5", "curve ≤ 0.5", "curve ≤ 1.0",
           "≤ 1.0 below full", "≤ 2.0 below full", "other points", "metric", "seeds")  # fmt: skip
TIMED_LOSS = ("max-loss=0.01", "max_loss=0.01")  # the budget of a bench row that a table shows beside full depth
MISSING = "–"
PLAIN = "full"  # the method that is ordinary fine-tuning


@dataclass(frozen=True)
class TableLine:
    """One line of a table: a method on a data set, over its seeds."""

    section: str
    data: str
    table: str
    cells: tuple[str, ...]  # texts of the columns
    files: tuple[str, ...]
    method: str
    variant: str  # what it was trained with beside the method

    @property
    def source(self) -> str:
        """The data set, with the file where several are reported."""
        return self.table.removeprefix(f"{self.section}: ")


Benches = Sequence[tuple[str, Mapping[str, Any]]]  # file, content


def table_lines(entries: Sequence[ModelResult], benches: Benches = ()) -> list[TableLine]:
    """Return one line for each method on each data file and model, averaged over seeds; `benches` give its times."""
    groups: dict[tuple[str, ...], list[ModelResult]] = {}
    for one in entries:
        groups.setdefault((*one.key, str(one.from_fine_tuned)), []).append(one)
    return [_line(own, entries, benches) for _, own in sorted(groups.items())]


def _line(own: Sequence[ModelResult], entries: Sequence[ModelResult], benches: Benches) -> TableLine:
    first = own[0]
    name = f"{first.method} ({first.variant})" if first.variant else first.method
    if not first.from_fine_tuned and any(other.from_fine_tuned for other in entries if other.key == first.key):
        name += ", from the pretrained model"
    measured = [one.full.score * metric_scale(first.metric) for one in own if one.full is not None]
    full = mean_and_spread(measured) if measured else MISSING
    half, whole = (_chosen(own, loss) for loss in ("0.005", "0.01"))
    curve = [_in_hindsight(own, points) for points in (0.5, 1.0)]
    below = [_below(own, entries, points) for points in (1.0, 2.0)]
    seeds = str(len({one.seed for one in own}))
    cells = (name, first.model, full, whole, _times(own, benches), half, *curve, *below, _others(own), first.metric)
    files = tuple(file for one in own for file in one.files)
    return TableLine(first.section, first.data, first.table, (*cells, seeds), files, first.method, first.variant)


def _others(own: Sequence[ModelResult]) -> str:
    """Return the points of other settings, e.g. budgets, each with its own setting."""
    unit, found = metric_scale(own[0].metric), dict[str, list[CurvePoint]]()
    for one in own:
        for setting, point in one.others.items():
            found.setdefault(setting, []).append(point)
    shown = [
        f"{setting}: {statistics.fmean(p.score for p in points) * unit:.1f} at "
        f"{statistics.fmean(p.share for p in points):.3f}"
        for setting, points in found.items()
    ]
    return "; ".join(shown) or MISSING


def _times(own: Sequence[ModelResult], benches: Benches) -> str:
    """Return milliseconds of a row alone, at full depth and at the point chosen for a point lost, from one bench."""
    fitting = [bench for name, bench in benches if any(_is_bench_of(one, name, bench) for one in own)]
    for bench in fitting:
        alone = [row for row in bench["rows"] if row["batch_size"] == 1 and row.get("rows_per_second")]
        chosen = [row for row in alone if row.get("budget") in TIMED_LOSS and row["precision"] == "fp32"]
        if chosen:
            fastest = max(chosen, key=lambda row: float(row["rows_per_second"]))
            same = ("engine", "precision", "order")
            full = [row for row in alone if row.get("budget") == 1.0 and all(row[k] == fastest[k] for k in same)]
            times = [1000.0 / row["rows_per_second"] for row in (*full[:1], fastest)]
            return " → ".join(f"{ms:.2f}" for ms in times)
    return MISSING


def _is_bench_of(one: ModelResult, name: str, bench: Mapping[str, Any]) -> bool:
    """Return whether a bench timed this trained model: its file is named after the result's."""
    if (_data(bench), bench["method"], bench["model"]) != (one.data, one.method, one.model):
        return False
    stem = Path(name).stem
    own = [Path(file).stem for file in one.files]
    return stem in [f"{one.method}-{part}" for result in own for part in (result, result.removeprefix("default-"))]


def fine_tuned_score(one: ModelResult, entries: Sequence[ModelResult]) -> float | None:
    """Return the score of plain fine-tuning on the same data, with the same model and, if possible, the same seed."""
    wanted = (PLAIN, one.data, one.split, one.section, one.model)
    plain = [e for e in entries if (e.method, e.data, e.split, e.section, e.model) == wanted]
    exact = [e for e in plain if e.seed == one.seed] or plain
    known = [e.full.score for e in exact if e.full is not None]
    return statistics.fmean(known) if known else None


def _below(own: Sequence[ModelResult], entries: Sequence[ModelResult], points: float) -> str:
    """Return the smallest share on the curve that is at most so many points below plain fine-tuning."""
    shares = []
    for one in own:
        reference = fine_tuned_score(one, entries)
        shares.append(None if reference is None else one.lowest_share(reference, points / 100.0))
    known = [share for share in shares if share is not None]
    return f"{statistics.fmean(known):.3f}" if known and len(known) == len(shares) else MISSING


def _chosen(own: Sequence[ModelResult], loss: str) -> str:
    """Return score and share, on the report rows, of the points that were chosen on calibration rows."""
    points = [one.chosen[loss] for one in own if loss in one.chosen]
    if not points:
        return MISSING
    score, share = (statistics.fmean(values) for values in zip(*((p.score, p.share) for p in points), strict=True))
    return f"{score * metric_scale(own[0].metric):.1f} at {share:.3f}"


def _in_hindsight(own: Sequence[ModelResult], points: float) -> str:
    """Return the smallest share on the curve of the report rows themselves, which is a choice in hindsight."""
    shares = [None if one.full is None else one.lowest_share(one.full.score, points / 100.0) for one in own]
    known = [share for share in shares if share is not None]
    return f"{statistics.fmean(known):.3f}" if len(known) == len(shares) else MISSING


def mean_and_spread(values: Sequence[float]) -> str:
    """Return the mean, with the standard deviation if there are several values."""
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def markdown_tables(found: Sequence[TableLine]) -> str:
    """Return one table per data set."""
    parts = []
    for title in sorted({line.section for line in found}):
        parts += [f"## {title}"] if title else []
        for table in sorted({line.table for line in found if line.section == title}):
            own = [line for line in found if line.table == table]
            rows = [f"| {' | '.join(line.cells)} |" for line in own]
            head = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
            parts.append("\n".join([f"### {own[0].source}", "", *head, *rows]))
    return "\n\n".join(parts)


def latex_table(found: Sequence[TableLine]) -> str:
    """Return all lines as one LaTeX table (booktabs)."""
    body = [r"\begin{tabular}{ll" + "r" * (len(COLUMNS) - 1) + "}", r"\toprule",
            " & ".join(["data", *map(_tex, COLUMNS)]) + r" \\", r"\midrule"]  # fmt: skip
    body += [
        " & ".join([_tex(line.table.removeprefix(f"{line.section}: ")), *map(_tex, line.cells)]) + r" \\"
        for line in found
    ]
    return "\n".join([*body, r"\bottomrule", r"\end{tabular}", ""])


def _tex(text: str) -> str:
    for text_form, tex in (("_", r"\_"), ("%", r"\%"), ("≤", r"$\leq$"), ("±", r"$\pm$"), ("–", "--")):
        text = text.replace(text_form, tex)
    return text


def report_bench_rows(name: str, bench: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the measured rows of a bench file for the page; Offramp's are named by method, peers by engine."""
    data = _data(bench)
    found = []
    for row in bench["rows"]:
        rate, metrics = row.get("rows_per_second"), row.get("metrics") or {}
        if not rate:
            continue
        metric = bench.get("metric") or (metric_of({"data": data, "metrics": metrics}) if metrics else "")
        score = metrics.get(metric)
        peer = row.get("peer", row["engine"] not in ("torch", "openvino"))
        found.append(
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
                "higher_is_better": direction_of(bench, metric),
                "score": None if score is None else metric_scale(metric) * score,
                "share": row.get("mac_share"),
                "realised": row.get("realised_over_promised"),
            }
        )
    return found


def report_length_rows(name: str, timed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, for the page, the groups of a file of speed by length: milliseconds at full depth and at the setting."""
    header = {
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
    return [{**header, **{key: group[key] for key in wanted}} for group in timed["lengths"]]


def _data(timed: Mapping[str, Any]) -> str:
    """Return the data set, without the split that bench files append."""
    return str(timed["data"]).split("/")[0]
