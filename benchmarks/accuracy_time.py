"""Draw docs/accuracy-time.svg: accuracy against milliseconds a row, Offramp beside static runtimes on the same weights.

    python benchmarks/accuracy_time.py

Only files under results/ are read; nothing is measured. Time: `offramp bench`, batches of 32 sorted by length, fp32,
two cores. Accuracy: the same setting on all report rows (result cells), as the timed rows are too few.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "accuracy-time.svg"
PANELS = (  # title, result cells, bench
    ("AG's News, fastbert", "agnews/fastbert/default-minilm-s42", "agnews/bench/fastbert-minilm-s42"),
    ("SST-2, deebert", "sst2/deebert/default-minilm-s42", "sst2/bench/deebert-minilm-s42"),
    ("TREC, fastbert", "trec/fastbert/default-minilm-s42", "trec/bench/fastbert-minilm-s42"),
    ("IMDB, deebert (fitted)", "imdb/deebert/bow-fitted-minilm-s42", "imdb/bench/deebert-bow-fitted-minilm-s42"),
)
PEERS = {"hf-sdpa": ("Hugging Face", "#999999"), "onnxruntime": ("ONNX Runtime", "#e08214"),
         "openvino-graph": ("OpenVINO", "#2166ac")}  # fmt: skip
OURS = "#c51b7d"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the picture; the same results give the same file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    with matplotlib.rc_context({"svg.hashsalt": "offramp", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(9.6, 2.5), layout="constrained")
        axes = figure.subplots(1, len(PANELS))
        for one, (title, cells, bench) in zip(axes, PANELS, strict=True):
            _panel(one, title, _read(cells), _read(bench)["rows"])
        axes[0].set_ylabel("accuracy on all report rows")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        FigureCanvasSVG(figure).print_figure(TARGET, metadata={"Date": None, "Creator": None})
    sys.stdout.write(f"written: {TARGET}\n")


def _panel(axes: Any, title: str, cells: list[dict[str, Any]], timed: list[dict[str, Any]]) -> None:
    """One data set: static runtimes as single points, Offramp as a line from full depth to a loss of one point."""
    score = {str(_budget(cell)): 100 * cell["metrics"]["accuracy"] for cell in cells}
    rows = [row for row in timed if (row["batch_size"], row["order"]) == (32, "sorted")]
    for row in rows:
        if row["engine"] in PEERS:
            label, colour = PEERS[row["engine"]]
            axes.plot(1000 / row["rows_per_second"], score["1.0"], "s", color=colour, markersize=5, label=label)
    ours = [(1000 / row["rows_per_second"], score[str(row["budget"])]) for row in rows if row["engine"] == "openvino"]
    axes.plot(*zip(*ours, strict=True), "o-", color=OURS, markersize=4, linewidth=1, label="Offramp")
    axes.set_xlim(left=0)
    axes.set_ylim(score["1.0"] - 2, score["1.0"] + 1)
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel("milliseconds a row")
    axes.grid(color="#e5e5e5", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _budget(cell: dict[str, Any]) -> str | float:
    """The setting of a cell as a bench names it."""
    chosen = cell["chosen"]
    return 1.0 if chosen["by"] == "full" else f"max-loss={chosen['value']}"


def _read(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
