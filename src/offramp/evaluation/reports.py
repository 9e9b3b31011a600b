"""The report of a folder of results: its introduction, the content of its page, its pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from offramp.evaluation.collect import CollectedResults, CurvePoint, ModelResult, metric_scale
from offramp.evaluation.tables import COLUMNS, TableLine, report_bench_rows, report_length_rows
from offramp.utils.files import atomic_replace

COLOURS = matplotlib.color_sequences["tab10"]
MARKS, SINGLE_MARKS = ("o", "s", "^"), ("D", "P", "X")  # of curves and of single points, where colours repeat
SHOWN_BELOW_BEST = 0.12  # pictures show scores that are worse than the best by this share: the useful range
INTRO = """# Results

Written by `offramp report DIR --markdown FILE` from the JSON files in that folder; do not edit.

All scores are on rows that were used neither in training nor in calibration. “chosen ≤ x”: the cheapest point that
loses at most x points on calibration rows (of perplexity: by which it grows by at most x %); its score on the report
rows, and its share of the full model's multiply-accumulates (heads counted, nothing padded). “curve ≤ x”: the
cheapest point on the curve of the report rows themselves, a choice in hindsight. “≤ x below full”: the same relative
to plain fine-tuning of the same model, which is the right comparison for static baselines and for methods that change
the model. “ms a row”: a row alone, at full depth → at the point chosen for a point lost. “other points”: cells of
another setting, such as a budget. ± is the standard deviation over seeds. “penalty=a or b”: runs trained once for
each cost, as one curve, its points chosen among all of them.
"""


def drawn_results(entries: Sequence[ModelResult], joined: Sequence[ModelResult]) -> list[ModelResult]:
    """Return what is drawn: single runs, and families of runs that form one curve together as that curve."""
    within = {file for family in joined for file in family.files}
    return [*(one for one in entries if one.files[0] not in within), *joined]


def report_data(found: CollectedResults, joined: Sequence[ModelResult], listed: Sequence[TableLine]) -> dict[str, Any]:
    """Return the content of the report page as JSON values."""
    skipped = [name for name, _ in found.damaged]
    about = f"{len(found.entries)} trained models in {sum(len(e.files) for e in found.entries)} files"
    return {
        "about": about + (f"; {len(skipped)} damaged files left out: {', '.join(skipped)}" if skipped else ""),
        "columns": list(COLUMNS),
        "entries": [_entry(one) for one in drawn_results(found.entries, joined)],
        "lines": [
            {"set": line.table, "method": line.method, "variant": line.variant, "cells": list(line.cells)}
            for line in listed
        ],
        "benches": [row for name, bench in found.benches for row in report_bench_rows(name, bench)],
        "lengths": [row for name, timed in found.lengths for row in report_length_rows(name, timed)],
    }


def _entry(one: ModelResult) -> dict[str, Any]:
    """Return one result as JSON values, scores in the unit of tables."""
    unit = metric_scale(one.metric)
    cell = next((c for c in one.cells if c.get("chosen", {}).get("value") == 0.01), one.cells[-1])

    def scaled(point: CurvePoint) -> dict[str, float]:
        return {"share": point.share, "score": point.score * unit}

    return {
        "set": one.table,
        "data": one.data,
        "name": one.method,
        "variant": one.variant,
        "cells": len(one.cells),
        "model": one.model,
        "seed": one.seed,
        "metric": one.metric,
        "higher_is_better": one.higher_is_better,
        "full": None if one.full is None else scaled(one.full),
        "others": {setting: scaled(point) for setting, point in one.others.items()},
        "chosen": {loss: scaled(point) for loss, point in one.chosen.items()},
        "curve": [scaled(point) for point in one.curve],
        "exits": cell.get("exit_histogram"),
        "kept": cell.get("tokens_by_layer"),
        "files": list(one.files),
        "command": one.cells[0]["command"],
    }


def draw_report(entries: Sequence[ModelResult], target: Path) -> list[Path]:
    """Draw score against cost for every data set, as PNG and SVG, and return the files."""
    written = []
    for title in sorted({one.table for one in entries}):
        figure = _figure(title, [one for one in entries if one.table == title])
        for suffix, canvas in (("png", FigureCanvasAgg), ("svg", FigureCanvasSVG)):
            path = target / f"{title}.{suffix}".replace("/", "-").replace(": ", "-")
            with atomic_replace(path) as fresh:
                canvas(figure).print_figure(fresh, format=suffix)
            written.append(path)
    return written


def _figure(title: str, own: Sequence[ModelResult]) -> Figure:
    """Draw one data set: a method has one colour whatever its seed, models other than the usual one are dashed."""
    usual = Counter(one.model for one in own).most_common(1)[0][0]
    names = sorted({_name(one, usual) for one in own})
    height = max(4.6, 0.5 + 0.14 * len("\n".join(names).split("\n")))
    figure = Figure(figsize=(9.0, height), dpi=150, layout="constrained")
    axes, unit = figure.add_subplot(), metric_scale(own[0].metric)
    higher = own[0].higher_is_better
    best = (max if higher else min)(point.score for one in own for point in one.curve)
    worst = best * (1 - SHOWN_BELOW_BEST if higher else 1 + SHOWN_BELOW_BEST)
    for one in sorted(own, key=lambda e: (_name(e, usual), e.seed or 0)):
        kept = [point for point in one.curve if (point.score >= worst if higher else point.score <= worst)]
        if not kept:
            continue
        name, single = _name(one, usual), len(kept) == 1
        number, dash = names.index(name), "-" if one.model == usual else "--"
        colour, round_ = COLOURS[number % len(COLOURS)], number // len(COLOURS) % len(MARKS)
        shares, scores = [s.share for s in kept], [s.score * unit for s in kept]
        (line,) = axes.plot(shares, scores, dash, color=colour, linewidth=1, label=name)
        line.set(marker=(SINGLE_MARKS if single else MARKS)[round_], markersize=5 if single else 3)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("share of the full model's multiply-accumulates")
    axes.set_ylabel(own[0].metric)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    shown = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=6.5, frameon=False)
    return figure


def _name(one: ModelResult, usual: str) -> str:
    """Return the name in the legend, on several lines where there are many options, with a model that is not usual."""
    parts = [*one.variant.split(", "), *([one.model] if one.model != usual else [])]
    return "\n  ".join([one.method, *filter(None, parts)])
