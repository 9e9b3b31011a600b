"""A bench for people: a table, a picture, progress on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich import box
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from offramp.cli import console
from offramp.utils.files import replacing

Entry = Mapping[str, Any]
COLOURS = ("#2f6db3", "#d1495b", "#2a9d6f", "#8a5fbf", "#c98a1b", "#444444", "#3aa6b9", "#9c4a2f")
MARKS = "osD^vP*X"
COLUMNS = ("engine", "precision", "budget", "rows/s", "best", "p50 ms", "p95 ms", "MB", "metric", "share of\nMACs",
           "speed-up", "realised ÷\npromised", "× fastest\npeer")  # fmt: skip
UNLIKE = ("answers\n≠ fp32", "exits\n≠ fp32")  # shown where somebody was measured in fp32 and in less


class BenchConsole:
    """Progress on standard error."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console.err)
        self.bar: TaskID | None = None

    def __enter__(self) -> BenchConsole:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def phase(self, name: str, total: int) -> None:
        """A new part of the work."""
        self.bar = self.progress.add_task(name, total=total)

    def tick(self) -> None:
        """One step done."""
        if self.bar is not None:
            self.progress.advance(self.bar)


def groups(made: Entry) -> list[tuple[tuple[int, str], list[Entry]]]:
    """Entries by batch size and order."""
    found: dict[tuple[int, str], list[Entry]] = {}
    for entry in made["rows"]:
        found.setdefault((entry["batch_size"], entry["order"]), []).append(entry)
    return list(found.items())


def show(made: Entry) -> None:
    """Tables, and what must be known to read them."""
    for (size, order), entries in groups(made):
        title = f"batch {size}, rows {'sorted by length' if order == 'sorted' else 'as given'}"
        console.out.print(table(entries, made["metric"], title))
    told = [f"{one['engine']} {one['precision']} is missing: {one['reason']}" for one in made["failed"]]
    told += [
        f"{made['row_count']} rows of {made['data']}, {made['tokens']['mean']:g} tokens on average; {made['model']}, "
        f"{made['method']}; {made['plan']['rounds']} interleaved rounds after a warm-up, medians (best: the least)",
        "the clock runs from token ids to logits, packing or padding included; tokenising takes "
        f"{made['tokenise_ms_per_row']:.3g} ms a row more, for everybody; p50 and p95 are of calls, so of batches",
        "MB: growth of the resident set of a fresh process, at its highest",
        f"hardware: {made['hardware']}; threads: {made['threads']}",
    ]
    for line in told:
        console.out.print(line, markup=False, highlight=False, soft_wrap=True)


def table(entries: Sequence[Entry], metric: str, title: str) -> Table:
    """One batch size in one order, fastest last."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    unlike = any(entry.get("disagrees_with_fp32") for entry in entries)
    for name in COLUMNS + UNLIKE * unlike:
        shown = metric if name == "metric" else name
        made.add_column(shown, justify="left" if name in COLUMNS[:2] else "right", no_wrap=True)
    for entry in sorted(entries, key=lambda e: e["rows_per_second"]):
        made.add_row(*cells(entry, metric), *(_unlike(entry) if unlike else ()))
    return made


def cells(entry: Entry, metric: str) -> list[str]:
    """One entry as words."""
    ours = not entry["peer"]
    return [
        f"offramp {entry['engine']}" if ours else entry["engine"],
        entry["precision"],
        str(entry["budget"]) if ours else "",
        f"{entry['rows_per_second']:.1f}",
        f"{entry['rows_per_second_best']:.1f}",
        f"{entry['p50_ms']:.2f}",
        f"{entry['p95_ms']:.2f}",
        _number(entry["peak_mb"], ".0f"),
        _number(entry["metrics"][metric], ".4f"),
        _number(entry["mac_share"] if ours else None, ".3f"),
        _number(entry.get("speed_up"), ".2f"),
        _number(entry["realised_over_promised"], ".2f"),
        _number(entry["over_fastest_peer"] if ours else None, ".2f"),
    ]


def _unlike(entry: Entry) -> list[str]:
    """How often somebody departs from itself in fp32."""
    found = entry.get("disagrees_with_fp32") or {}
    return [_number(found.get(name), ".2%") for name in ("answers", "exits")]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def draw(made: Entry, path: Path) -> None:
    """Score against speed, a panel for each batch size and order; ours as lines over budgets, peers as marks."""
    panels = groups(made)
    wide = min(3, len(panels))
    tall = -(-len(panels) // wide)
    figure = Figure(figsize=(4.6 * wide, 3.6 * tall + 0.8), dpi=150, layout="constrained")
    styles: dict[str, tuple[str, str]] = {}
    for place, ((size, order), entries) in enumerate(panels):
        axes = figure.add_subplot(tall, wide, place + 1)
        _panel(axes, entries, made["metric"], styles)
        axes.set_title(f"batch {size}" + (", sorted by length" if order == "sorted" else ", as given"), fontsize=10)
    lines = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: line for line, label in lines}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(f"{made['model']} ({made['method']}) on {made['data']}; {made['hardware']}", fontsize=9)
    with replacing(path) as fresh, fresh.open("wb") as file:
        FigureCanvasAgg(figure).print_png(file)


def _panel(axes: Axes, entries: Sequence[Entry], metric: str, styles: dict[str, tuple[str, str]]) -> None:
    named: dict[str, list[Entry]] = {}
    for entry in entries:
        name = f"{'' if entry['peer'] else 'offramp '}{entry['engine']} {entry['precision']}"
        named.setdefault(name, []).append(entry)
    for name, own in named.items():
        kept = len(styles)
        colour, mark = styles.setdefault(name, (COLOURS[kept % len(COLOURS)], MARKS[kept % len(MARKS)]))
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
