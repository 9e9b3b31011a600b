"""An open-loop load generator for `offramp serve`: requests arrive as a Poisson process, whatever the server does.

    offramp serve runs/trec --port 8000 --slo 50ms &
    python benchmarks/load.py --data test.jsonl --rates 50,100,200,400 --seconds 20 --slo 50ms --json load.json

Each request is one text. Its latency counts from the moment it was due, so a server that falls behind cannot hide it.
Reported for every rate: goodput (answers within the SLO a second), percentiles of accepted requests, refusals and how
quickly they came, failures, the budgets that answers got, and their accuracy if the rows have labels. `--full` asks for
the full model, the baseline. Only servers on this machine are loaded, for at most ten minutes and two million requests.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from offramp import __version__
from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.inference.budget import parse_latency
from offramp.utils.command_line import command_line
from offramp.utils.files import write_json
from offramp.utils.hardware import hardware

PROGRAM = "python benchmarks/load.py"
LONGEST, MOST_REQUESTS, MOST_CONNECTIONS = 600.0, 2_000_000, 512
GIVE_UP = 10.0  # seconds after the last request; one without an answer then has failed
LATE = 20  # requests that a late client sends before it reads answers
FULL_LABEL = "full_label"  # column of a row with the full model's label
NOT_SENT = ("label", "tags", "answers", "tgt", FULL_LABEL)  # columns that a server must not see


@dataclass
class Tally:
    """What happened to the requests of one rate."""

    sent: int = 0
    latencies: list[float] = field(default_factory=list)  # of answers, seconds
    refusals: list[float] = field(default_factory=list)  # seconds until a 429 or 503
    statuses: Counter[int] = field(default_factory=Counter)
    failures: int = 0  # no answer at all
    skipped: int = 0  # no free connection: the client, not the server, is at its limit
    shares: list[float] = field(default_factory=list)  # compute that calibration promised for the budget given
    layers: list[float] = field(default_factory=list)
    correct: int = 0
    labelled: int = 0
    full_correct: int = 0  # what the full model has right among the same requests, where rows bring its label


class Connection(asyncio.Protocol):
    """A plain HTTP/1.1 connection that carries one request at a time."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.buffer = pool, b""
        self.transport: asyncio.Transport | None = None
        self.request: SentRequest | None = None

    def send(self, request: SentRequest) -> None:
        """Send a request."""
        assert self.transport is not None, "only open connections send"
        self.request = request
        self.transport.write(request.content)

    def data_received(self, data: bytes) -> None:
        """Take a part of an answer; a whole one frees the connection."""
        self.buffer += data
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found or self.transport is None:
            return
        lowered = head.lower()
        start = lowered.index(b"content-length:") + 15
        if len(rest) < int(lowered[start:].split(b"\r\n", 1)[0]):
            return
        request, self.request, self.buffer = self.request, None, b""
        if b"connection: close" in lowered:
            self.transport.close()
        else:
            self.pool.free.append(self)
        if request is not None:
            self.pool.answered(request, int(head[9:12]), rest)

    def connection_lost(self, error: Exception | None) -> None:
        """Count a request that was under way as failed."""
        self.pool.open.discard(self)
        if self in self.pool.free:
            self.pool.free.remove(self)
        if self.request is not None:
            self.pool.tally.failures += 1
            self.request = None


@dataclass(eq=False)
class SentRequest:
    """A request that is under way."""

    content: bytes
    row: Mapping[str, Any]
    due: float  # when it was to be sent


class Pool:
    """Connections to one address, and the tally of what they carried; without tasks, because they cost much."""

    def __init__(self, address: tuple[str, int], tally: Tally) -> None:
        self.address, self.tally = address, tally
        self.free: list[Connection] = []
        self.open: set[Connection] = set()
        self.opening: set[asyncio.Task[None]] = set()

    def send(self, request: SentRequest) -> None:
        """Send a request on a free connection or a new one; counts it as skipped if there are too many."""
        self.tally.sent += 1
        if self.free:
            self.free.pop().send(request)
        elif len(self.open) + len(self.opening) >= MOST_CONNECTIONS:
            self.tally.skipped += 1
        else:
            task = asyncio.ensure_future(self._open(request))
            self.opening.add(task)
            task.add_done_callback(self.opening.discard)

    async def _open(self, request: SentRequest) -> None:
        try:
            loop = asyncio.get_running_loop()
            transport, connection = await loop.create_connection(lambda: Connection(self), *self.address)
        except OSError:
            self.tally.failures += 1
            return
        connection.transport = cast("asyncio.Transport", transport)
        self.open.add(connection)
        connection.send(request)

    def answered(self, request: SentRequest, status: int, content: bytes) -> None:
        """Count an answer."""
        taken, tally, row = time.perf_counter() - request.due, self.tally, request.row
        tally.statuses[status] += 1
        if status in (429, 503):
            tally.refusals.append(taken)
        if status != 200:
            return
        tally.latencies.append(taken)
        (prediction,) = json.loads(content)["predictions"]
        tally.layers.append(float(prediction["exit_layer"]))
        if prediction["budget"]["mac_share"] is not None:
            tally.shares.append(prediction["budget"]["mac_share"])
        if "label" in row and "label" in prediction:
            tally.labelled += 1
            tally.correct += str(row["label"]) == str(prediction["label"])
            tally.full_correct += str(row["label"]) == str(row.get(FULL_LABEL))

    async def close(self) -> None:
        """Wait for the last answers, count those that do not come, and close all connections."""
        ends = time.perf_counter() + GIVE_UP
        while (self.opening or any(one.request for one in self.open)) and time.perf_counter() < ends:
            await asyncio.sleep(0.01)
        for task in self.opening:
            task.cancel()
        self.tally.failures += len(self.opening)
        for connection in list(self.open):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0.01)  # transports report what was lost


