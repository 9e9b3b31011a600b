"""`offramp predict` as a function: rows in, JSON lines out, in order, in constant memory."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from offramp import distributed
from offramp.data.readers import RenamedRow, more_is_ready, stream_numbered_rows
from offramp.data.tokenization import Encoded
from offramp.distributed import BatchSummary
from offramp.errors import OfframpError
from offramp.inference.predictor import Long, Predictor
from offramp.inference.run_folder import remembered_columns
from offramp.tasks import WindowPool
from offramp.utils.files import STANDARD_OUTPUT, atomic_replace, check_output_file, is_stream

Row = Mapping[str, Any]
ALL = "all"  # of `keep`: every column of the input
TEXT, ZIPPED = ".txt", ".gz"
ENDINGS = (".jsonl", ".json", TEXT, "")  # of the output, each also before .gz; all but .txt get JSON lines


@dataclass
class PredictSummary:
    """How many rows were answered and what they cost."""

    rows: int = 0
    macs: float = 0.0
    full_macs: float = 0.0
    truncated: int = 0
    max_length: int = 0  # tokens that the model takes
    bad_rows: int = 0  # answered with an error
    first_error: str = ""

    @property
    def mac_share(self) -> float:
        """The share of the full model's MACs that was spent."""
        return self.macs / self.full_macs if self.full_macs else 0.0


@dataclass(frozen=True)
class PredictOptions:
    """How rows are read and written by `predict_stream`."""

    batch_size: int = 32
    columns: Mapping[str, str] = field(default_factory=dict)  # our name → the file's
    remembered: Mapping[str, str] = field(default_factory=dict)  # the same, of training: used where it fits
    format: str | None = None  # of the input, where its ending does not tell it
    keep: Sequence[str] = ()  # columns of the input that are written beside its prediction, or ("all",)
    strict: bool = False  # stop at the first bad row
    long: Long = "truncate"  # what happens to rows that are longer than the model
    window_pool: WindowPool = "mean"  # how windows of a long row are joined


def predict(
    run: str | Path,
    input: str | Path,
    output: str | Path | None = None,
    *,
    budget: float | None = None,
    max_loss: float | None = None,
    risk: float | None = None,
    latency: str | float | None = None,
    max_disagreement: float | None = None,
    batch_size: int = 32,
    engine: str = "auto",
    precision: Literal["fp32", "bf16", "int8"] = "fp32",
    threads: int | None = None,
    columns: Mapping[str, str] | None = None,
    format: str | None = None,
    keep: Sequence[str] = (),
    strict: bool = False,
    long: Long = "truncate",
    window_pool: WindowPool = "mean",
    on_loaded: Callable[[], None] = lambda: None,
) -> PredictSummary:
    """Write a prediction for every row of a file or of standard input ("-"), one JSON object a line.

    Without `output` (or with "-") predictions go to standard output, each as soon as it is there. A file has its name
    only once it is whole; if the work is stopped early, the answers until then are in OUTPUT.partial. A bad row gets
    `{"error": …, "line": …}` in its place. In Python code `offramp.load(run).predict(texts)` is the shorter way.

    Args:
        output: a .jsonl file, or a .txt file for texts alone; compressed if .gz follows.
        format: jsonl, csv, tsv, txt or json, where the ending of the input does not tell it.
        keep: columns of the input to write beside the prediction, e.g. ["id", "text"], or ["all"]; one that is called
            like a field of the prediction is written as `input_NAME`.
        strict: raise an error at the first bad row; an output that is there already stays as it is.
        long: "truncate" rows that are longer than the model, or read them in overlapping "window"s.
        window_pool: whether the "mean" or the "max" of the windows' probabilities counts.
        on_loaded: is called once the run is loaded.

    The other arguments are those of `evaluate`.
    """
    check_output_file(output, input, run)
    _output_ending(None if output is None else str(output))
    predictor = Predictor.load(run, engine, precision, threads)
    settings = predictor.settings(budget, None, max_loss, risk, latency, max_disagreement)
    remembered = remembered_columns(predictor.model.folder or run)
    options = PredictOptions(batch_size, columns or {}, remembered, format, tuple(keep), strict, long, window_pool)
    on_loaded()
    return predict_stream(predictor, str(input), None if output is None else str(output), settings, options)


