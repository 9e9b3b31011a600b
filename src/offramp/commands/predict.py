"""`offramp predict` as a function: rows in, JSON lines out, in order, in constant memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from offramp.data.readers import stream
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.utils.files import replacing


@dataclass
class Done:
    """What was answered."""

    rows: int = 0
    macs: float = 0.0
    full: float = 0.0
    cut: int = 0

    @property
    def share(self) -> float:
        """Compute spent, of the full model's."""
        return self.macs / self.full if self.full else 0.0


def answer_stream(
    predictor: Predictor,
    source: str,
    output: str | None,
    settings: Any,
    batch_size: int,
    columns: Mapping[str, str],
) -> Done:
    """Predictions for every row of a file or standard input; into a .txt file their texts alone."""
    done, plain = Done(), output is not None and output.endswith(".txt")
    if plain and predictor.task.outputs != 0:  # answers of a vocabulary are texts
        raise OfframpError(f"plain lines in {output}", f"answers of the task {predictor.task.name!r}", "write .jsonl")
    rows, name = stream(source, columns=columns), "standard input" if source == "-" else source
    with _sink(output) as sink:
        for chunk in predictor.chunks(rows, batch_size):
            encoded = predictor.prepare(chunk, f"{name}, counted from row {done.rows + 1}" if done.rows else name)
            outcome = predictor.run(encoded, settings, batch_size)
            for answer in predictor.finish(chunk, encoded, outcome):
                whole = json.dumps(answer, ensure_ascii=False, default=_plain)
                sink.write((answer["text"].replace("\n", " ") if plain else whole) + "\n")
            done.rows += len(chunk)
            done.cut += len({e.example for e in encoded if e.cut})
            done.macs += float(outcome.macs.sum())
            done.full += predictor.full_macs(encoded, outcome)
    return done


def _plain(value: Any) -> Any:
    """Numpy scalars as JSON numbers."""
    return value.item()


@contextmanager
def _sink(output: str | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    with replacing(Path(output)) as fresh, fresh.open("w", encoding="utf-8") as file:
        yield file
