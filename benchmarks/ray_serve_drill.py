"""A drill of `offramp serve --cluster local --replicas 2`: a replica is killed again and again while requests come.

    python benchmarks/ray_serve_drill.py --run RUN --data FILE --out results/house/ray-serve-drill.json

Requests arrive as a Poisson process, whatever the server does, and a latency counts from the moment a request was due.
A random replica is killed with SIGKILL a few seconds after both are there. Every request must get an answer or an
orderly refusal (429); anything else is lost. Latencies are meaningful only on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

import offramp
from offramp.data.readers import read_rows
from offramp.evaluation.result_cells import hardware, model_name
from offramp.utils.files import write_json

GIVE_UP = 60.0  # seconds after which a request without an answer is lost


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def replicas_below(root: int) -> list[psutil.Process]:
    """Return the processes of replicas below a process."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            name = (process.cmdline() or [""])[0]
        except psutil.Error:
            continue
        if "ServeReplica" in name and ":server" in name:
            found.append(process)
    return found


class Load:
    """Requests at a rate, and what became of them."""

    def __init__(self, client: httpx.AsyncClient, texts: Sequence[str], options: argparse.Namespace) -> None:
        self.client, self.texts, self.rng = client, texts, random.Random(options.seed)
        self.rate, self.inputs = options.rate, options.inputs
        self.results: list[tuple[float, float, str]] = []  # when it was due, seconds, status or kind of error
        self.stopped = False

    async def run(self) -> None:
        """Send requests until stopped, then wait for the open ones."""
        due, open_requests = time.perf_counter(), set[asyncio.Task[None]]()
        while not self.stopped:
            due += self.rng.expovariate(self.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.ensure_future(self.one(due))
            open_requests.add(task)
            task.add_done_callback(open_requests.discard)
        await asyncio.gather(*open_requests)

    async def one(self, due: float) -> None:
        """Send one request."""
        try:
            texts = self.rng.choices(self.texts, k=self.inputs)
            answer = await self.client.post("/v1/predict", json={"inputs": texts})
            outcome = str(answer.status_code)
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        self.results.append((due, time.perf_counter() - due, outcome))


async def reported_replicas(client: httpx.AsyncClient) -> set[str]:
    """Return the names of the replicas that report to the board."""
    return set((await client.get("/v1/status")).json()["replicas"])


async def drill(address: str, root: int, options: argparse.Namespace) -> dict[str, Any]:
    """Kill replicas under load and return what happened."""
    texts = [row["text"] for row in read_rows(options.data, limit=2000)]
    limits = httpx.Limits(max_connections=500, max_keepalive_connections=500)
    kills: list[dict[str, Any]] = []
    async with httpx.AsyncClient(base_url=address, timeout=GIVE_UP, limits=limits) as client:
        load = Load(client, texts, options)
        sending = asyncio.ensure_future(load.run())
        await asyncio.sleep(options.quiet)
        for _ in range(options.kills):
            both = await reported_replicas(client)
            await asyncio.sleep(load.rng.uniform(0.5, 2.0))
            victim = load.rng.choice(replicas_below(root))
            at = time.perf_counter()
            victim.kill()
            while len(both | await reported_replicas(client)) == len(both):
                await asyncio.sleep(0.1)
                if time.perf_counter() - at > 120:
                    raise SystemExit("no replica replaces the killed one")
            kills.append({"at": at, "replaced_after_s": round(time.perf_counter() - at, 1)})
            await asyncio.sleep(6.0)  # the board forgets the dead one
        await asyncio.sleep(2.0)
        load.stopped = True
        await sending
        retried = (await client.get("/v1/status")).json()["retried"]
    return summary(load.results, kills, retried)


def summary(results: Sequence[tuple[float, float, str]], kills: list[dict[str, Any]], retried: int) -> dict[str, Any]:
    """Return counts and latencies in milliseconds, apart for the seconds after a kill."""
    near = [any(0 <= due - kill["at"] + 1.0 < 4.0 for kill in kills) for due, _, _ in results]
    answered = [(seconds, close) for (_, seconds, kind), close in zip(results, near, strict=True) if kind == "200"]
    far, after = ([1000 * s for s, close in answered if close is side] for side in (False, True))
    return {
        "requests": len(results),
        "outcomes": dict(Counter(kind for _, _, kind in results)),
        "accepted_and_lost": sum(kind not in ("200", "429") for _, _, kind in results),
        "repeated_by_the_gateway": retried,
        "undisturbed_ms": quantiles(far),
        "around_kills_ms": quantiles(after),
        "worst_ms": round(max((1000 * seconds for seconds, _ in answered), default=0.0), 1),
        "kills": [{"replaced_after_s": kill["replaced_after_s"]} for kill in kills],
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and largest value."""
    ordered = sorted(values) or [0.0]
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 2) for name, q in places.items()}


def start(options: argparse.Namespace, port: int, log: Any) -> subprocess.Popen[bytes]:
    """Start the server and return its process."""
    words = ["serve", options.run, "--cluster", "local", "--replicas", "2", "--port", str(port)]
    more = ["--engine", options.engine, "--slo", options.slo, "--threads", "1", "--log-level", "warning"]
    return subprocess.Popen([sys.executable, "-m", "offramp.cli", *words, *more], stderr=log)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the drill, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second")
    parser.add_argument("--inputs", type=int, default=16, help="texts of a request")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--quiet", type=float, default=10.0, help="seconds under load before the first kill")
    parser.add_argument("--slo", default="500ms")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", required=True)
    options = parser.parse_args(arguments)
    port, began = free_port(), time.monotonic()
    address = f"http://127.0.0.1:{port}"
    server = start(options, port, sys.stderr)
    try:
        while True:
            try:
                if httpx.get(address + "/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
            if server.poll() is not None:
                raise SystemExit("the server does not start")
        ready = time.monotonic() - began
        time.sleep(3.0)  # both replicas have reported
        result = asyncio.run(drill(address, server.pid, options))
        server.send_signal(signal.SIGTERM)
        ended = server.wait(60)
    finally:
        server.kill()
    content = {
        "what": "Two replicas of `offramp serve --cluster local` under load, of which one is killed again and again.",
        "model": model_name(options.run),
        "data": Path(options.data).parent.name,
        "rate": options.rate,
        "inputs": options.inputs,
        "slo": options.slo,
        "seed": options.seed,
        "seconds_until_ready": round(ready, 1),
        "exit_code_after_sigterm": ended,
        **result,
        "hardware": hardware(),
        "version": offramp.__version__,
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/ray_serve_drill.py --rate {options.rate} --inputs {options.inputs} "
        f"--kills {options.kills} --slo {options.slo} --engine {options.engine} --seed {options.seed}",
    }
    write_json(Path(options.out), content)
    print(json.dumps(content))


if __name__ == "__main__":
    main()
