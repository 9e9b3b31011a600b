"""The picture of a bench file: score against speed, a panel for each batch size and order of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from offramp.utils.files import atomic_replace

Entry = Mapping[str, Any]
COLOURS = ("#2f6db3", "#d1495b", "#2a9d6f", "#8a5fbf", "#c98a1b", "#444444", "#3aa6b9", "#9c4a2f")
MARKS = "osD^vP*X"


def entries_by_group(file: Entry) -> list[tuple[tuple[int, str], list[Entry]]]:
    """Return the entries of a bench file by batch size and order of rows."""
    found: dict[tuple[int, str], list[Entry]] = {}
    for entry in file["rows"]:
        found.setdefault((entry["batch_size"], entry["order"]), []).append(entry)
    return list(found.items())


def draw_bench(file: Entry, path: Path) -> None:
    """Write the picture as a PNG: Offramp's engines as lines over budgets, other runtimes as single marks."""
    panels = entries_by_group(file)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * lines + 0.8), dpi=150, layout="constrained")
    styles: dict[str, tuple[str, str]] = {}
    for number, ((size, order), entries) in enumerate(panels, 1):
        axes = figure.add_subplot(lines, columns, number)
        _panel(axes, entries, file["metric"], styles)
        axes.set_title(f"batch {size}" + (", sorted by length" if order == "sorted" else ", as given"), fontsize=10)
    labelled = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: line for line, label in labelled}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(f"{file['model']} ({file['method']}) on {file['data']}; {file['hardware']}", fontsize=9)
    with atomic_replace(path) as fresh, fresh.open("wb") as stream:
        FigureCanvasAgg(figure).print_png(stream)


def _panel(axes: Axes, entries: Sequence[Entry], metric: str, styles: dict[str, tuple[str, str]]) -> None:
    named: dict[str, list[Entry]] = {}
    for entry in entries:
        name = f"{'' if entry['peer'] else 'offramp '}{entry['engine']} {entry['precision']}"
        named.setdefault(name, []).append(entry)
    for name, own in named.items():
        number = len(styles)
        colour, mark = styles.setdefault(name, (COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]))
        own = sorted(own, key=lambda e: e["rows_per_second"])
        speed, score = [e["rows_per_second"] for e in own], [e["metrics"][metric] for e in own]
        line = "none" if own[0]["peer"] else "-"
        axes.plot(speed, score, marker=mark, linestyle=line, color=colour, markersize=6, label=name, alpha=0.85)
        for entry, x, y in zip(own, speed, score, strict=True):
            if not entry["peer"]:
                name = str(entry["budget"])
                axes.annotate(name, (x, y), xytext=(0, 6), textcoords="offset points", fontsize=6, color=colour)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("rows a second")
    axes.set_ylabel(metric)
    axes.grid(color="#dddddd", linewidth=0.6, which="both")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