def check_cluster_options(
    cluster: str | None, output: str | None, only_there: Mapping[str, Any], never_there: Mapping[str, Any]
) -> None:
    """Refuse options that go only with a cluster, or never with one, and a cluster without an output folder."""
    wrong = {name: value for name, value in (never_there if cluster else only_there).items() if value is not None}
    if wrong:
        given = f"{' '.join(f'--{name} {value}' for name, value in wrong.items())} {'with' if cluster else 'without'}"
        fix = "leave them out" if cluster else "add --cluster auto"
        raise OfframpError("options that go together", f"{given} --cluster", fix)
    if cluster is not None and output is None:
        raise OfframpError("a folder for the answers", "--cluster without --output", "add --output FOLDER")


def predict_on_cluster(
    run: str | Path, input: str, output: str | Path, cluster: str = "auto", **options: Any
) -> BatchSummary:
    """Add predictions to the rows of many files on a Ray cluster; `options` are those of `distributed.predict`.

    Blocks that could not be read raise an error after all others are answered; the same call tries them again.
    """
    summary: BatchSummary = distributed.predict(input, run, output, address=cluster, **options)
    if summary.failed:
        given = f"{len(summary.failed)} blocks that were not, first: {summary.failed[0]}"
        raise OfframpError("all blocks answered", given, "remove the cause, then run the same command again")
    return summary


def predict_stream(
    predictor: Predictor, source: str, output: str | None, settings: Any, options: PredictOptions
) -> PredictSummary:
    """Write the predictions of a loaded run for every row of `source`; into a .txt file their texts alone."""
    summary = PredictSummary(max_length=predictor.model.max_length)
    text_only = _output_ending(output) == TEXT
    if text_only and predictor.task.outputs != 0:  # only tasks whose answers are texts have no fixed outputs
        raise OfframpError(f"plain lines in {output}", f"answers of the task {predictor.task.name!r}", "write .jsonl")
    rows = stream_numbered_rows(source, columns=options.columns, remembered=options.remembered, format=options.format)
    kept = _KeptColumns(options.keep, "standard input" if source == "-" else source, predictor.task.answer)
    size = predictor.chunk_size(options.batch_size)
    with _opened(output) as file:
        for chunk in _ready_chunks(rows, size, lambda: more_is_ready(source)):
            for line in _answers(predictor, chunk, settings, options, summary, kept):
                file.write((line.get("text", "").replace("\n", " ") if text_only else _json_line(line)) + "\n")
            file.flush()
    return summary


def _ready_chunks(
    rows: Iterator[tuple[int, Any]], size: int, ready: Callable[[], bool]
) -> Iterator[list[tuple[int, Any]]]:
    """Yield rows to answer together: at most `size`, and no more than can be read without waiting.

    Rows before the damage of a file are answered before its error is raised.
    """
    for first in rows:
        chunk, failure = [first], None
        try:
            while len(chunk) < size and ready() and (following := next(rows, None)) is not None:
                chunk.append(following)
        except Exception as error:
            failure = error
        yield chunk
        if failure is not None:
            raise failure


def _answers(
    predictor: Predictor,
    chunk: Sequence[tuple[int, Any]],
    settings: Any,
    options: PredictOptions,
    summary: PredictSummary,
    kept: _KeptColumns,
) -> Iterator[dict[str, Any]]:
    """Yield the prediction of every row, or its error, in order."""
    errors = {line: row for line, row in chunk if isinstance(row, OfframpError)}
    good = {line: row for line, row in chunk if line not in errors}
    unusable, rows, encoded = _prepare(predictor, good, kept.source, options.long)
    errors |= unusable
    if errors and options.strict:
        raise errors[min(errors)]
    predictions = iter(_predictions(predictor, rows, encoded, settings, options, summary))
    for line, row in chunk:
        if line in errors:
            summary.bad_rows += 1
            error: dict[str, Any] = {"error": _one_line(errors[line]), "line": line}
            summary.first_error = summary.first_error or _named_line(line, error["error"])
            yield kept.beside(error, row) if isinstance(row, dict) else error
        else:
            yield kept.beside(next(predictions), row)


def _prepare(
    predictor: Predictor, rows: Mapping[int, Row], source: str, long: Long
) -> tuple[dict[int, OfframpError], list[Row], list[Encoded]]:
    """Return the errors of rows that do not fit the task, by line, and the other rows with their token ids."""
    try:
        return {}, list(rows.values()), predictor.prepare(list(rows.values()), long=long)
    except OfframpError:
        errors = {
            line: error for line, row in rows.items() if (error := _row_error(predictor, line, row, source)) is not None
        }
        usable = [row for line, row in rows.items() if line not in errors]
        return errors, usable, predictor.prepare(usable, long=long)


