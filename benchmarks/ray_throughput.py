"""Rows a second of batch inference on one Ray node, beside plain `offramp predict` and plain transformers on Ray.

    python benchmarks/ray_throughput.py --run RUN --data FILE --out results/agnews/bench/ray-throughput.json

The rows of the file are repeated with ids until there are `--rows` of them. Everything is single-threaded: plain
`offramp predict` in this process, then one and two actors. `rows_per_second` is that of the whole call, `steady` that
from the first finished block to the last, without starting actors and loading models: Ray's own cost is the difference
of `steady` to the plain command. Timings are meaningful only on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
from offramp.evaluation.result_cells import hardware, model_name
from offramp.inference.run_folder import read_description
from offramp.utils.files import write_json
from offramp.utils.progress import progress_listener


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


def measure_transformers(ray: Any, run: str, source: Path, output: Path, options: argparse.Namespace, size: int) -> Any:
    """Return the rates of plain transformers in a pool of `size` actors."""
    output.mkdir()
    blocks = [{"block": block.to_json()} for block in plan_blocks(find_files(source), options.block_rows)]
    rate, done = Rate(), 0
    answered = ray.data.from_items(blocks, override_num_blocks=len(blocks)).map_batches(
        TransformersWorker,
        fn_constructor_args=(run, str(output), options.batch_size, read_description(run)["max_length"]),
        batch_size=1,
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=2),
    )
    for row in answered.iter_rows():
        done += row["rows"]
        rate.mark(done, options.rows)
    return rate.result(options.rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--block-rows", type=int, default=8192)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--out", required=True)
    options = parser.parse_args(arguments)
    run = str(Path(options.run).absolute())
    texts = itertools.cycle([row["text"] for row in read_rows(options.data)])
    table: list[dict[str, Any]] = []

    def add(system: str, budget: float, actors: int, rates: dict[str, float]) -> None:
        table.append({"system": system, "budget": budget, "actors": actors, **rates})
        print(json.dumps(table[-1]), flush=True)

    with tempfile.TemporaryDirectory() as name, connected("local", cpus=max(options.actors)) as ray:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        folder = Path(name)
        source = folder / "in.jsonl"
        with source.open("w", encoding="utf-8") as file:
            for number in range(options.rows):
                file.write(json.dumps({"id": number, "text": next(texts)}) + "\n")
        shared: dict[str, Any] = {"threads": 1, "batch_size": options.batch_size, "engine": options.engine}
        for budget in options.budgets:
            target = folder / f"plain-{budget}.jsonl"
            plain = measure(lambda b=budget, t=target: predict(run, source, t, budget=b, **shared), options.rows)
            add("offramp predict", budget, 0, plain)
            for actors in options.actors:
                out, more = folder / f"ray-{budget}-{actors}", {"block_rows": options.block_rows, "replicas": actors}
                work = partial(distributed.predict, source, run, out, budget=budget, **shared, **more)
                add("offramp predict --cluster", budget, actors, measure(work, options.rows))
        for actors in options.actors:
            rates = measure_transformers(ray, run, source, folder / f"hf-{actors}", options, actors)
            add("transformers on Ray", 1.0, actors, rates)
        version = ray.__version__
    write_json(
        Path(options.out),
        {
            "rows": options.rows,
            "model": model_name(run),
            "table": table,
            "ray": version,
            "hardware": hardware(),
            "version": offramp.__version__,
            "date": datetime.date.today().isoformat(),
            "command": "python benchmarks/ray_throughput.py",
        },
    )


if __name__ == "__main__":
    main()
