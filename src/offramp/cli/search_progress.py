"""What `offramp search` shows while it works: how far it is, and the front as it grows."""

from __future__ import annotations

from types import TracebackType

from rich.console import Group
from rich.live import Live
from rich.text import Text

from offramp.calibration.length_search import SearchPlan, SearchProgress
from offramp.cli.console import err, say_plainly
from offramp.inference.operating_points import OperatingPoint

WIDE, TALL = 64, 12


class SearchConsole:
    """Live on a terminal; elsewhere one line for each iteration."""

    def __init__(self, plan: SearchPlan) -> None:
        self.plan = plan
        self.live = Live(console=err, refresh_per_second=4, transient=True)

    def __enter__(self) -> SearchConsole:
        if err.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if err.is_terminal:
            self.live.stop()

    def say(self, news: SearchProgress) -> None:
        """Called by the search after every configuration."""
        where = f"iteration {news.iteration} of {self.plan.iterations}, {news.left} to try; {len(news.found)} tried"
        reach = f"from {news.best[0].mac_share:.3f} to {news.best[-1].mac_share:.3f}"
        told = f"{where}, {len(news.best)} on the front {reach}"
        if err.is_terminal:
            self.live.update(Group(Text(told), Text(drawing(news.best, [p for one in news.found for p in one.points]))))
        elif news.left == 0:
            say_plainly(told)

    def scoring(self, done: int, total: int) -> None:
        """Called while configurations of the front are scored on the rows that were not searched on."""
        if err.is_terminal:
            self.live.update(Text(f"scoring on the other rows: {done} of {total} configurations"))
        elif done == 0:
            say_plainly(f"scoring {total} configurations on the other rows")


def drawing(best: list[OperatingPoint], tried: list[OperatingPoint]) -> str:
    """Score over share of compute in letters: ● the front, · the rest."""
    shown = [*tried, *best]
    spans = [_span([p.mac_share for p in shown]), _span([p.score for p in shown])]
    page = [[" "] * WIDE for _ in range(TALL)]
    for points, mark in ((tried, "·"), (best, "●")):
        for point in points:
            x, y = _place(point.mac_share, spans[0], WIDE), _place(point.score, spans[1], TALL)
            page[TALL - 1 - y][x] = mark
    (left, right), (low, high) = spans
    lines = ["".join(line).rstrip() for line in page]
    side = [f"{high:8.4f} │", *["         │"] * (TALL - 2), f"{low:8.4f} │"]
    drawn = [f"{edge} {line}" for edge, line in zip(side, lines, strict=True)]
    return "\n".join([*drawn, f"{'':9}└{'─' * WIDE}", f"{'':10}{left:<.3f}{right:>{WIDE - 5}.3f}  share of full MACs"])


def _span(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def _place(value: float, span: tuple[float, float], cells: int) -> int:
    low, high = span
    return round((value - low) / (high - low) * (cells - 1)) if high > low else 0