def run_load(*arguments: Any, **more: Any) -> Tally:
    """Run `send_load` in a loop of its own, on uvloop where it is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop
    loop = new_event_loop()
    try:
        return loop.run_until_complete(send_load(*arguments, **more))
    finally:
        loop.close()


async def send_load(
    address: tuple[str, int],
    rows: Sequence[Mapping[str, Any]],
    rate: float,
    seconds: float,
    fields: Mapping[str, Any],
    key: str | None = None,
    seed: int = 0,
) -> Tally:
    """Send requests at a mean rate for some seconds and wait for the last answers; rows in shuffled passes."""
    rng, tally = random.Random(seed), Tally()
    pool, columns = Pool(address, tally), [name for name in rows[0] if name not in NOT_SENT]
    head = f"POST /v1/predict HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    contents = []
    for row in rows:
        body = json.dumps({**fields, "inputs": [{name: row[name] for name in columns}]}).encode()
        contents.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    order: list[int] = []
    started = time.perf_counter()
    due = started
    while True:
        due += rng.expovariate(rate)
        if due - started > seconds or tally.sent >= MOST_REQUESTS:
            break
        wait = due - time.perf_counter()
        if wait > 0.0 or tally.sent % LATE == 0:  # answers must be read even if the client is late
            await asyncio.sleep(max(0.0, wait))
        if not order:
            order = rng.sample(range(len(rows)), len(rows))
        number = order.pop()
        pool.send(SentRequest(contents[number], rows[number], due))
    await pool.close()
    return tally


def summary(tally: Tally, rate: float, seconds: float, slo: float) -> dict[str, Any]:
    """Return the numbers of one rate."""
    good = sum(taken <= slo for taken in tally.latencies)
    shares = Counter(round(share, 3) for share in tally.shares)
    return {
        "offered_per_second": rate,
        "seconds": seconds,
        "sent": tally.sent,
        "answered": len(tally.latencies),
        "goodput_per_second": round(good / seconds, 2),
        "within_slo": round(good / max(1, len(tally.latencies)), 5),
        **{f"p{q}_ms": _percentile(tally.latencies, q) for q in (50, 95, 99)},
        "refused": len(tally.refusals),
        "refusal_p99_ms": _percentile(tally.refusals, 99),
        "failed": tally.failures + sum(n for status, n in tally.statuses.items() if status not in (200, 429, 503)),
        "not_sent": tally.skipped,
        "accuracy": round(tally.correct / tally.labelled, 4) if tally.labelled else None,
        "accuracy_of_full_depth": round(tally.full_correct / tally.labelled, 4) if tally.full_correct else None,
        "mean_budget": round(statistics.mean(tally.shares), 4) if tally.shares else None,
        "budgets": {str(share): count for share, count in sorted(shares.items())},
        "mean_exit_layer": round(statistics.mean(tally.layers), 3) if tally.layers else None,
    }


def _percentile(values: Sequence[float], q: int) -> float | None:
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 2) if ordered else None


def local_address(url: str) -> tuple[str, int]:
    """Return host and port of a server on this machine; refuses any other."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    host, port = parts.hostname or "", parts.port or 8000
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise OfframpError("a server to load", url, "only servers on this machine are loaded: http://127.0.0.1:8000")
    return host, port


def main(arguments: Sequence[str] | None = None) -> None:
    """Load a server at every rate, print a line for each, and write the numbers if wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a server on this machine")
    parser.add_argument("--data", required=True, help="rows to send, with labels if accuracy is wanted")
    parser.add_argument("--rates", default="50", help="requests a second, one after another: 50,100,200")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each rate")
    parser.add_argument("--slo", default="50ms", help="time within which an answer is good")
    parser.add_argument("--full", action="store_true", help="ask for the full model")
    parser.add_argument("--budget", type=float, help="ask for this share of the compute")
    parser.add_argument("--deadline-ms", type=float, help="give every request a deadline")
    parser.add_argument("--model", help="one of several models")
    parser.add_argument("--api-key", help="key of the server")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two rates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the numbers here")
    options = parser.parse_args(arguments)
    rates, slo = [float(rate) for rate in options.rates.split(",")], parse_latency(options.slo)
    if not 0.0 < options.seconds * len(rates) <= LONGEST or any(rate <= 0.0 for rate in rates):
        raise OfframpError("a load", f"{options.rates} for {options.seconds:g} s", f"stay within {LONGEST:g} s in all")
    budget = 1.0 if options.full else options.budget
    fields = {"budget": budget, "deadline_ms": options.deadline_ms, "model": options.model}
    fields = {name: value for name, value in fields.items() if value is not None}
    rows, address, found = read_rows(options.data), local_address(options.url), []
    for number, rate in enumerate(rates):
        if number:
            time.sleep(options.pause)
        seed = options.seed + number
        tally = run_load(address, rows, rate, options.seconds, fields, options.api_key, seed)
        found.append(summary(tally, rate, options.seconds, slo))
        print(json.dumps(found[-1]), flush=True)
    if options.json:
        about = {"command": command_line(PROGRAM), "hardware": hardware(), "version": __version__}
        write_json(Path(options.json), {"slo_ms": 1000 * slo, "fields": fields, "rates": found, **about})


if __name__ == "__main__":
    main()
