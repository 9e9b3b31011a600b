"""Speed against the length of a text: what a setting saves on short rows and on long ones, measured."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from offramp import __version__
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.evaluation.contenders import dearest, ours
from offramp.evaluation.result_cells import Origin, hardware, model_name
from offramp.evaluation.timing import interleaved
from offramp.inference.predictor import Predictor

EDGES = (8, 16, 32, 64, 128, 256, 512, 1024)  # tokens; a group ends at each


@dataclass(frozen=True)
class Effort:
    """How long to look at the clock."""

    batch_size: int = 32
    rows: int = 128  # of each length, at most
    rounds: int = 5


def by_length(
    predictor: Predictor, rows: Sequence[Mapping[str, Any]], settings: Any, origin: Origin, effort: Effort
) -> dict[str, Any]:
    """For each group of lengths: milliseconds a row, the full model's, compute and depth. Tokenising is not timed."""
    encoded = predictor.prepare(rows, origin.data)
    groups: dict[int, list[Encoded]] = {}
    for item in encoded:
        edge = next((edge for edge in EDGES if len(item.ids) <= edge), len(item.ids))
        groups.setdefault(edge, []).append(item)
    if not groups:
        raise OfframpError("rows to time", "none", "give --data with at least one row")
    full = dearest(predictor)
    return {
        "method": predictor.model.method.name,
        "model": model_name(predictor.model.base_model),
        "settings": {**asdict(predictor.model.options), **asdict(settings)},
        "data": origin.data,
        "split": origin.split,
        "engine": predictor.engine_name,
        "precision": predictor.how.precision,
        "batch_size": effort.batch_size,
        "lengths": [
            _group(predictor, groups[edge][: effort.rows], (full, settings), effort) for edge in sorted(groups)
        ],
        "hardware": hardware(),
        "command": origin.command,
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }


def _group(predictor: Predictor, items: Sequence[Encoded], pair: tuple[Any, Any], effort: Effort) -> dict[str, Any]:
    """One group of rows at the loosest setting and at the one asked for, in turn."""
    size, alike = effort.batch_size, sorted(items, key=lambda item: len(item.ids))
    batches = [alike[start : start + size] for start in range(0, len(alike), size)]

    ways = {"full": ours(predictor, pair[0]), "asked": ours(predictor, pair[1])}

    def answer(name: str, some: Sequence[Encoded]) -> None:
        ways[name](some)

    seconds = interleaved(answer, ["full", "asked"], batches, effort.rounds)
    outcome = predictor.run(alike, pair[1], size)
    return {
        "tokens": [len(alike[0].ids), len(alike[-1].ids)],
        "rows": len(alike),
        "mean_tokens": round(sum(len(item.ids) for item in alike) / len(alike), 2),
        "ms_full": round(1000 * seconds["full"] / len(alike), 4),
        "ms": round(1000 * seconds["asked"] / len(alike), 4),
        "speed_up": round(seconds["full"] / seconds["asked"], 3),
        "mac_share": round(float(outcome.macs.sum()) / predictor.full_macs(alike, outcome), 6),
        "mean_exit_layer": round(float(outcome.exit_layer.mean()), 4),
    }


def show(found: Mapping[str, Any], console: Console) -> None:
    """The groups as a table."""
    title = (
        f"{found['method']} on {found['data']}/{found['split']}, {found['engine']}, batches of {found['batch_size']}"
    )
    table = Table(title=title, title_justify="left")
    for column in ("tokens", "rows", "full, ms", "ms", "speed-up", "share of MACs", "mean exit layer"):
        table.add_column(column, justify="right")
    for group in found["lengths"]:
        numbers = (f"{group[name]:.3f}" for name in ("ms_full", "ms", "speed_up", "mac_share", "mean_exit_layer"))
        table.add_row("–".join(map(str, group["tokens"])), str(group["rows"]), *numbers)
    console.print(table)