def _predictions(
    predictor: Predictor,
    rows: list[Row],
    encoded: list[Encoded],
    settings: Any,
    options: PredictOptions,
    summary: PredictSummary,
) -> list[dict[str, Any]]:
    """Return the predictions of usable rows, and add their cost to the summary."""
    if not rows:
        return []
    outcome = predictor.run(encoded, settings, options.batch_size)
    summary.rows += len(rows)
    summary.truncated += len({one.example for one in encoded if one.cut})
    summary.macs += float(outcome.macs.sum())
    summary.full_macs += predictor.full_macs(encoded, outcome)
    return predictor.finish(rows, encoded, outcome, options.window_pool)


def _row_error(predictor: Predictor, line: int, row: Row, source: str) -> OfframpError | None:
    try:
        predictor.prepare([row], source)
    except OfframpError as error:
        given = error.given.removeprefix("row 1: ").removeprefix("row 1, where ")
        return OfframpError(error.asked, f"line {line}: {given}", error.fix)
    return None


def _named_line(line: int, error: str) -> str:
    return error if f"line {line}" in error else f"line {line}: {error}"


def _one_line(error: OfframpError) -> str:
    return f"{error.given}; {error.fix}"


class _KeptColumns:
    """Columns of the input that are written beside its prediction, under their names in the file."""

    def __init__(self, keep: Sequence[str], source: str, answer: str) -> None:
        self.names, self.source, self.answer, self.checked = list(keep), source, answer, False

    def beside(self, answer: dict[str, Any], row: Row) -> dict[str, Any]:
        """Return the kept columns of a row followed by its answer or its error.

        A column called like the task's answer has its other name in every row: beside an error it would look like one.
        """
        if not self.names:
            return answer
        original = row.original if isinstance(row, RenamedRow) else row
        found = {**row, **original}  # a column may also be named as the task names it
        if self.names != [ALL] and not self.checked:
            self._check(found, original)
        names = list(original) if self.names == [ALL] else self.names
        taken = {*answer, self.answer}
        return {**{f"input_{n}" if n in taken else n: found.get(n) for n in names}, **answer}

    def _check(self, found: Row, original: Row) -> None:
        """Refuse a name that the first row does not have."""
        self.checked = True
        absent = [name for name in self.names if name not in found]
        if absent:
            given = f"{', '.join(absent)} in {self.source}, whose columns are {', '.join(original)}"
            raise OfframpError("columns to keep", given, f"name columns that it has, or {ALL}")


def _json_line(answer: Mapping[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """Return numpy scalars as numbers, and other values of the input (dates of Parquet) as texts."""
    return value.item() if hasattr(value, "item") else str(value)


def _output_ending(output: str | None) -> str:
    """Return the ending of an output, without .gz; one that promises another format than JSON lines is refused."""
    if output is None or output == STANDARD_OUTPUT:
        return ""
    ending = Path(Path(output).name.lower().removesuffix(ZIPPED)).suffix
    if ending not in ENDINGS:
        fix = "name it .jsonl, .json or .txt, each with .gz to compress it; --cluster writes parquet and csv"
        raise OfframpError("an output whose ending tells its format", f"{output}, but predictions are JSON lines", fix)
    return ending


@contextmanager
def _opened(output: str | None) -> Iterator[TextIO]:
    """Open the file for predictions, which takes its place only when all are written; or a stream."""
    if output is None or output == STANDARD_OUTPUT:
        yield sys.stdout
        return
    with atomic_replace(Path(output), keep_unfinished=True) as fresh, fresh.open("wb") as plain:
        if not output.lower().endswith(ZIPPED):
            with io.TextIOWrapper(plain, encoding="utf-8") as file:
                yield file
            return
        with (
            gzip.GzipFile("", "wb", fileobj=plain, mtime=0) as zipped,  # its header names no temporary file
            io.TextIOWrapper(zipped, encoding="utf-8") as file,
        ):
            try:
                yield file
            except BaseException:
                file.flush()
                if zipped.tell() == 0 and not is_stream(fresh):  # a header around nothing is not worth keeping
                    fresh.unlink()
                raise
