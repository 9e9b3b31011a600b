"""What an actor does: load a run once, then answer block after block."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from offramp import __version__
from offramp.data.readers import WORD_COLUMNS
from offramp.distributed.blocks import Block, BlockReader, BlockRows
from offramp.distributed.manifest import OutputFolder, check_node
from offramp.distributed.packing import PredictedShare
from offramp.distributed.shards import ShardFormat, added_types, added_values, error_values
from offramp.errors import OfframpError
from offramp.inference.batching import full_macs
from offramp.inference.budget import Budget
from offramp.inference.predictor import Long, Predictor
from offramp.tasks import WindowPool


@dataclass(frozen=True)
class Job:
    """What every actor must know: the run and how to execute it."""

    run: str
    fingerprints: Mapping[str, str]  # of the run, as the driver found it
    budget: Budget
    engine: str
    precision: Literal["fp32", "bf16", "int8"] = "fp32"
    threads: int = 1
    batch_size: int = 32
    columns: Mapping[str, str] = field(default_factory=dict)  # our name → the input's
    long: Long = "truncate"  # what happens to rows that are longer than the model
    window_pool: WindowPool = "mean"  # how windows of a long row are joined
    splits_words: bool = False  # CSV has no lists: words are separated by spaces
    version: str = __version__  # of Offramp, at the driver


@dataclass
class Answers:
    """The added values of rows, in order, and what they cost."""

    values: list[dict[str, Any]]
    macs: float = 0.0
    full_macs: float = 0.0
    truncated: int = 0

    @property
    def errors(self) -> int:
        """The number of rows without a prediction."""
        return sum(bool(values["error"]) for values in self.values)


class RowWorker:
    """A loaded run that answers rows; a row that cannot be answered gets an error, and the others their predictions."""

    def __init__(self, job: Job) -> None:
        self.job = job
        check_node(job.version, job.run, job.fingerprints)
        self.predictor = Predictor.load(job.run, job.engine, job.precision, job.threads)
        self.settings = self.predictor.settings_for(job.budget)
        self.share = PredictedShare()

    def answer(self, rows: Sequence[Mapping[str, Any]], errors: Sequence[str]) -> Answers:
        """Return predictions for all rows without an error; rows are packed by length and predicted work."""
        answers = Answers([error_values(error) for error in errors])
        readable = [number for number, error in enumerate(errors) if not error]
        named = [self._named(rows[number]) for number in readable]
        start = 0
        for chunk in self.predictor.chunks(named, self.job.batch_size):
            numbers = readable[start : start + len(chunk)]
            start += len(chunk)
            self._answer_chunk(numbers, chunk, answers)
        return answers

    def _answer_chunk(self, numbers: Sequence[int], rows: Sequence[Mapping[str, Any]], answers: Answers) -> None:
        try:
            encoded = self.predictor.prepare(rows, long=self.job.long)
        except Exception:  # some row is at fault: find out which, and answer the others
            kept = []
            for number, row in zip(numbers, rows, strict=True):
                error = self._row_error(row)
                if error:
                    answers.values[number] = error_values(error)
                else:
                    kept.append((number, row))
            if not kept:
                return
            numbers, rows = [number for number, _ in kept], [row for _, row in kept]
            encoded = self.predictor.prepare(rows, long=self.job.long)
        output = self.predictor.run(encoded, self.settings, self.job.batch_size, self.share)
        predictions = self.predictor.finish(rows, encoded, output, self.job.window_pool)
        for number, prediction in zip(numbers, predictions, strict=True):
            answers.values[number] = added_values(prediction, self.predictor.task.answer)
        full = full_macs(self.predictor.network, encoded, output)
        self.share.observe(encoded, output.macs, full)
        answers.macs += float(output.macs.sum())
        answers.full_macs += float(full.sum())
        answers.truncated += len({one.example for one in encoded if one.cut})

    def _row_error(self, row: Mapping[str, Any]) -> str:
        """Return why a row alone cannot be answered, "" if it can."""
        try:
            self.predictor.prepare([row], long=self.job.long)
        except OfframpError as error:
            return error.given.removeprefix("row 1: ").removeprefix("row 1, where ")
        except Exception as error:  # a value that no check foresees must not end the job
            return f"{type(error).__name__}: {error}"
        return ""

    def _named(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row under the column names of the task."""
        named = {**row, **{name: row.get(column) for name, column in self.job.columns.items()}}
        if self.job.splits_words:
            named.update({name: str(named[name] or "").split() for name in WORD_COLUMNS if name in named})
        return named


class BlockWorker:
    """The actor of a batch job: reads a block, answers it, and writes its output file.

    Rows never travel through Ray's object store. An error on loading is returned with the first block, because Ray
    would start a failing actor again and again.
    """

    def __init__(self, job: Job, output: str, form: ShardFormat) -> None:
        self.form, self.folder = form, OutputFolder(output, form.kind)
        self.reader = BlockReader()
        self.worker: RowWorker | None = None
        self.refusal: OfframpError | None = None
        try:
            self.worker = RowWorker(job)
        except OfframpError as error:
            self.refusal = error

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"record": [json.dumps(self.process(Block(**json.loads(text)))) for text in batch["block"].tolist()]}

    def process(self, block: Block) -> dict[str, Any]:
        """Answer a block and return its record, or what went wrong with it."""
        if self.worker is None or self.refusal is not None:
            refusal = self.refusal or OfframpError("a loaded run", "none", "look at Ray's logs")
            return {"refused": [refusal.asked, refusal.given, refusal.fix]}
        started = time.perf_counter()
        try:
            rows = self.reader.read(block)
            answers = self.worker.answer(rows.rows, self.form.refusals(rows))
            record = {
                "rows": len(rows.rows),
                "errors": answers.errors,
                "macs": answers.macs,
                "full_macs": answers.full_macs,
                "truncated": answers.truncated,
                "seconds": round(time.perf_counter() - started, 3),
            }
            self.folder.write_shard(block.number, self.form.encode(rows, answers.values), record)
        except Exception as error:  # one unreadable block must not end the job: it is reported, and tried again later
            return {"number": block.number, "failed": f"{block.path}: {type(error).__name__}: {error}"}
        return {"number": block.number, **record}


class DatasetWorker:
    """The actor for a Ray data set: adds the columns of the predictions to pyarrow tables."""

    def __init__(self, job: Job, names: Mapping[str, str]) -> None:
        self.worker, self.names = RowWorker(job), names

    def __call__(self, table: Any) -> Any:
        import pyarrow as pa

        rows = BlockRows(table.to_pylist(), [""] * table.num_rows, table)
        values = self.worker.answer(rows.rows, rows.errors).values
        for name, kind in added_types().items():
            column = pa.array([row[name] for row in values], type=kind)
            table = table.append_column(pa.field(self.names[name], kind), column)
        return table
