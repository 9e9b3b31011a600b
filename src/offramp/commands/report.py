"""`offramp report` as a function: one page, pictures and tables of all results in a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from offramp.errors import OfframpError
from offramp.evaluation.collect import CollectedResults, ModelResult, collect_results, join_families
from offramp.evaluation.pages import page
from offramp.evaluation.tables import (
    COLUMNS,
    TableLine,
    latex_table,
    markdown_tables,
    metric_scale,
    report_bench_rows,
    report_length_rows,
    table_lines,
)
from offramp.utils.files import atomic_replace, write_text

COLOURS = matplotlib.color_sequences["tab10"]
MARKS, LONE = ("o", "s", "^"), ("D", "P", "X")  # where colours begin anew; of curves, of single points
TOP = 0.12  # pictures show the best scores down to so much below: where anybody would work
INTRO = """# Results

Written by `offramp report DIR --markdown FILE` from the JSON files in that folder; do not edit.

All scores are on rows that neither training nor calibration saw. “chosen ≤ x”: the cheapest point that loses at most x
points on calibration rows, and what it came to on the report rows, with its share of the full model's
multiply-accumulates (heads counted, nothing padded). “curve ≤ x”: the cheapest place on the report rows' own curve,
which is hindsight. “≤ x below full”: the same against plain fine-tuning of the same model, which is what static
baselines and methods that change the model must be held against. ± is the standard deviation over seeds. “penalty=a or
b”: runs trained once for each cost, as one curve, its points chosen among all of them.
"""


@dataclass(frozen=True)
class Report:
    """What was found in a folder of results, and the files that were written about it."""

    found: CollectedResults
    written: list[Path]


def report(
    folder: str | Path, *, out: str | None = None, markdown: str | None = None, speeds: str | None = None
) -> Report:
    """Write report.html, report.md, report.tex and a PNG and an SVG for each data set of the results in a folder.

    Args:
        folder: searched for result files with all folders below.
        out: where the report is written; the same folder if left out.
        markdown: write only the tables, as this Markdown file.
        speeds: another folder, of which only bench and length files are taken.
    """
    found = collect_results(str(folder))
    if speeds:
        timed = collect_results(speeds)
        found.benches += timed.benches
        found.lengths += timed.lengths
        found.damaged += timed.damaged
    if not found.entries:
        named = f", and {len(found.damaged)} damaged files" if found.damaged else ""
        fix = "run `offramp compare`, or `offramp eval --json`, first"
        raise OfframpError("results to report", f"none in {folder}{named}", fix)
    joined = join_families(found.entries)
    listed = table_lines([*found.entries, *joined])
    if markdown:
        write_text(Path(markdown), INTRO + "\n" + markdown_tables(listed) + "\n")
        return Report(found, [Path(markdown)])
    target = Path(out or folder)
    target.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.html": page("report", "Offramp: what compute buys", _data(found, joined, listed)),
        "report.md": markdown_tables(listed) + "\n",
        "report.tex": latex_table(listed),
    }
    for name, text in texts.items():
        write_text(target / name, text)
    pictures = _pictures(_curves(found.entries, joined), target)
    return Report(found, [*(target / name for name in texts), *pictures])


def _curves(entries: Sequence[ModelResult], joined: Sequence[ModelResult]) -> list[ModelResult]:
    """What is drawn: runs that make one curve together as that curve."""
    within = {file for family in joined for file in family.files}
    return [*(one for one in entries if one.files[0] not in within), *joined]


def _data(found: CollectedResults, joined: Sequence[ModelResult], listed: Sequence[TableLine]) -> dict[str, Any]:
    """All that the page shows."""
    skipped = [name for name, _ in found.damaged]
    about = f"{len(found.entries)} trained models in {sum(len(e.files) for e in found.entries)} files"
    return {
        "about": about + (f"; {len(skipped)} damaged files left out: {', '.join(skipped)}" if skipped else ""),
        "columns": list(COLUMNS),
        "entries": [_entry(one) for one in _curves(found.entries, joined)],
        "lines": [{"set": line.table, "cells": list(line.cells)} for line in listed],
        "benches": [row for name, bench in found.benches for row in report_bench_rows(name, bench)],
        "lengths": [row for name, timed in found.lengths for row in report_length_rows(name, timed)],
    }


def _entry(one: ModelResult) -> dict[str, Any]:
    unit = metric_scale(one.metric)
    point = next((c for c in one.cells if c.get("chosen", {}).get("value") == 0.01), one.cells[-1])

    def spot(place: Any) -> dict[str, float]:
        return {"share": place.share, "score": place.score * unit}

    return {
        "set": one.table,
        "data": one.data,
        "name": f"{one.method} ({one.variant})" if one.variant else one.method,
        "model": one.model,
        "seed": one.seed,
        "metric": one.metric,
        "full": spot(one.full),
        "chosen": {loss: spot(place) for loss, place in one.chosen.items()},
        "curve": [spot(place) for place in one.curve],
        "exits": point.get("exit_histogram"),
        "kept": point.get("tokens_by_layer"),
        "files": list(one.files),
        "command": one.cells[0]["command"],
    }


def _pictures(entries: Sequence[ModelResult], target: Path) -> list[Path]:
    made = []
    for title in sorted({one.table for one in entries}):
        figure = _figure(title, [one for one in entries if one.table == title])
        for suffix, canvas in (("png", FigureCanvasAgg), ("svg", FigureCanvasSVG)):
            path = target / f"{title}.{suffix}".replace("/", "-").replace(": ", "-")
            with atomic_replace(path) as fresh:
                canvas(figure).print_figure(fresh, format=suffix)
            made.append(path)
    return made


def _figure(title: str, own: Sequence[ModelResult]) -> Figure:
    """Score against cost; a method has one colour whatever its seed, models beside the usual one are dashed."""
    usual = Counter(one.model for one in own).most_common(1)[0][0]
    names = sorted({_name(one, usual) for one in own})
    tall = max(4.6, 0.5 + 0.14 * len("\n".join(names).split("\n")))
    figure = Figure(figsize=(9.0, tall), dpi=150, layout="constrained")
    axes, unit = figure.add_subplot(), metric_scale(own[0].metric)
    best = max(spot.score for one in own for spot in one.curve)
    for one in sorted(own, key=lambda e: (_name(e, usual), e.seed or 0)):
        kept = [spot for spot in one.curve if spot.score >= best * (1 - TOP)]
        if not kept:
            continue
        name, lone = _name(one, usual), len(kept) == 1
        number, dash = names.index(name), "-" if one.model == usual else "--"
        colour, again = COLOURS[number % len(COLOURS)], number // len(COLOURS) % len(MARKS)
        shares, scores = [s.share for s in kept], [s.score * unit for s in kept]
        (line,) = axes.plot(shares, scores, dash, color=colour, linewidth=1, label=name)
        line.set(marker=(LONE if lone else MARKS)[again], markersize=5 if lone else 3)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("share of the full model's multiply-accumulates")
    axes.set_ylabel(own[0].metric)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    shown = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=6.5, frameon=False)
    return figure


def _name(one: ModelResult, usual: str) -> str:
    """As tables have it, on several lines where options are many; the model where it is not the usual one."""
    parts = [*one.variant.split(", "), *([one.model] if one.model != usual else [])]
    return "\n  ".join([one.method, *filter(None, parts)])
