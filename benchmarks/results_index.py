"""Write results/INDEX.md: one table per data set, one line per result file, with its scores and a link to it.

    python benchmarks/results_index.py

Only files under results/ are read; nothing is measured. Run it after adding a file; a test compares the list of files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
METRICS = ("entity_f1", "span_f1", "pearson", "bleu", "accuracy", "f1", "perplexity")
BY_DATA = {"mrpc": "f1", "cola": "matthews"}  # data sets that are known by another metric than the first they have
AS_IT_IS = ("bleu", "perplexity")  # all other metrics are shares of one and are shown in points
COLUMNS = ("method", "options", "model", "seed", "metric", "full → chosen, at its share of MACs", "file")
MEASURED = {
    "growth": "time and memory against the number of rows",
    "overhead": "time around the layers",
    "startup": "time from the command to the first answer",
}
INTRO = """# Index of the result files

Written by `python benchmarks/results_index.py`; do not edit. Scores are on rows that neither training nor calibration
saw. "full → chosen": the score at full depth and length, then the point that was chosen on held-out rows for a loss of
at most one point, and its share of the full model's multiply-accumulates (exit heads counted, nothing padded). Files
with one operating point show that point alone. What the folders hold: [README.md](README.md).
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the index next to the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    (RESULTS / "INDEX.md").write_text(index(RESULTS), encoding="utf-8")
    sys.stdout.write(f"written: {RESULTS / 'INDEX.md'}\n")


def index(results: Path) -> str:
    """Return the page: a section per data set, result cells first, other files after them."""
    parts = [INTRO]
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        cells, others = [], []
        for path in sorted(folder.rglob("*.json")):
            name = path.relative_to(results).as_posix()
            content = json.loads(path.read_text(encoding="utf-8"))
            first = content[0] if isinstance(content, list) else content
            if "macs" in first and "metrics" in first:
                cells.append(_row(_cell(content if isinstance(content, list) else [content], name)))
            else:
                others.append(f"- {_link(name)}: {_about(first)}")
        parts.append(f"## {folder.name}\n")
        if cells:
            parts.append("\n".join([_row(COLUMNS), "|" + "---|" * len(COLUMNS), *cells]) + "\n")
        if others:
            parts.append("\n".join(others) + "\n")
    return "\n".join(parts)


def _cell(cells: list[Mapping[str, Any]], name: str) -> Iterator[str]:
    """The columns of a file of result cells: full depth first, then the point chosen for a loss of one point."""
    first = cells[0]
    metric = metric_of(first)
    score = _at(first, metric, share=first["macs"]["share_of_full"] < 0.9995)
    chosen = [cell for cell in cells if cell.get("chosen", {}).get("value") == 0.01]
    if chosen:
        score += f" → {_at(chosen[0], metric, share=True)}"
    options = (first.get("trained") or {}).get("options") or {}
    variant = ", ".join(f"{key}={value}" for key, value in sorted(options.items()))
    yield from (f"`{first['method']}`", variant, first["model"], str(first["seed"] or "–"), metric, score, _link(name))


def metric_of(cell: Mapping[str, Any]) -> str:
    """Return the metric that a data set is known by."""
    named = BY_DATA.get(cell["data"], "")
    return next(metric for metric in (named, *METRICS) if metric in cell["metrics"])


def _at(cell: Mapping[str, Any], metric: str, share: bool) -> str:
    value = cell["metrics"][metric] * (1 if metric in AS_IT_IS else 100)
    return f"{value:.1f}" + (f" at {cell['macs']['share_of_full']:.3f}" if share else "")


def _about(content: Mapping[str, Any]) -> str:
    """One line on a file that holds no result cells: benches, tables of a paper, throughput."""
    if content.get("what"):
        return str(content["what"]).split("\n")[0].rstrip(".")
    if isinstance(content.get("rows"), list):
        return f"`offramp bench`, `{content['method']}` on {content['model']}, beside other runtimes"
    if isinstance(content.get("lengths"), list):
        return f"speed against the length of a text, `{content['method']}`"
    if content.get("measured"):
        return f"{MEASURED[content['measured'][0]['what']]}, `{content['method']}` on {content['model']}"
    return "numbers of a paper's table or figure"


def _link(name: str) -> str:
    return f"[{name.split('/', 1)[1]}]({name})"


def _row(columns: Any) -> str:
    return f"| {' | '.join(columns)} |"


if __name__ == "__main__":
    main()
