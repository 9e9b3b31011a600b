"""The picture of a run: what a share of the compute buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from offramp.utils.files import atomic_replace

LINE, MARK, FULL = "#2f6db3", "#d1495b", "#444444"


@dataclass(frozen=True)
class CurvePoint:
    """A place on the curve."""

    share: float  # of the full model's MACs
    score: float


@dataclass(frozen=True)
class CurvePicture:
    """Scores of all operating points, and the two that matter most."""

    title: str
    metric: str
    points: Sequence[CurvePoint]
    full: CurvePoint
    chosen: CurvePoint


def draw_curve(curve: CurvePicture, path: Path) -> None:
    """Write the picture as a PNG. No window, no global state: it works on a server and in a thread."""
    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    points = sorted(curve.points, key=lambda p: p.share)
    axes.axhline(curve.full.score, color=FULL, linewidth=0.8, linestyle=(0, (4, 4)), zorder=1)
    axes.plot([p.share for p in points], [p.score for p in points], "o-", color=LINE, markersize=4, linewidth=1.4,
              label="operating points", zorder=2)  # fmt: skip
    axes.plot(curve.full.share, curve.full.score, "D", color=FULL, markersize=8, zorder=3, linestyle="none",
              label=f"full model: {_percent(curve.full.score)}")  # fmt: skip
    axes.plot(curve.chosen.share, curve.chosen.score, "o", color=MARK, markersize=9, zorder=4, linestyle="none",
              label=f"chosen: {_percent(curve.chosen.score)} at {curve.chosen.share:.0%} of the compute")  # fmt: skip
    _dress(axes, curve)
    canvas = FigureCanvasAgg(figure)
    with atomic_replace(path) as fresh, fresh.open("wb") as file:
        canvas.print_png(file)


def _dress(axes: Axes, curve: CurvePicture) -> None:
    axes.set_title(curve.title, fontsize=11, loc="left")
    axes.set_xlabel("share of the full model's multiply-accumulates")
    axes.set_ylabel(curve.metric)
    axes.set_xlim(-0.02, max([1.0, *(p.share for p in curve.points)]) + 0.04)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9)


def _percent(score: float) -> str:
    return f"{score:.1%}"
