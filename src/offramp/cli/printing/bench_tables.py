"""A bench file as tables, one for each batch size and order of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from offramp.cli.printing.console import print_line, print_table
from offramp.evaluation.bench_figure import entries_by_group

Entry = Mapping[str, Any]
COLUMNS = ("engine", "precision", "budget", "rows/s", "best", "p50 ms", "p95 ms", "MB", "metric", "share of\nMACs",
           "speed-up", "realised ÷\npromised", "× fastest\npeer", "× fastest\nstatic")  # fmt: skip
# Columns that are left out, in this order, of tables that do not fit the terminal.
DROPPED_FIRST = ("exits\n≠ fp32", "answers\n≠ fp32", "best", "MB", "realised ÷\npromised", "p95 ms", "share of\nMACs",
                 "× fastest\npeer", "× fastest\nstatic", "p50 ms", "speed-up")  # fmt: skip
FP32_COLUMNS = ("answers\n≠ fp32", "exits\n≠ fp32")  # shown where an engine was measured in fp32 and in less


def print_bench(file: Entry) -> None:
    """Print the tables of a bench file and what must be known to read them."""
    for (size, order), entries in entries_by_group(file):
        title = f"batch {size}, rows {'sorted by length' if order == 'sorted' else 'as given'}"
        print_table(bench_table(entries, file["metric"], title), DROPPED_FIRST)
    for one in file["failed"]:
        print_line(f"{one['engine']} {one['precision']} is missing: {one['reason']}")
    print_line(
        f"{file['row_count']} rows of {file['data']}, {file['tokens']['mean']:g} tokens on average; {file['model']}, "
        f"{file['method']}; {file['plan']['rounds']} interleaved rounds after a warm-up, medians (best: the least)"
    )
    print_line(
        "the clock runs from token ids to logits, packing or padding included; tokenising takes "
        f"{file['tokenise_ms_per_row']:.3g} ms a row more for every engine; p50 and p95 are of calls, so of batches"
    )
    print_line("MB: growth of the resident set of a fresh process, at its highest")
    print_line(f"hardware: {file['hardware']}; threads: {file['threads']}")
    if "auto" in file:  # not in files of earlier versions
        print_line(f"--engine auto takes {file['auto']}")


def bench_table(entries: Sequence[Entry], metric: str, title: str) -> Table:
    """Return the table of one batch size in one order, slowest first."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    compared = any(entry.get("disagrees_with_fp32") for entry in entries)
    for name in COLUMNS + FP32_COLUMNS * compared:
        header = metric if name == "metric" else name
        table.add_column(header, justify="left" if name in COLUMNS[:2] else "right", no_wrap=True)
    for entry in sorted(entries, key=lambda e: e["rows_per_second"]):
        table.add_row(*bench_cells(entry, metric), *(_fp32_cells(entry) if compared else ()))
    return table


def bench_cells(entry: Entry, metric: str) -> list[str]:
    """Return one entry of a bench file as the texts of a table row."""
    offramp = not entry["peer"]
    return [
        f"offramp {entry['engine']}" if offramp else entry["engine"],
        entry["precision"],
        str(entry["budget"]) if offramp else "",
        f"{entry['rows_per_second']:.1f}",
        f"{entry['rows_per_second_best']:.1f}",
        f"{entry['p50_ms']:.2f}",
        f"{entry['p95_ms']:.2f}",
        _number(entry["peak_mb"], ".0f"),
        _number(entry["metrics"][metric], ".4f"),
        _number(entry["mac_share"] if offramp else None, ".3f"),
        _number(entry.get("speed_up"), ".2f"),
        _number(entry["realised_over_promised"], ".2f"),
        _number(entry["over_fastest_peer"] if offramp else None, ".2f"),
        _number(entry.get("over_fastest_static") if offramp else None, ".2f"),
    ]


def _fp32_cells(entry: Entry) -> list[str]:
    """Return how often answers and exits differ from those of the same engine in fp32."""
    shares = entry.get("disagrees_with_fp32") or {}
    return [_number(shares.get(name), ".2%") for name in ("answers", "exits")]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
