"""Tables of collected results: mean and spread over seeds, in Markdown and LaTeX."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from offramp.evaluation.collect import ModelResult, lowest_share

COLUMNS = ("method", "model", "seeds", "metric", "full depth", "chosen ≤ 0.5", "chosen ≤ 1.0", "curve ≤ 0.5",
           "curve ≤ 1.0", "≤ 1.0 below full", "≤ 2.0 below full")  # fmt: skip
PLAIN = "full"  # the method that is ordinary fine-tuning


def metric_scale(metric: str) -> float:
    """Metrics are shares of one; tables speak of points. BLEU and perplexity are as they are."""
    return 1.0 if metric in ("bleu", "perplexity") else 100.0


@dataclass(frozen=True)
class TableLine:
    """A method on a data set, over its seeds."""

    section: str
    data: str
    table: str
    cells: tuple[str, ...]  # as a table shows them
    files: tuple[str, ...]


def table_lines(entries: Sequence[ModelResult]) -> list[TableLine]:
    """Seeds of one method on one data set and model become one line."""
    groups: dict[tuple[str, ...], list[ModelResult]] = {}
    for one in entries:
        groups.setdefault((*one.key, str(one.begun)), []).append(one)
    return [_line(own, entries) for _, own in sorted(groups.items())]


def _line(own: Sequence[ModelResult], entries: Sequence[ModelResult]) -> TableLine:
    first = own[0]
    name = f"{first.method} ({first.variant})" if first.variant else first.method
    if not first.begun and any(other.begun for other in entries if other.key == first.key):
        name += ", from the pretrained model"
    about = (name, first.model, str(len({one.seed for one in own})), first.metric)
    full = mean_and_spread([one.full.score * metric_scale(first.metric) for one in own])
    chosen = [_chosen(own, loss) for loss in ("0.005", "0.01")]
    curve = [_read_off(own, points) for points in (0.5, 1.0)]
    below = [_below(own, entries, points) for points in (1.0, 2.0)]
    files = tuple(file for one in own for file in one.files)
    return TableLine(first.section, first.data, first.table, (*about, full, *chosen, *curve, *below), files)


def reference(one: ModelResult, entries: Sequence[ModelResult]) -> float | None:
    """What plain fine-tuning reached on the same data, with the same model and, if there is one, the same seed."""
    wanted = (PLAIN, one.data, one.split, one.section, one.model)
    plain = [e for e in entries if (e.method, e.data, e.split, e.section, e.model) == wanted]
    exact = [e for e in plain if e.seed == one.seed] or plain
    return statistics.fmean(e.full.score for e in exact) if exact else None


def _below(own: Sequence[ModelResult], entries: Sequence[ModelResult], points: float) -> str:
    """The smallest share on the curve that is at most so many points below plain fine-tuning."""
    shares = []
    for one in own:
        against = reference(one, entries)
        shares.append(None if against is None else lowest_share(one.curve, against, points / metric_scale(one.metric)))
    known = [share for share in shares if share is not None]
    return f"{statistics.fmean(known):.3f}" if known and len(known) == len(shares) else "–"


def _chosen(own: Sequence[ModelResult], loss: str) -> str:
    """Metric and share of the points chosen on calibration rows, measured on the report rows."""
    spots = [one.chosen[loss] for one in own if loss in one.chosen]
    if not spots:
        return "–"
    score, share = (statistics.fmean(values) for values in zip(*((s.score, s.share) for s in spots), strict=True))
    return f"{score * metric_scale(own[0].metric):.1f} at {share:.3f}"


def _read_off(own: Sequence[ModelResult], points: float) -> str:
    """The smallest share on the report rows' own curve: what hindsight would have chosen."""
    shares = [lowest_share(one.curve, one.full.score, points / metric_scale(one.metric)) for one in own]
    known = [share for share in shares if share is not None]
    return f"{statistics.fmean(known):.3f}" if len(known) == len(shares) else "–"


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean, and the spread where there are several."""
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def markdown_tables(found: Sequence[TableLine]) -> str:
    """One table per data set."""
    parts = []
    for section in sorted({line.section for line in found}):
        parts += [f"## {section}"] if section else []
        for data in sorted({line.data for line in found if line.section == section}):
            rows = [line.cells for line in found if (line.section, line.data) == (section, data)]
            head = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
            parts.append("\n".join([f"### {data}", "", *head, *(f"| {' | '.join(row)} |" for row in rows)]))
    return "\n\n".join(parts)


def latex_table(found: Sequence[TableLine]) -> str:
    """The same for papers (booktabs)."""
    body = [r"\begin{tabular}{ll" + "r" * (len(COLUMNS) - 1) + "}", r"\toprule",
            " & ".join(["data", *map(_tex, COLUMNS)]) + r" \\", r"\midrule"]  # fmt: skip
    body += [" & ".join([_tex(line.data), *map(_tex, line.cells)]) + r" \\" for line in found]
    return "\n".join([*body, r"\bottomrule", r"\end{tabular}", ""])


def _tex(text: str) -> str:
    for plain, made in (("_", r"\_"), ("%", r"\%"), ("≤", r"$\leq$"), ("±", r"$\pm$"), ("–", "--")):
        text = text.replace(plain, made)
    return text
