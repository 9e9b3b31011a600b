"""A replica of the server on a cluster: the application of `offramp serve`, called without a socket."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastapi import FastAPI

from offramp import __version__
from offramp.distributed.manifest import check_node
from offramp.distributed.scaling import LOAD
from offramp.errors import OfframpError
from offramp.serving.app import ELAPSED, Server
from offramp.serving.running import SWITCH
from offramp.serving.service import Service

SAMPLE_EVERY = 0.1  # seconds between two samples of the load
POST_EVERY = 1.0  # seconds between two reports to the board
MEMORY = 20  # samples that the mean load looks back over, about
FORGET = 5.0  # seconds after which a replica that does not report is gone


class ForwardedRequest(NamedTuple):
    """A request on its way from the gateway to a replica."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    elapsed: float = 0.0  # seconds since it arrived at the gateway


class Reply(NamedTuple):
    """The answer of a replica."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(frozen=True)
class ReplicaSetup:
    """What every replica must know."""

    build: Callable[[], FastAPI]  # returns the application of the local server
    runs: Mapping[str, Mapping[str, str]]  # folder → fingerprints, as the driver found them
    version: str = field(default=__version__)  # of Offramp, at the driver


class Replica:
    """The deployment: loads the runs once, answers forwarded requests, and reports its predicted work."""

    async def __init__(self, setup: ReplicaSetup, board: Any = None) -> None:  # type: ignore[misc]  # Ray awaits it
        for run, fingerprints in setup.runs.items():
            check_node(setup.version, run, fingerprints)
        self.app, self.board, self.load = setup.build(), board, 0.0
        self.server: Server = self.app.state.server
        sys.setswitchinterval(SWITCH)
        self.lifespan = self.app.router.lifespan_context(self.app)
        await self.lifespan.__aenter__()
        while not self.server.ready:
            await asyncio.sleep(0.02)
        gc.collect()
        gc.freeze()  # a pass over all objects of the libraries would take a quarter of a second
        self.reports = asyncio.ensure_future(self._report())

    async def handle(self, request: ForwardedRequest) -> Reply:
        """Answer a request; if it is cancelled, the application drops its inputs as if the client had gone."""
        gone = asyncio.Event()
        answer = asyncio.ensure_future(call_application(self.app, request, gone))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            gone.set()
            raise

    def check_health(self) -> None:
        """Raise an error if a thread that computes batches has ended; Ray then replaces this replica."""
        for service in self.server.services.values():
            if not service.alive:
                raise OfframpError(f"answers from {service.name}", "a worker that has ended", "see the log")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for `replicas_for_work`."""
        return {LOAD: self.load}

    async def _report(self) -> None:
        """Keep the mean load, and post status and metrics, until the replica ends."""
        name, posted = replica_name(), 0.0
        while True:
            loads = [predicted_load(service) for service in self.server.services.values()]
            self.load += (sum(loads) - self.load) / MEMORY
            if self.board is not None and time.monotonic() - posted >= POST_EVERY:
                posted = time.monotonic()
                status = [service.status() for service in self.server.services.values()]
                with suppress(Exception):  # the board may be starting again
                    self.board.post.remote(name, status, self.server.metrics.text())
            await asyncio.sleep(SAMPLE_EVERY)


class Board:
    """What replicas reported last: the gateway reads it for `/v1/status` and `/metrics`."""

    def __init__(self) -> None:
        self.reports: dict[str, tuple[float, list[dict[str, Any]], bytes]] = {}

    async def post(self, replica: str, status: list[dict[str, Any]], metrics: bytes) -> None:
        """Keep the report of a replica."""
        self.reports[replica] = time.monotonic(), status, metrics

    async def read(self) -> dict[str, tuple[list[dict[str, Any]], bytes]]:
        """Return status and metrics of every replica that reported lately."""
        now = time.monotonic()
        self.reports = {name: one for name, one in self.reports.items() if now - one[0] < FORGET}
        return {name: (status, metrics) for name, (_, status, metrics) in sorted(self.reports.items())}


def replica_name() -> str:
    """Return the short name that Ray gave this replica."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def predicted_load(service: Service) -> float:
    """Return the work of a run as a share of what its workers can do, counted in the gear of a quiet server.

    The time that workers are busy, and the predicted wait (tokens that wait × expected depth at the measured speed) in
    units of the latency target. A lower gear makes steps cheaper; what they would cost in the normal gear counts.
    """
    governor, loads = service.governor, []
    normal = governor.gears[governor.normal]
    for worker in service.workers:
        scheduler = worker.scheduler
        depth = 1.0 + scheduler.counts_of(scheduler.gear).remaining(-1)
        wanted = 1.0 + scheduler.counts_of(normal).remaining(-1)
        loads.append(worker.busy * max(1.0, wanted / depth) + scheduler.predicted_wait(normal) / service.settings.slo)
    return sum(loads) / len(loads)


async def call_application(app: FastAPI, request: ForwardedRequest, gone: asyncio.Event) -> Reply:
    """Return what an ASGI application answers to a request; `gone` tells it that the client has gone."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query,
        "headers": request.headers,
        "client": None,
        "server": None,
        ELAPSED: request.elapsed,
    }
    body: list[bytes] = [request.body]
    status, headers, parts = 500, list[tuple[bytes, bytes]](), list[bytes]()

    async def receive() -> MutableMapping[str, Any]:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], [(bytes(name), bytes(value)) for name, value in message["headers"]]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return Reply(status, headers, b"".join(parts))
