"""Rows a second of batch inference on one Ray node, beside plain `offramp predict` and plain transformers on Ray.

    python benchmarks/ray_throughput.py --run RUN --data FILE --out results/agnews/bench/ray-throughput.json

The rows of the file are repeated with ids until there are as many as a cell has. Everything is single-threaded: plain
`offramp predict` in this process, then one and two actors. `rows_per_second` is that of the whole call, `steady` that
from the first finished block to the last, without starting actors and loading models; it flatters Offramp's actors a
little, because the block with most text comes first. `in_actors` are the seconds that actors spent on blocks: with one
actor the rest is Ray's. Timings are meaningful only on an idle machine.

Cells that are in the output file are not measured again, and none is started after `--seconds`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import offramp
from offramp import distributed
from offramp.commands.predict import predict
from offramp.data.readers import read_rows
from offramp.distributed.blocks import Block, BlockReader, find_files, plan_blocks
from offramp.distributed.cluster import connected
from offramp.distributed.manifest import OutputFolder
from offramp.evaluation.result_cells import hardware, model_name
from offramp.inference.run_folder import read_description
from offramp.utils.files import write_json
from offramp.utils.progress import progress_listener

PLAIN, ACTORS, TRANSFORMERS = "offramp predict", "offramp predict --cluster", "transformers on Ray"


class TransformersWorker:
    """An actor that answers blocks with plain transformers: padded batches of rows sorted by length."""

    def __init__(self, run: str, output: str, batch_size: int, max_length: int) -> None:
        torch.set_num_threads(1)
        self.output, self.batch_size, self.max_length = Path(output), batch_size, max_length
        self.model = transformers.AutoModelForSequenceClassification.from_pretrained(run).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(run)
        self.reader = BlockReader()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        blocks = [Block(**json.loads(text)) for text in batch["block"].tolist()]
        return {"rows": [self.answer(block) for block in blocks]}

    def answer(self, block: Block) -> int:
        """Answer a block, write its rows with their labels, and return their number."""
        rows = self.reader.read(block).rows
        encoded = self.tokenizer([row["text"] for row in rows], truncation=True, max_length=self.max_length)
        order = sorted(range(len(rows)), key=lambda i: len(encoded["input_ids"][i]))
        for start in range(0, len(order), self.batch_size):
            index = order[start : start + self.batch_size]
            padded = self.tokenizer.pad(
                {key: [values[i] for i in index] for key, values in encoded.items()}, return_tensors="pt"
            )
            with torch.inference_mode():
                scores = self.model(**padded).logits.softmax(-1)
            for i, best, row_scores in zip(index, scores.argmax(-1).tolist(), scores.tolist(), strict=True):
                rows[i] = {**rows[i], "predicted_label": self.model.config.id2label[best], "scores": row_scores}
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (self.output / f"part-{block.number:06d}.jsonl").write_text(lines, encoding="utf-8")
        return len(rows)


class Rate:
    """Rows a second of a job: of the whole call, and from its first finished rows to the last."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.marks: list[tuple[float, int]] = []
        self.earlier = self.done = 0  # rows of earlier passes, rows of this one

    def mark(self, done: int, total: int) -> None:
        """Note that so many rows are finished; a smaller number than before begins another chunk of rows."""
        self.earlier += self.done if done < self.done else 0
        self.done = done
        self.marks.append((time.perf_counter(), self.earlier + done))

    def result(self, rows: int) -> dict[str, float]:
        """Return both rates and the seconds."""
        seconds = time.perf_counter() - self.started
        (first, before), (last, after) = self.marks[0], self.marks[-1]
        steady = (after - before) / (last - first) if last > first else 0.0
        return {
            "seconds": round(seconds, 2),
            "rows_per_second": round(rows / seconds, 1),
            "steady": round(steady, 1),
        }


def measure(work: Callable[[], Any], rows: int) -> dict[str, float]:
    """Return the rates of work that reports its progress."""
    rate = Rate()
    with progress_listener(rate.mark):
        work()
    return rate.result(rows)


