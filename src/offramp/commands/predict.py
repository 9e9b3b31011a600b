"""`offramp predict` as a function: rows in, JSON lines out, in order, in constant memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from offramp.data.readers import stream_rows
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.utils.files import atomic_replace, check_not_input


@dataclass
class PredictSummary:
    """How many rows were answered and what they cost."""

    rows: int = 0
    macs: float = 0.0
    full_macs: float = 0.0
    truncated: int = 0
    max_length: int = 0  # tokens that the model takes

    @property
    def mac_share(self) -> float:
        """The share of the full model's MACs that was spent."""
        return self.macs / self.full_macs if self.full_macs else 0.0


def predict(
    run: str | Path,
    input: str | Path,
    output: str | Path | None = None,
    *,
    budget: float | None = None,
    max_loss: float | None = None,
    risk: float | None = None,
    latency: str | float | None = None,
    batch_size: int = 32,
    engine: str = "auto",
    precision: Literal["fp32", "bf16", "int8"] = "fp32",
    threads: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> PredictSummary:
    """Write a prediction for every row of a file or of standard input ("-"), one JSON object a line.

    Without `output` predictions go to standard output. The other arguments are those of `evaluate`. In Python code
    `offramp.load(run).predict(texts)` is the shorter way.
    """
    check_not_input(output, input, run)
    predictor = Predictor.load(run, engine, precision, threads)
    settings = predictor.settings(budget, None, max_loss, risk, latency)
    target = None if output is None else str(output)
    return predict_stream(predictor, str(input), target, settings, batch_size, columns or {})


def predict_stream(
    predictor: Predictor,
    source: str,
    output: str | None,
    settings: Any,
    batch_size: int,
    columns: Mapping[str, str],
) -> PredictSummary:
    """Write the predictions of a loaded run for every row of `source`; into a .txt file their texts alone."""
    summary = PredictSummary(max_length=predictor.model.max_length)
    text_only = output is not None and output.endswith(".txt")
    if text_only and predictor.task.outputs != 0:  # only tasks whose answers are texts have no fixed outputs
        raise OfframpError(f"plain lines in {output}", f"answers of the task {predictor.task.name!r}", "write .jsonl")
    rows, name = stream_rows(source, columns=columns), "standard input" if source == "-" else source
    with _opened(output) as file:
        for chunk in predictor.chunks(rows, batch_size):
            encoded = predictor.prepare(chunk, f"{name}, counted from row {summary.rows + 1}" if summary.rows else name)
            outcome = predictor.run(encoded, settings, batch_size)
            for answer in predictor.finish(chunk, encoded, outcome):
                line = answer["text"].replace("\n", " ") if text_only else _json_line(answer)
                file.write(line + "\n")
            summary.rows += len(chunk)
            summary.truncated += len({one.example for one in encoded if one.cut})
            summary.macs += float(outcome.macs.sum())
            summary.full_macs += predictor.full_macs(encoded, outcome)
    return summary


def _json_line(answer: Mapping[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False, default=lambda value: value.item())  # numpy scalars as numbers


@contextmanager
def _opened(output: str | None) -> Iterator[TextIO]:
    """Open the file for predictions, which takes its place only when all are written; or standard output."""
    if output is None:
        yield sys.stdout
        return
    with atomic_replace(Path(output)) as fresh, fresh.open("w", encoding="utf-8") as file:
        yield file
