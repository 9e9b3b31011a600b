"""`offramp report` as a function: one page, pictures and tables of all results in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offramp.errors import OfframpError
from offramp.evaluation.collect import CollectedResults, collect_results, join_families
from offramp.evaluation.pages import page
from offramp.evaluation.reports import INTRO, draw_report, drawn_results, report_data
from offramp.evaluation.tables import latex_table, markdown_tables, table_lines
from offramp.utils.files import check_output_file, write_text


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
    if out is not None and markdown is not None:
        given = f"--out {out} and --markdown {markdown}"
        raise OfframpError("a whole report, or its tables alone", given, "leave out one of the two")
    check_output_file(markdown)
    found = collect_results(str(folder))
    if speeds:
        timed = collect_results(speeds)
        found.benches += timed.benches
        found.lengths += timed.lengths
        found.damaged += timed.damaged
    if not found.entries:
        damaged = f", and {len(found.damaged)} damaged files" if found.damaged else ""
        fix = "run `offramp compare`, or `offramp eval --json`, first"
        raise OfframpError("results to report", f"none in {folder}{damaged}", fix)
    families = join_families(found.entries)
    listed = table_lines([*found.entries, *families], found.benches)
    if markdown is not None:
        write_text(Path(markdown), INTRO + "\n" + markdown_tables(listed) + "\n")
        return Report(found, [Path(markdown)])
    target = Path(out or folder)
    target.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.html": page("report", "Offramp: what compute buys", report_data(found, families, listed)),
        "report.md": markdown_tables(listed) + "\n",
        "report.tex": latex_table(listed),
    }
    for name, text in texts.items():
        write_text(target / name, text)
    pictures = draw_report(drawn_results(found.entries, families), target)
    return Report(found, [*(target / name for name in texts), *pictures])
