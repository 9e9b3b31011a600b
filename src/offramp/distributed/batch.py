"""Batch inference on Ray Data: files in, files with predictions out, each row once whatever is killed meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from offramp import __version__
from offramp.distributed.blocks import FORMATS, Block, find_files, format_of, input_schema, plan_blocks
from offramp.distributed.cluster import connected, library, replicas_that_fit
from offramp.distributed.manifest import (
    OutputFolder,
    check_same_job,
    job_identity,
    manifest_blocks,
    run_fingerprints,
)
from offramp.distributed.shards import FIRST_ADDED, ShardFormat, added_names
from offramp.distributed.worker import BlockWorker, DatasetWorker, Job
from offramp.errors import OfframpError
from offramp.inference.budget import Budget
from offramp.inference.predictor import Long, Predictor, check_batch_size, check_window_pool
from offramp.inference.run_folder import remembered_columns
from offramp.tasks import WindowPool
from offramp.utils.files import check_not_input
from offramp.utils.progress import report_progress

BLOCK_ROWS = 8192  # rows of an output file: large beside Ray's cost for a task, small beside what a kill may lose
Precision = Literal["fp32", "bf16", "int8"]
Inputs = str | Path | Sequence[str | Path]


@dataclass
class BatchSummary:
    """What a batch job did; `rows` and the costs include those of earlier runs of the same job."""

    rows: int = 0
    errors: int = 0  # rows without a prediction
    earlier_rows: int = 0  # answered before this run
    macs: float = 0.0
    full_macs: float = 0.0
    truncated: int = 0
    max_length: int = 0  # tokens that the model takes
    replicas: int = 0
    seconds: float = 0.0  # of this run, with starting actors and loading the model
    failed: list[str] = field(default_factory=list)  # blocks that could not be read or written

    @property
    def mac_share(self) -> float:
        """The share of the full model's MACs that was spent."""
        return self.macs / self.full_macs if self.full_macs else 0.0

    @property
    def rows_per_second(self) -> float:
        """Rows that this run answered in a second."""
        return (self.rows - self.earlier_rows) / self.seconds if self.seconds else 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count an output file."""
        self.rows += record["rows"]
        self.errors += record["errors"]
        self.macs += record["macs"]
        self.full_macs += record["full_macs"]
        self.truncated += record["truncated"]


def predict(
    input: Any,
    run: str | Path,
    output: str | Path | None = None,
    *,
    budget: float | Budget | None = None,
    max_loss: float | None = None,
    risk: float | None = None,
    latency: str | float | None = None,
    max_disagreement: float | None = None,
    replicas: int | None = None,
    threads: int = 1,
    address: str = "auto",
    batch_size: int = 32,
    engine: str = "auto",
    precision: Precision = "fp32",
    columns: Mapping[str, str] | None = None,
    long: Long = "truncate",
    window_pool: WindowPool = "mean",
    format: str | None = None,
    block_rows: int = BLOCK_ROWS,
) -> Any:
    """Add predictions to the rows of many files, or of a Ray data set, with a pool of actors.

    Columns `label`, `scores`, `exit_layer`, `tokens_kept`, `macs`, `truncated` (tokens that the row lost) and `error`
    are added (with the prefix `predicted_` where the input has such a column) and rows stay otherwise as they were. A
    row that cannot be answered gets an `error`. Started again after a kill, the same call continues, and the output
    holds every row once; with another model, points file, budget, input or way to read long rows it refuses to.

    Args:
        input: a file, a folder, a pattern such as `DIR/*.parquet`, or a list of them (parquet, jsonl, csv; local or on
            a file system that pyarrow knows). Or a `ray.data.Dataset`: then a lazy data set with the columns added
            is returned, and writing it is up to the caller.
        run: the run folder; the same one must exist on every node.
        output: the folder for the answers, one file a block of rows, in the order of the input.
        budget, max_loss, risk, latency, max_disagreement: as those of `Predictor.predict`.
        replicas: actors, each with its own copy of the model; as many as fit the cluster if left out.
        threads: processor threads of an actor.
        address: of the cluster: "auto", an address, or "local", which starts one node for this job.
        batch_size, engine, precision: as those of `offramp predict`.
        columns: our column name → the input's; where it is left out, the names that the run was trained with.
        long, window_pool: as those of `Predictor.predict`.
        format: of the output, "parquet", "jsonl" or "csv"; as the input if left out.
        block_rows: rows of an output file.
    """
    library()
    check_batch_size(batch_size)
    limit = Budget.parse(budget, max_loss=max_loss, risk=risk, latency=latency, max_disagreement=max_disagreement)
    is_files = isinstance(input, str | Path | Sequence)
    if is_files and not str(output or "").strip():
        raise OfframpError("a folder for the answers", "none", "name it: predict(input, run, output)")
    if not is_files and output is not None:
        fix = "write the data set that predict(dataset, run) returns, or give files, which can be resumed"
        raise OfframpError("answers of a Ray data set", f"output={output}", fix)
    predictor = Predictor.load(run, engine, precision, threads)  # so that what is wrong with it shows at once
    predictor.settings_for(limit)
    _check_windows(predictor, long, window_pool)
    place = (predictor.model.folder or Path(run)).absolute()
    job = Job(
        str(place),
        run_fingerprints(place),
        limit,
        predictor.engine_name,
        precision,
        threads,
        batch_size,
        dict(columns or {}),
        long,
        window_pool,
    )
    summary = BatchSummary(max_length=predictor.model.max_length)
    del predictor
    if not is_files:
        return _predict_dataset(input, job, replicas, block_rows)
    return _predict_files(input, job, str(output), summary, replicas, address, format, block_rows)


def _check_windows(predictor: Predictor, long: Long, window_pool: WindowPool) -> None:
    """Refuse what no actor could do with long rows, before any of them starts."""
    predictor.prepare([], long=long)
    check_window_pool(window_pool)


def _predict_dataset(dataset: Any, job: Job, replicas: int | None, block_rows: int) -> Any:
    """Return a lazy data set with the added columns."""
    ray = library()
    if not isinstance(dataset, ray.data.Dataset):
        raise OfframpError(
            "files or a ray.data.Dataset", type(dataset).__name__, "give a path, a pattern or a data set"
        )
    columns = dataset.schema().names
    job, names = _with_columns(job, columns), added_names(columns)
    return dataset.map_batches(
        DatasetWorker,
        fn_constructor_args=(job, names),
        batch_size=block_rows,
        batch_format="pyarrow",
        num_cpus=job.threads,
        compute=_pool(ray, replicas_that_fit(ray, replicas, job.threads, 1 << 30)),
    )


def _predict_files(
    input: Inputs,
    job: Job,
    output: str,
    summary: BatchSummary,
    replicas: int | None,
    address: str,
    format: str | None,
    block_rows: int,
) -> BatchSummary:
    """Answer the blocks of files that have no output file yet, and count them in the summary."""
    started = time.perf_counter()
    files = find_files(input)
    if "://" not in output:
        output = str(Path(output).absolute())
        check_not_input(output, job.run, *(file.path.removeprefix("file://") for file in files))
    kind = format or format_of(files[0].path)
    if kind not in FORMATS:
        raise OfframpError("an output format", repr(kind), f"choose one of {', '.join(FORMATS)}")
    folder = OutputFolder(output, kind)
    manifest = folder.read_manifest()
    if manifest is None:
        form = ShardFormat(kind, input_schema(files))
    else:  # all output files of a job have the same columns; earlier manifests name none, and the first file decided
        schema = input_schema(files if "added" in manifest else files[:1])
        form = ShardFormat(kind, schema, manifest.get("added", FIRST_ADDED))
    job = replace(_with_columns(job, form.schema.names), splits_words=format_of(files[0].path) == "csv")
    blocks = _agree(folder, manifest, job, files, block_rows)
    records = folder.records()
    for record in records.values():
        summary.add(record)
    summary.earlier_rows = summary.rows
    pending = [block for block in blocks if block.number not in records]
    if pending:
        with connected(address) as ray:
            summary.replicas = replicas_that_fit(ray, replicas, job.threads, len(pending))
            _run_blocks(ray, pending, (job, output, form), summary, sum(block.rows for block in blocks))
    summary.seconds = round(time.perf_counter() - started, 3)
    if not summary.failed:
        rate = {"mac_share": summary.mac_share, "rows_per_second": round(summary.rows_per_second, 1)}
        folder.write_summary({**asdict(summary), **rate})
    return summary


def _with_columns(job: Job, names: Sequence[str]) -> Job:
    """Return the job with the columns that it reads: those given, else those of training where the input has them."""
    for name, column in job.columns.items():
        if column not in names:
            fix = f"name one of them: --column {name}=NAME"
            raise OfframpError(f"the column {column!r}", f"columns {', '.join(names) or 'none'}", fix)
    remembered = remembered_columns(job.run).items()
    known = {name: column for name, column in remembered if column in names and name not in names}
    return replace(job, columns={**known, **job.columns})


def _agree(
    folder: OutputFolder, manifest: Mapping[str, Any] | None, job: Job, files: list[Any], block_rows: int
) -> list[Block]:
    """Return the blocks of the job that the output folder belongs to, which is begun if there is none."""
    identity = job_identity(
        Path(job.run),
        files,
        budget=str(job.budget),
        engine=job.engine,
        precision=job.precision,
        columns=dict(job.columns),
        windows=job.window_pool if job.long == "window" else None,  # earlier manifests lack it
        format=folder.kind,
        block_rows=block_rows,
        offramp=__version__,
    )
    if manifest is not None:
        check_same_job(manifest, identity, folder.place)
        return manifest_blocks(manifest, files)
    blocks = plan_blocks(files, block_rows)
    folder.write_manifest(identity, blocks)
    return blocks


def _run_blocks(
    ray: Any, pending: list[Block], worker: tuple[Job, str, ShardFormat], summary: BatchSummary, total: int
) -> None:
    """Answer blocks with a pool of actors and count their records as they come.

    Blocks with more work come first, so that actors end at about the same time.
    """
    pending = sorted(pending, key=lambda block: -block.work)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    items = ray.data.from_items([{"block": block.to_json()} for block in pending], override_num_blocks=len(pending))
    answered = items.map_batches(
        BlockWorker,
        fn_constructor_args=worker,
        batch_size=1,
        batch_format="numpy",
        num_cpus=worker[0].threads,
        compute=_pool(ray, summary.replicas),
    )
    for row in answered.iter_rows():
        record = json.loads(row["record"])
        if "refused" in record:
            raise OfframpError(*record["refused"])
        if "failed" in record:
            summary.failed.append(record["failed"])
            continue
        summary.add(record)
        report_progress(summary.rows, total)


def _pool(ray: Any, size: int) -> Any:
    """Return a pool of actors; two blocks at most wait at each, so that no actor is idle at the end."""
    return ray.data.ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=2)
