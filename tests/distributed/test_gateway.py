"""The gateway without Ray: a request goes to another replica once, bodies are bounded, reports are joined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from offramp.distributed.gateway import Gateway, gateway_app, join_metrics, join_statuses
from offramp.distributed.replica import Board, ForwardedRequest, Reply
from offramp.serving.http import HTTPLimits

GOOD = Reply(200, [(b"content-type", b"application/json"), (b"x-total-time", b"3")], b'{"a": 1}')


class Response:
    """What a Ray Serve handle returns: it can be awaited and cancelled."""

    def __init__(self, outcome: Any) -> None:
        self.outcome, self.cancelled = outcome, False

    def __await__(self) -> Any:
        return self._result().__await__()

    async def _result(self) -> Any:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return await self.outcome if asyncio.isfuture(self.outcome) else self.outcome

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """A handle whose calls have the given outcomes, one after the other."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes, self.requests, self.responses = list(outcomes), list[ForwardedRequest](), list[Response]()
        self.handle = SimpleNamespace(remote=self.call)

    def call(self, request: ForwardedRequest) -> Response:
        self.requests.append(request)
        self.responses.append(Response(self.outcomes.pop(0)))
        return self.responses[-1]


def ask(gateway: Gateway, method: str, path: str, **more: Any) -> httpx.Response:
    """Send one request to the gateway's application."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(gateway_app(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            return await client.request(method, path, **more)

    return asyncio.run(send())


def gateway_to(*outcomes: Any, board: Any = None, **limits: Any) -> Gateway:
    """Return a gateway to replicas with these outcomes."""
    return Gateway(Replicas(*outcomes), board, HTTPLimits(**limits))


def backpressure() -> BackPressureError:
    return BackPressureError(num_queued_requests=9, max_queued_requests=8)


def test_requests_and_answers_pass_unchanged() -> None:
    gateway = gateway_to(GOOD)
    response = ask(gateway, "POST", "/v1/predict?a=b", content=b"body", headers={"X-Api-Key": "k"})
    (request,) = gateway.replicas.requests
    assert (request.method, request.path, request.query, request.body) == ("POST", "/v1/predict", b"a=b", b"body")
    assert (b"x-api-key", b"k") in request.headers
    assert (response.status_code, response.content, response.headers["x-total-time"]) == (200, GOOD.body, "3")
    assert gateway.open_requests == 0


def test_a_request_goes_to_another_replica_once() -> None:
    gateway = gateway_to(RayActorError(), GOOD)
    assert ask(gateway, "POST", "/predict", content=b"{}").status_code == 200
    first, second = gateway.replicas.requests
    assert second._replace(elapsed=0.0) == first._replace(elapsed=0.0) and second.elapsed > first.elapsed > 0.0
    assert gateway.retried == 1
    twice = gateway_to(RayActorError(), RayActorError(), GOOD)
    response = ask(twice, "POST", "/predict", content=b"{}")
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert len(twice.replicas.requests) == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (backpressure, 429),
        (lambda: DeploymentUnavailableError(SimpleNamespace(name="s", app_name="a")), 503),
        (lambda: ValueError("a bug"), 500),
    ],
)
def test_other_errors_are_not_repeated(error: Callable[[], Exception], status: int) -> None:
    gateway = gateway_to(error())
    response = ask(gateway, "POST", "/v2/models/m/infer", content=b"{}")
    assert response.status_code == status and set(response.json()) == {"error"}, "in the shape of its protocol"
    assert len(gateway.replicas.requests) == 1


def test_a_body_that_is_too_large_reaches_no_replica() -> None:
    gateway = gateway_to(payload_bytes=10)
    assert ask(gateway, "POST", "/predict", content=b"x" * 11).status_code == 413
    assert gateway.replicas.requests == []


def test_a_draining_gateway_refuses_and_lives() -> None:
    gateway = gateway_to()
    gateway.draining = True
    refused = ask(gateway, "POST", "/predict", content=b"{}")
    assert refused.status_code == 503 and refused.headers["connection"] == "close"
    assert ask(gateway, "GET", "/health").status_code == 503
    assert ask(gateway, "GET", "/v2/health/live").status_code == 200


def test_a_client_that_goes_cancels_its_request() -> None:
    async def go() -> Response:
        waiting = asyncio.get_running_loop().create_future()
        gateway = gateway_to(waiting)
        messages = [{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            await asyncio.sleep(0.01)
            return messages.pop(0)

        async def send(message: Any) -> None:
            """The client has gone and reads nothing."""

        scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": []}
        await gateway_app(gateway)(scope, receive, send)
        await asyncio.sleep(0)
        response: Response = gateway.replicas.responses[0]
        return response

    assert asyncio.run(go()).cancelled


def test_metrics_of_replicas_are_one_page() -> None:
    page = (
        b'# HELP n_total about\n# TYPE n_total counter\nn_total{route="/"} 2.0\n# HELP g about\n# TYPE g gauge\ng 1.5\n'
    )
    text = join_metrics({"one": page, "two": page}).decode()
    assert text.count("# TYPE n_total counter") == 1
    assert 'n_total{replica="one",route="/"} 2.0' in text and 'g{replica="two"} 1.5' in text


def status(**more: Any) -> dict[str, Any]:
    """Return the status of a run with one answer."""
    sums = {"queue_inputs": 1, "queue_tokens": 10, "batches": 1, "answers_per_second": 2.5}
    waits = {"predicted_wait_ms": 1.0, "busy": 0.5, "p50_ms": 3.0, "p99_ms": 4.0}
    return {"model": "m", "gear": 1, "exits": [1, 0, 2], "alarms": [], **sums, **waits, **more}


def test_statuses_of_replicas_are_joined_by_run() -> None:
    (joined,) = join_statuses({"a": [status()], "b": [status(predicted_wait_ms=9.0, gear=0, busy=0.2)]})
    assert (joined["queue_inputs"], joined["answers_per_second"], joined["exits"]) == (2, 5.0, [2, 0, 4])
    assert (joined["predicted_wait_ms"], joined["busy"], joined["gear"], joined["replicas"]) == (9.0, 0.5, 0, 2)


def test_the_board_forgets_replicas_that_do_not_report(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("offramp.distributed.replica.time.monotonic", lambda: now)
    board = Board()
    asyncio.run(board.post("old", [status()], b""))
    now = 104.0
    asyncio.run(board.post("new", [status()], b""))
    assert set(asyncio.run(board.read())) == {"old", "new"}
    now = 106.0
    assert set(asyncio.run(board.read())) == {"new"}
