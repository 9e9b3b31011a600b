"""The gateway: it passes requests on to replicas, and once more to another one if a replica dies.

Every request may be sent twice, because none changes anything: a prediction depends on its input alone. Routes, keys,
limits, deadlines and gears are those of the application in the replicas. The gateway itself refuses bodies that are too
large, so that none travels through the cluster, and joins what the replicas report.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from offramp.distributed.cluster import library
from offramp.distributed.replica import ForwardedRequest, Reply
from offramp.serving.app import client_gone
from offramp.serving.http import CLOSED_BY_CLIENT, HTTPLimits, Problem, json_response, read_body
from offramp.serving.metrics import CONTENT_TYPE
from offramp.serving.protocols import error_shape

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
HEALTH = ("/health", "/v2/health/ready")
ATTEMPTS = 2  # a request is sent once more if its replica dies
LONGEST = 120.0  # seconds that a request may take, with waiting for a replica
HOP_BY_HOP = {b"connection", b"content-length", b"transfer-encoding", b"date", b"server"}  # the outer server sets them
SUMS = ("queue_inputs", "queue_tokens", "batches", "answers_per_second")  # of the status of several replicas
LARGEST = ("predicted_wait_ms", "busy", "p50_ms", "p99_ms")


class Gateway:
    """Passes requests on to the replicas behind a Ray Serve handle."""

    def __init__(self, replicas: Any, board: Any, limits: HTTPLimits) -> None:
        self.replicas, self.board, self.limits = replicas, board, limits
        self.draining = False
        self.open_requests = 0
        self.last_request = 0.0  # when one arrived, by the monotonic clock
        self.retried = 0
        exceptions = library().exceptions
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

        self.died = (
            exceptions.RayActorError,
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
            exceptions.OwnerDiedError,
            ReplicaUnavailableError,
        )
        self.busy, self.absent = BackPressureError, DeploymentUnavailableError

    async def __call__(self, request: Request) -> Response:
        """Answer one request, whatever happens to the replicas."""
        self.open_requests, self.last_request = self.open_requests + 1, time.monotonic()
        path = request.url.path
        try:
            response = await self._answer(request, path)
        except Problem as problem:
            response = error_shape(path)(problem)
        finally:
            self.open_requests -= 1
        if self.draining:
            response.headers["Connection"] = "close"
        return response

    async def _answer(self, request: Request, path: str) -> Response:
        started = time.perf_counter()
        if path == "/v2/health/live":  # the gateway runs, whatever the replicas do
            return json_response({"live": True})
        if self.draining:
            raise Problem(503, "Unhealthy", "the server is shutting down", "", 1.0)
        body = await read_body(request, self.limits)
        forwarded = ForwardedRequest(request.method, path, request.scope["query_string"], request.headers.raw, body)
        answer = asyncio.ensure_future(self._forward(forwarded, started))
        gone = asyncio.ensure_future(client_gone(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED, timeout=LONGEST)
            if not answer.done():
                if gone.done():
                    raise Problem(CLOSED_BY_CLIENT, "Cancelled", "the client has gone")
                raise Problem(503, "Unhealthy", "no replica has answered", "try again", 1.0)
            reply = answer.result()
        finally:
            answer.cancel()
            gone.cancel()
        if reply.status == 200 and path in ("/v1/status", "/metrics"):  # a replica has checked the key
            return await self._joined(path)
        response = Response(reply.body, reply.status)
        kept = [(name, value) for name, value in reply.headers if name.lower() not in HOP_BY_HOP]
        response.raw_headers = [(b"content-length", str(len(reply.body)).encode()), *kept]
        return response

    async def _forward(self, request: ForwardedRequest, started: float) -> Reply:
        for attempt in range(ATTEMPTS):
            response = self.replicas.handle.remote(request._replace(elapsed=time.perf_counter() - started))
            try:
                reply: Reply = await response
                return reply
            except self.died:
                self.retried += attempt == 0
            except self.busy as error:
                raise Problem(429, "Overloaded", "overloaded: too many requests wait", "try again", 1.0) from error
            except self.absent as error:
                raise Problem(503, "Unhealthy", "there is no replica", "try again", 1.0) from error
            except asyncio.CancelledError:
                response.cancel()
                raise
            except Exception as error:
                raise Problem(500, "Backend", f"an internal error ({type(error).__name__})", "see the log") from error
        raise Problem(503, "Unhealthy", f"{ATTEMPTS} replicas died with the request", "try again", 1.0)

    async def _joined(self, path: str) -> Response:
        """Return status or metrics of all replicas."""
        reports: Mapping[str, tuple[Sequence[Mapping[str, Any]], bytes]] = await self.board.read.remote()
        if path == "/metrics":
            pages = {name: metrics for name, (_, metrics) in reports.items()}
            return Response(join_metrics(pages), media_type=CONTENT_TYPE)
        statuses = {name: status for name, (status, _) in reports.items()}
        return json_response({"models": join_statuses(statuses), "replicas": statuses, "retried": self.retried})


def join_metrics(pages: Mapping[str, bytes]) -> bytes:
    """Return the metrics of several replicas as one page; every sample gets the label `replica`."""
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page.decode()):
            joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            joined.samples += [one._replace(labels={**one.labels, "replica": replica}) for one in family.samples]

    class Joined(Collector):
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry()
    registry.register(Joined())
    return generate_latest(registry)


def join_statuses(statuses: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return one status for each run: queues and rates added, the longest waits, the gear of the busiest replica."""
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for status in statuses.values():
        for one in status:
            by_model.setdefault(one["model"], []).append(one)
    joined = []
    for several in by_model.values():
        busiest = max(several, key=lambda one: float(one["predicted_wait_ms"]))
        joined.append(
            {
                **busiest,
                **{name: round(sum(one[name] for one in several), 1) for name in SUMS},
                **{name: max(one[name] for one in several) for name in LARGEST},
                "exits": [sum(counts) for counts in zip(*(one["exits"] for one in several), strict=True)],
                "alarms": [alarm for one in several for alarm in one["alarms"]],
                "replicas": len(several),
            }
        )
    return joined


def gateway_app(gateway: Gateway) -> Starlette:
    """Return the gateway as an application that a server of our own runs."""
    app = Starlette(routes=[Route("/{path:path}", gateway.__call__, methods=list(METHODS))])
    app.state.server = gateway
    return app
