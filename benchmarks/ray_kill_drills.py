"""Kill drills of batch inference on Ray: the driver, an actor or a node dies at a random moment.

    python benchmarks/ray_kill_drills.py --run RUN --data FILE --work DIR --out results/house/ray-kill-drills.json

Each drill answers the rows of the file (with ids) on a cluster of two nodes on this machine, kills something with
SIGKILL after a random time, starts the same job again if its driver died, and checks that every id is there exactly
once with the answer of an undisturbed run. Drills that are in the output file are not run again, and none is started
after `--seconds`: the same command goes on until all are there.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
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
    add_node(cluster)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any) -> None:
    """Add a second node if the cluster has none."""
    if not cluster.worker_nodes:
        cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE)


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


def drill(kind: str, job: dict[str, Any], cluster: Any, expected: Any, seconds: float, seed: int) -> dict[str, Any]:
    """Run one drill and return what happened; `seconds` is how long an undisturbed job answers blocks."""
    rng, began = random.Random(seed), time.monotonic()
    add_node(cluster)
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
        "seed": seed,
        "blocks_before": at,
        "starts": starts,
        "rows": len(found),
        "each_id_once": [number for number, _ in found] == [number for number, _ in expected],
        "same_answers": found == expected,
        "seconds": round(time.monotonic() - began, 1),
    }


def undisturbed(job: dict[str, Any]) -> tuple[Any, float]:
    """Return the answers of a job without kills, and how many seconds it answers blocks; run once, then remembered."""
    note = Path(f"{job['output']}.json")
    if not note.exists():
        shutil.rmtree(job["output"], ignore_errors=True)
        driver, first = start(job), 0.0
        while driver.poll() is None:
            first = first or (time.monotonic() if finished_blocks(job["output"]) else 0.0)
            time.sleep(0.01)
        if driver.returncode:
            raise SystemExit("the undisturbed job failed")
        write_json(note, {"seconds": time.monotonic() - first})
    return answers(job["output"]), float(json.loads(note.read_text())["seconds"])


def write_source(path: Path, data: str, rows: int) -> None:
    """Write the texts of a file with ids, repeated until there are `rows`; a file that is there is kept."""
    if not path.exists():
        texts = itertools.cycle([row["text"] for row in read_rows(data)])
        lines = [json.dumps({"id": number, "text": next(texts)}) for number in range(rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the drills that are missing, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=6000, help="the rows of the file are repeated up to this number")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--drills", type=int, default=10, help="of each kind")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no drill after this time")
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--block-rows", type=int, default=64)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--work", required=True, help="folder for inputs and answers")
    parser.add_argument("--out", required=True)
    options = parser.parse_args(arguments)
    began, work, out = time.monotonic(), Path(options.work).absolute(), Path(options.out)
    work.mkdir(parents=True, exist_ok=True)
    source = work / "in.jsonl"
    write_source(source, options.data, options.rows)
    drills: dict[str, Any] = json.loads(out.read_text())["drills"] if out.exists() else {}
    wanted = [(number, kind) for number in range(options.drills) for kind in options.kinds]
    missing = [(number, kind) for number, kind in wanted if f"{kind}-{number}" not in drills]
    if not missing:
        return
    with two_nodes() as cluster:
        job = {
            "input": str(source),
            "run": str(Path(options.run).absolute()),
            "budget": options.budget,
            "block_rows": options.block_rows,
            "engine": options.engine,
            "address": cluster.address,
        }
        expected, seconds = undisturbed({**job, "output": str(work / "undisturbed")})
        for number, kind in missing:
            if time.monotonic() - began > options.seconds:
                break
            output, seed = work / f"{kind}-{number}", options.seed + number + 100 * KINDS.index(kind)
            shutil.rmtree(output, ignore_errors=True)
            result = drill(kind, {**job, "output": str(output)}, cluster, expected, seconds, seed)
            if not result["killed"]:
                print("nothing was killed: again", json.dumps(result), flush=True)
                continue
            drills[f"{kind}-{number}"] = result
            print(json.dumps(result), flush=True)
            shutil.rmtree(output, ignore_errors=True)
            write_json(out, report(drills, options))


def report(drills: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the content of the result file."""
    kept = [one for one in drills.values() if one["each_id_once"] and one["same_answers"]]
    return {
        "what": "Batch jobs on a two-node Ray cluster whose driver, actor or node is killed at a random moment: "
        "every id once, with the answers of an undisturbed run?",
        "rows": options.rows,
        "block_rows": options.block_rows,
        "budget": options.budget,
        "model": model_name(options.run),
        "data": Path(options.data).parent.name,
        "seed": options.seed,
        "kept_the_law": {kind: sum(one["killed"] == kind for one in kept) for kind in KINDS},
        "of": {kind: sum(one["killed"] == kind for one in drills.values()) for kind in KINDS},
        "drills": drills,
        "hardware": hardware(),
        "version": offramp.__version__,
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/ray_kill_drills.py --rows {options.rows} --block-rows {options.block_rows} "
        f"--budget {options.budget} --engine {options.engine} --seed {options.seed}",
    }


if __name__ == "__main__":
    main()
