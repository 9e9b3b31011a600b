"""Draw docs/aims.svg: what was aimed at in the papers' studies and the curves that were reached.

    python benchmarks/aims.py

Only files under results/ are read; nothing is measured. A line is the curve of one trained model on its report rows:
points lost against plain fine-tuning, by share of the full model's MACs. Circles are settings that were chosen on other
rows. The grey area is the aim, where there is a number: no more points lost, at no more compute.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from offramp.evaluation.collect import metric_of

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "aims.svg"
MOST_LOST = 8.0  # points, at the upper edge of a panel
COLOURS = ("#c51b7d", "#2166ac", "#e08214", "#4d9221", "#762a83")


@dataclass(frozen=True)
class Curve:
    """A trained model's result cells, and those of plain fine-tuning on the same rows."""

    label: str
    cells: str
    plain: str  # "": the model's own full setting
    others: tuple[str, ...] = ()  # cells of single settings of the same model


@dataclass(frozen=True)
class Panel:
    """Curves that had the same aims: (points lost, share of MACs)."""

    title: str
    aims: tuple[tuple[float, float], ...]
    curves: tuple[Curve, ...]


BGE = "bge-small-en-v1.5-s42"
PANELS = (
    Panel(
        "adapler, AG's News",
        ((2.0, 0.15),),
        (
            Curve("MiniLM", "agnews/adapler/distilled-minilm-s42", "agnews/full/auto/minilm-s42"),
            Curve("bge-small", "agnews/adapler/distilled-phi0.03-bge-s42", f"agnews/full/auto/{BGE}"),
        ),
    ),
    Panel(
        "adapler, IMDB",
        ((2.0, 0.25),),
        (
            Curve("MiniLM, phi 0.03", "imdb/adapler/distilled-phi0.03-minilm-s42", "imdb/full/auto/minilm-s42"),
            Curve("MiniLM, phi 0.002", "imdb/adapler/distilled-phi0.002-minilm-s42", "imdb/full/auto/minilm-s42"),
            Curve("bge-small", "imdb/adapler/distilled-phi0.03-bge-s42", f"imdb/full/auto/{BGE}"),
        ),
    ),
    Panel(
        "length_adaptive, tokens restored",
        ((2.0, 0.8), (5.0, 0.6)),
        (
            Curve(
                "CoNLL-2003",
                "conll2003/length_adaptive/affine-cliffs-minilm-s42",
                "conll2003/full/rows8000-minilm-s42",
                ("conll2003/length_adaptive/restore/affine-cliffs-minilm-s42-share0.6",),
            ),
            Curve("SQuAD", "squad/length_adaptive/affine-searched-minilm-s42", "squad/full/rows2400-minilm-s42"),
        ),
    ),
    Panel(
        "faster_dat, MR, bge-small",
        ((1.5, 0.5),),
        tuple(
            Curve(name.replace("-", " "), f"mr/faster_dat/{name}/{BGE}", f"mr/full/words/{BGE}")
            for name in ("reconstruction", "mutual-information", "telling-deep")
        ),
    ),
    Panel(
        "alberta, own backbone",
        ((1.0, 0.6),),
        tuple(
            Curve(label, f"{folder}/alberta/own-backbone-no-dropout/gated-alberta6x256-s42", "")
            for label, folder in (("AG's News", "agnews"), ("SST-2", "sst2"), ("CoNLL-2003", "conll2003"))
        ),
    ),
    Panel(
        "auto, MiniLM",
        (),
        tuple(
            Curve(label, f"{folder}/{method}/auto/auto-minilm-s42", f"{folder}/full/auto/minilm-s42")
            for label, folder, method in (
                ("TREC", "trec", "fastbert"),
                ("SST-2", "sst2", "fastbert"),
                ("AG's News", "agnews", "fastbert"),
                ("IMDB", "imdb", "fastbert"),
                ("MRPC", "mrpc", "deebert"),
            )
        ),
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the picture; the same results give the same file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    with matplotlib.rc_context({"svg.hashsalt": "offramp", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(9.6, 5.2), layout="constrained")
        axes = figure.subplots(2, 3)
        for one, panel in zip(axes.flat, PANELS, strict=True):
            _draw(one, panel)
        for row in axes:
            row[0].set_ylabel("points lost")
        FigureCanvasSVG(figure).print_figure(TARGET, metadata={"Date": None, "Creator": None})
    sys.stdout.write(f"written: {TARGET}\n")


def _draw(axes: Any, panel: Panel) -> None:
    for lost, share in panel.aims:
        axes.fill_between([0.0, share], [lost, lost], [-MOST_LOST, -MOST_LOST], color="#eeeeee", zorder=0)
    for colour, curve in zip(COLOURS, panel.curves, strict=False):
        line, chosen = points_lost(curve)
        axes.plot(*zip(*line, strict=True), "-", color=colour, linewidth=1, label=curve.label)
        axes.plot(*zip(*chosen, strict=True), "o", color=colour, markersize=4)
    axes.set_xlim(0.0, 1.02)
    axes.set_ylim(MOST_LOST, -2.0)
    axes.set_title(panel.title, loc="left", fontsize=9)
    axes.set_xlabel("share of MACs")
    axes.grid(color="#e5e5e5", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="best")


def points_lost(curve: Curve) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return share of MACs and points lost of the settings of a curve, and of those that were chosen."""
    cells = [*_read(curve.cells), *(cell for name in curve.others for cell in _read(name))]
    metric = metric_of(cells[0])
    plain = (_read(curve.plain) if curve.plain else cells)[0]["metrics"][metric]
    line = [(spot["share_of_full"], 100 * (plain - spot["metrics"][metric])) for spot in cells[0]["curve"]]
    chosen = [(cell["macs"]["share_of_full"], 100 * (plain - cell["metrics"][metric])) for cell in cells]
    return sorted(line), chosen


def _read(name: str) -> list[dict[str, Any]]:
    cells = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return cells if isinstance(cells, list) else [cells]  # one setting alone is no list


if __name__ == "__main__":
    main()
