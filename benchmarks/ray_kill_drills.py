"""Kill drills of batch inference on Ray: the driver, an actor or a node dies at a random moment.

    python benchmarks/ray_kill_drills.py --run RUN --data FILE --out results/agnews/bench/ray-kill-drills.json

Each drill answers the rows of the file (with ids) on a cluster of two nodes on this machine, kills something with
SIGKILL after a random time, starts the same job again if its driver died, and checks that every id is there exactly
once with the answer of an undisturbed run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import offramp
from offramp.data.readers import read_rows
from offramp.distributed.cluster import OBJECT_STORE, library
from offramp.distributed.manifest import FOLDER
from offramp.evaluation.result_cells import hardware, model_name
from offramp.utils.files import write_json

KINDS = ("driver", "actor", "node")
ANSWER = ("label", "scores", "exit_layer", "macs", "error")
DRIVER = """
import json, sys
from offramp import distributed
given = json.loads(sys.argv[1])
distributed.predict(given.pop("input"), given.pop("run"), given.pop("output"), **given)
"""


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Yield a cluster of two nodes with one processor each on this machine."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # otherwise Ray replaces the loopback address
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    library()
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def start(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the driver of a job."""
    return subprocess.Popen([sys.executable, "-c", DRIVER, json.dumps(job)])


def finished_blocks(output: str) -> int:
    """Return how many blocks of a job have a record."""
    done = Path(output) / FOLDER / "done"
    return len(list(done.iterdir())) if done.is_dir() else 0


def actors_of(root: int) -> list[psutil.Process]:
    """Return the processes of actors below a process."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            if process.cmdline()[:1] and "BlockWorker" in process.cmdline()[0]:
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill(kind: str, driver: subprocess.Popen[bytes], cluster: Any, rng: random.Random) -> bool:
    """Kill the driver, one actor or the second node; return whether there was something to kill."""
    if driver.poll() is not None:
        return False
    if kind == "driver":
        driver.send_signal(signal.SIGKILL)
    elif kind == "actor":
        actors = actors_of(os.getpid())
        if not actors:
            return False
        rng.choice(actors).kill()
    else:
        (node,) = cluster.worker_nodes
        cluster.remove_node(node, allow_graceful=False)
    return True


def answers(output: str) -> list[tuple[int, list[Any]]]:
    """Return the id and the answer of every row of the output, sorted by id."""
    rows = [json.loads(line) for path in sorted(Path(output).glob("part-*")) for line in path.open(encoding="utf-8")]
    return sorted((row["id"], [row[name] for name in ANSWER]) for row in rows)


def drill(kind: str, job: dict[str, Any], expected: Any, seconds: float, seed: int) -> dict[str, Any]:
    """Run one drill and return what happened; `seconds` is how long an undisturbed job answers blocks."""
    rng = random.Random(seed)
    with two_nodes() as cluster:
        job = {**job, "address": cluster.address}
        driver = start(job)
        while driver.poll() is None and finished_blocks(job["output"]) == 0:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.8 * seconds))
        at = finished_blocks(job["output"])
        killed = kill(kind, driver, cluster, rng)
        starts = 1
        while driver.wait() != 0 and starts < 5:
            driver, starts = start(job), starts + 1
    found = answers(job["output"])
    return {
        "killed": kind if killed else "",
        "blocks_before": at,
        "starts": starts,
        "rows": len(found),
        "each_id_once": [number for number, _ in found] == [number for number, _ in expected],
        "same_answers": found == expected,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all drills, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--limit", type=int, default=None, help="only the first rows of the file")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--drills", type=int, default=10, help="of each kind")
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--block-rows", type=int, default=64)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", required=True)
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "in.jsonl"
        rows = read_rows(options.data, limit=options.limit)
        lines = [json.dumps({"id": number, "text": row["text"]}) for number, row in enumerate(rows)]
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        job = {
            "input": str(source),
            "run": str(Path(options.run).absolute()),
            "budget": options.budget,
            "block_rows": options.block_rows,
            "engine": options.engine,
        }
        undisturbed = {**job, "output": f"{name}/undisturbed"}
        with two_nodes() as cluster:
            driver, first = start({**undisturbed, "address": cluster.address}), 0.0
            while driver.poll() is None:
                first = first or (time.monotonic() if finished_blocks(undisturbed["output"]) else 0.0)
                time.sleep(0.01)
            seconds = time.monotonic() - (first or time.monotonic())
        expected = answers(undisturbed["output"])
        for kind in options.kinds:
            for number in range(options.drills):
                output = f"{name}/{kind}-{number}"
                result = drill(kind, {**job, "output": output}, expected, seconds, options.seed + number)
                results.append(result)
                print(json.dumps(result), flush=True)
    write_json(
        Path(options.out),
        {
            "rows": len(rows),
            "model": model_name(options.run),
            "drills": results,
            "kept_the_law": sum(one["each_id_once"] and one["same_answers"] for one in results),
            "hardware": hardware(),
            "version": offramp.__version__,
            "date": datetime.date.today().isoformat(),
            "command": "python benchmarks/ray_kill_drills.py",
        },
    )


if __name__ == "__main__":
    main()
