"""Throughput of one Predictor that eight threads share, against one thread, on every engine.

    python benchmarks/shared_predictor.py --run RUN --data rows.jsonl --json results/house/shared-predictor.json

Each call predicts one text; every thread has its share of the texts and takes one after the other. Rounds alternate
between one thread and eight; the medians are compared, and the answers must be equal. Every engine is measured twice:
with one thread, so that callers' threads are the only parallelism, and with its default, all cores, for which callers'
threads compete. Timings are meaningful only on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from offramp import __version__
from offramp.data.readers import read_rows
from offramp.inference.operating_points import threads_in_words
from offramp.inference.predictor import Predictor
from offramp.utils.command_line import command_line
from offramp.utils.files import write_json
from offramp.utils.hardware import hardware

PROGRAM = "python benchmarks/shared_predictor.py"
AIM = 0.95  # of one thread's throughput


def timed(
    answer: Callable[[str], Any], texts: Sequence[str], pool: ThreadPoolExecutor, threads: int
) -> tuple[float, list[Any]]:
    """Return calls a second of all threads of a pool together, and the answers in the order of the texts."""
    answers: list[Any] = [None] * len(texts)
    began: list[float] = []
    ready = threading.Barrier(threads, action=lambda: began.append(time.perf_counter()))

    def work(first: int) -> None:
        ready.wait()
        for place in range(first, len(texts), threads):
            answers[place] = answer(texts[place])

    working = [pool.submit(work, first) for first in range(threads)]
    for one in working:
        one.result()
    return len(texts) / (time.perf_counter() - began[0]), answers


def measure(predictor: Predictor, texts: Sequence[str], budget: float, threads: int, rounds: int) -> dict[str, Any]:
    """Return the calls a second of one thread and of many, in alternating rounds."""

    def answer(text: str) -> Any:
        return predictor.predict([text], budget)[0]["label"]

    rates: dict[str, list[float]] = {"one": [], "many": []}
    equal = True
    with ThreadPoolExecutor(1) as single, ThreadPoolExecutor(threads) as pool:
        timed(answer, texts, single, 1)  # every thread prepares what it needs for every graph
        timed(answer, texts, pool, threads)
        for _ in range(rounds):
            alone, expected = timed(answer, texts, single, 1)
            shared, found = timed(answer, texts, pool, threads)
            rates["one"].append(alone)
            rates["many"].append(shared)
            equal = equal and found == expected
    one, many = (statistics.median(rates[name]) for name in ("one", "many"))
    return {
        "budget": budget,
        "calls_per_second": {"one": round(one, 1), "many": round(many, 1)},
        "ratio": round(many / one, 3),
        "met": many / one >= AIM,
        "answers_equal": equal,
        "rounds": {name: [round(rate, 1) for rate in found] for name, found in rates.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every engine, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="a run folder of a classifier")
    parser.add_argument("--data", required=True, help="rows with a column `text`")
    parser.add_argument("--engines", default="torch,openvino,native")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    cores = torch.get_num_threads()
    texts = [str(row["text"]) for row in read_rows(options.data, limit=options.calls)]
    found: dict[str, Any] = {}
    for engine, threads in itertools.product(options.engines.split(","), (1, None)):
        torch.set_num_threads(threads or cores)
        predictor, name = Predictor.load(options.run, engine, threads=threads), threads_in_words(threads)
        measured = [measure(predictor, texts, budget, options.threads, options.rounds) for budget in (1.0, 0.5)]
        found.setdefault(engine, {})[name] = measured
        for one in measured:
            rates = f"{one['calls_per_second']['one']} alone, {one['calls_per_second']['many']} shared"
            sys.stdout.write(f"{engine}, {name}, budget {one['budget']}: {rates}, {one['ratio']}\n")
            sys.stdout.flush()
    if options.json:
        about = {"run": Path(options.run).name, "data": Path(options.data).name, "calls": len(texts), "aim": AIM}
        end = {"hardware": hardware(), "version": __version__, "date": datetime.date.today().isoformat()}
        what = "Calls a second of one Predictor shared by eight threads, against one thread."
        write_json(options.json, {"what": what, **about, "threads": options.threads, "engines": found, **end,
                                  "command": command_line(PROGRAM)})  # fmt: skip


if __name__ == "__main__":
    main()
