"""Compare the speed of two source trees in one run: prediction and training, rounds interleaved.

    python benchmarks/before_after.py --before OLD_TREE --after NEW_TREE --run RUN --data FILE --model MODEL \
        --out results/house/before-after.json

Each round starts a process on either tree in turn and uses public interfaces only: `offramp.load(RUN).predict` in
batches of 32 and one row at a time, and `offramp train` for one epoch. The medians of the rounds are compared. RUN must
be a folder that both trees open. Timings are meaningful only on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offramp.utils.files import write_json
from offramp.utils.hardware import hardware

PREDICT = """
import gzip, json, sys, time
import offramp
run, data, engine = sys.argv[1:4]
opened = gzip.open(data, "rt") if data.endswith(".gz") else open(data)
texts = [json.loads(line)["text"] for line in opened][:1000]
model, found = offramp.load(run, engine=engine), {}
for name, size, rows, budget in (("batches of 32", 32, texts, 0.5), ("one row", 1, texts[:150], 0.5),
                                 ("full depth", 32, texts, 1.0)):
    times = []
    for _ in range(4):
        began = time.perf_counter()
        model.predict(rows, budget=budget, batch_size=size)
        times.append(time.perf_counter() - began)
    found[name] = len(rows) / min(times[1:])
print(json.dumps(found))
"""


def environment(tree: str) -> dict[str, str]:
    """Return the environment of a process that imports Offramp from a tree."""
    return {**os.environ, "PYTHONPATH": str(Path(tree) / "src")}


def predict(tree: str, options: argparse.Namespace) -> dict[str, float]:
    """Return rows a second of one process."""
    command = [sys.executable, "-c", PREDICT, options.run, options.data, options.engine]
    output = subprocess.run(command, env=environment(tree), capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return found


def train(tree: str, options: argparse.Namespace) -> float:
    """Return the rows a second of one epoch of plain fine-tuning, start-up and calibration included."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "offramp.cli", "train", "--model", options.model, "--train", options.data]
        command += ["--out", f"{folder}/run", "--method", "full", "--epochs", "1", "--limit", str(options.rows)]
        began = time.perf_counter()
        subprocess.run(command, env=environment(tree), capture_output=True, check=True)
        return options.rows / (time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both trees in turn, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("before", "after", "run", "data", "model", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1500)
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
    for _ in range(options.rounds):
        for name in ("before", "after"):
            tree = getattr(options, name)
            for what, speed in {**predict(tree, options), "training": train(tree, options)}.items():
                found[name].setdefault(what, []).append(speed)
    medians = {name: {what: statistics.median(speeds) for what, speeds in own.items()} for name, own in found.items()}
    ratios = {what: medians["after"][what] / medians["before"][what] for what in medians["before"]}
    result: dict[str, Any] = {
        "what": "Speed of two source trees, interleaved in one run",
        "rows_per_second": medians,
        "after_over_before": ratios,
        "rounds": found,
        "engine": options.engine,
        "data": Path(options.data).name,
        "hardware": hardware(),
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/before_after.py",
    }
    write_json(Path(options.out), result)
    print(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