class Bench:
    """The cells of the table, each measured on rows of one source file."""

    def __init__(self, ray: Any, run: str, data: str, folder: Path, options: argparse.Namespace) -> None:
        self.ray, self.run, self.folder, self.options = ray, run, folder, options
        self.texts = [row["text"] for row in read_rows(data)]
        self.shared: dict[str, Any] = {"threads": 1, "batch_size": options.batch_size, "engine": options.engine}

    def source(self, rows: int) -> Path:
        """Return a file with so many rows with ids."""
        path = self.folder / f"in-{rows}.jsonl"
        if not path.exists():
            with path.open("w", encoding="utf-8") as file:
                for number, text in zip(range(rows), itertools.cycle(self.texts), strict=False):
                    file.write(json.dumps({"id": number, "text": text}) + "\n")
        return path

    def plain(self, cell: Cell) -> dict[str, float]:
        """Return the rates of `offramp predict` in this process."""
        source, target = self.source(cell.rows), self.folder / f"{cell.key}.jsonl"
        return measure(lambda: predict(self.run, source, target, budget=cell.budget, **self.shared), cell.rows)

    def actors(self, cell: Cell) -> dict[str, float]:
        """Return the rates of `offramp predict --cluster`, and the seconds that actors spent on blocks."""
        out, more = self.folder / cell.key, {"block_rows": cell.block_rows, "replicas": cell.actors}
        source = self.source(cell.rows)
        work = partial(distributed.predict, source, self.run, out, budget=cell.budget, **self.shared, **more)
        rates = measure(work, cell.rows)
        records = OutputFolder(out, "jsonl").records().values()
        return {**rates, "blocks": len(records), "in_actors": round(sum(one["seconds"] for one in records), 2)}

    def transformers(self, cell: Cell) -> dict[str, float]:
        """Return the rates of plain transformers in a pool of actors."""
        output = self.folder / cell.key
        output.mkdir()
        blocks = [{"block": one.to_json()} for one in plan_blocks(find_files(self.source(cell.rows)), cell.block_rows)]
        rate, done = Rate(), 0
        longest = read_description(self.run)["max_length"]
        answered = self.ray.data.from_items(blocks, override_num_blocks=len(blocks)).map_batches(
            TransformersWorker,
            fn_constructor_args=(self.run, str(output), self.options.batch_size, longest),
            batch_size=1,
            num_cpus=1,
            compute=self.ray.data.ActorPoolStrategy(size=cell.actors, max_tasks_in_flight_per_actor=2),
        )
        for row in answered.iter_rows():
            done += row["rows"]
            rate.mark(done, cell.rows)
        return rate.result(cell.rows)

    def measure(self, cell: Cell) -> dict[str, float]:
        """Return the rates of a cell."""
        work = {PLAIN: self.plain, ACTORS: self.actors, TRANSFORMERS: self.transformers}[cell.system]
        return work(cell)


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    system: str
    budget: float | None  # None: the default setting of the run, which is adaptive
    actors: int
    rows: int
    block_rows: int = 8192

    @property
    def key(self) -> str:
        """The name of the cell in the table."""
        setting = "adaptive" if self.budget is None else "full" if self.budget == 1.0 else f"{self.budget:g}"
        blocks = "" if self.block_rows == 8192 else f" blocks of {self.block_rows}"
        return f"{self.system} {setting} {self.actors} actors{blocks}"


def cells(options: argparse.Namespace) -> list[Cell]:
    """Return all cells in the order in which they are measured."""
    small = options.small_rows
    return [
        *(Cell(PLAIN if n == 0 else ACTORS, None, n, options.rows) for n in (0, 1, 2)),
        *(Cell(PLAIN if n == 0 else ACTORS, 1.0, n, options.full_rows, small) for n in (0, 1, 2)),
        Cell(ACTORS, None, 1, options.full_rows, 256),
        *(Cell(TRANSFORMERS, 1.0, n, options.peer_rows, 256) for n in (1, 2)),
    ]


def ratios(table: dict[str, dict[str, Any]], cells: Sequence[Cell]) -> dict[str, float]:
    """Return what the aims are about: overhead of one actor beside the plain command, and two actors beside one."""
    found: dict[str, float] = {}
    by: dict[tuple[str, float | None, int], dict[str, Any]] = {}
    for cell in cells:
        if cell.key in table:  # the first one: that with large blocks
            by.setdefault((cell.system, cell.budget, cell.actors), table[cell.key])
    for name, budget in (("adaptive", None), ("full", 1.0)):
        for kind in ("rows_per_second", "steady"):
            plain, one, two = (by.get((PLAIN if n == 0 else ACTORS, budget, n)) for n in (0, 1, 2))
            if plain and one and plain[kind]:
                found[f"overhead_{name}_{kind}"] = round(1.0 - one[kind] / plain[kind], 4)
            if one and two and one[kind]:
                found[f"scaling_{name}_{kind}"] = round(two[kind] / one[kind], 4)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cells that are missing, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=200_000, help="at the adaptive setting")
    parser.add_argument("--full-rows", type=int, default=40_000, help="at full depth")
    parser.add_argument("--peer-rows", type=int, default=10_000, help="of plain transformers")
    parser.add_argument("--small-rows", type=int, default=2048, help="rows of a block where there are fewer rows")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after this time")
    parser.add_argument("--out", required=True)
    options = parser.parse_args(arguments)
    run, out, began = str(Path(options.run).absolute()), Path(options.out), time.monotonic()
    table: dict[str, dict[str, Any]] = json.loads(out.read_text())["table"] if out.exists() else {}
    wanted = cells(options)
    with tempfile.TemporaryDirectory() as name, connected("local", cpus=2) as ray:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        bench = Bench(ray, run, options.data, Path(name), options)
        for cell in wanted:
            if cell.key in table or time.monotonic() - began > options.seconds:
                continue
            table[cell.key] = {**asdict(cell), **bench.measure(cell)}
            print(json.dumps(table[cell.key]), flush=True)
            write_json(out, report(table, wanted, options, ray.__version__))
            shutil.rmtree(bench.folder / cell.key, ignore_errors=True)


def report(
    table: dict[str, dict[str, Any]], wanted: Sequence[Cell], options: argparse.Namespace, version: str
) -> dict[str, Any]:
    """Return the content of the result file."""
    return {
        "what": "Rows a second on one machine: plain `offramp predict`, the same on Ray with one and two "
        "single-threaded actors, and plain transformers on Ray. Budget null is the run's default, adaptive setting.",
        "model": model_name(options.run),
        "data": Path(options.data).parent.name,
        "table": table,
        "ratios": ratios(table, wanted),
        "ray": version,
        "engine": options.engine,
        "batch_size": options.batch_size,
        "seed": None,
        "hardware": hardware(),
        "version": offramp.__version__,
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/ray_throughput.py --rows {options.rows} --full-rows {options.full_rows} "
        f"--peer-rows {options.peer_rows} --engine {options.engine}",
    }


if __name__ == "__main__":
    main()
