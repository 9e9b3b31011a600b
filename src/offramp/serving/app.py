"""The HTTP application: routes, keys, limits, waiting for answers, clients that hang up, draining."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from offramp import __version__
from offramp.errors import OfframpError
from offramp.serving import protocols
from offramp.serving.http import (
    CLOSED_BY_CLIENT,
    HTTPLimits,
    Problem,
    json_response,
    problem_of,
    read_body,
    schema_of,
)
from offramp.serving.metrics import CONTENT_TYPE, Metrics
from offramp.serving.protocols import Call, Find
from offramp.serving.scheduler import Refusal
from offramp.serving.service import RequestOptions, Service, Work

LOG = logging.getLogger("offramp.serving")
PAGE = Path(__file__).with_name("page.html")
LONG_TEXTS = 10_000  # characters of a request that are tokenised in another thread
LAG_EVERY = 0.02  # seconds between two measurements of how far the HTTP thread is behind
WATCH_AFTER = 0.01  # seconds after which it is watched whether a client has gone
DEADLINES = (b"deadline_ms", b"timeout")  # what a body contains that gives a deadline; others are refused unparsed
TURNS = 3  # of the HTTP thread that a request needs: to be read, to be handled, to be answered
CROWD = 8  # open inputs from which on the time between answers shows how many the server can answer
WHOLE = 0.6  # of the latency target that the predicted time of a request, from its arrival to its answer, may take
ELAPSED = "offramp.elapsed"  # of an ASGI scope: seconds since a gateway received the request
PORT = re.compile(r":\d*$")  # at the end of a Host header
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ERRORS = {
    400: "bad input",
    401: "missing or wrong key",
    403: "unknown host name",
    404: "unknown model",
    408: "the body came too slowly",
    413: "too large",
    415: "compressed",
    422: "wrong fields",
    429: "overloaded: Retry-After says when to try again",
    500: "the model failed",
    503: "not ready, or shutting down",
    504: "the deadline has passed",
}
ErrorShape = Callable[[Problem], Response]
Responses = dict[int | str, dict[str, Any]]  # the OpenAPI description of each status


@dataclass(frozen=True)
class AppSettings:
    """How the application behaves towards clients."""

    limits: HTTPLimits = field(default_factory=HTTPLimits)
    api_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # names by which clients may call a server without keys; empty: any
    log_texts: bool = False


class Server:
    """The runs that are served and what happens around a request."""

    def __init__(self, services: Sequence[Service], settings: AppSettings | None = None) -> None:
        self.services = {service.name: service for service in services}
        self.first = services[0]
        self.settings = settings or AppSettings()
        self.metrics = Metrics(services)
        self.draining = False
        self.open_requests = 0
        self.last_request = 0.0  # when one arrived, by the monotonic clock
        self.behind = 0.0  # seconds that a request spends outside the scheduler, by the lag of the HTTP thread
        self.crowd = Crowd()
        self._resolved: deque[asyncio.Future[None]] = deque()  # answered, but the HTTP thread does not know yet
        self._lock = threading.Lock()
        self._long_texts = ThreadPoolExecutor(1, "offramp-long-texts")

    @property
    def ready(self) -> bool:
        """Whether requests are taken: every run is warm and the server is not shutting down."""
        return not self.draining and all(service.ready for service in self.services.values())

    def overload(self) -> Refusal | None:
        """Return a refusal if no run can answer in time: the HTTP thread is behind, or all queues are too long."""
        refusal, time_in_crowd = None, self.crowd.seconds
        for service in self.services.values():
            refusal = service.overload(self.time_outside)
            if refusal is None and time_in_crowd <= WHOLE * service.settings.slo:
                return None
        return refusal or Refusal(f"the predicted time of an answer is {1000 * time_in_crowd:.0f} ms", time_in_crowd)

    @property
    def time_outside(self) -> float:
        """The predicted seconds outside the scheduler; 0 while no request is open: refusing one would help no other."""
        return self.behind if self.crowd.open else 0.0

    async def watch_lag(self) -> None:
        """Measure again and again how late the HTTP thread wakes up; late ones count for a while."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_EVERY)
            woken = time.perf_counter()
            await asyncio.sleep(0)  # one turn: everything that was ready
            now = time.perf_counter()
            lag = max(woken - before - LAG_EVERY, now - woken)
            self.behind = max(TURNS * lag, 0.8 * self.behind)
            self.crowd.note(now - before)

    def find(self, name: str | None) -> Service:
        """Return a run by name; the first one if no name is given."""
        if name is None:
            return self.first
        if name not in self.services:
            known = ", ".join(self.services)
            raise Problem(404, "NotFound", f"there is no model {name!r:.80}", f"use one of: {known}")
        return self.services[name]

    def check_key(self, request: Request) -> None:
        """Refuse a request without one of the keys; every key is compared, in constant time.

        Without keys the server is for this machine: a request under a foreign host name comes from a web page that
        should not be here, and is refused.
        """
        keys, hosts = self.settings.api_keys, self.settings.hosts
        if not keys:
            host = PORT.sub("", request.headers.get("host", "")).strip("[]").lower()
            if hosts and host not in hosts:
                raise Problem(403, "Forbidden", f"the host name {host!r:.80} is not known", f"call {hosts[0]}")
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        matches = [hmac.compare_digest(given.encode("utf-8", "replace"), key.encode()) for key in keys]
        if not any(matches):
            raise Problem(401, "Unauthorized", "the key is missing or wrong", "send Authorization: Bearer KEY")

    async def serve(
        self, request: Request, route: str, parse: Callable[[bytes, Find, HTTPLimits], Call], shape: ErrorShape
    ) -> Response:
        """Answer one request in the shape of its protocol, whatever happens."""
        started = time.perf_counter()
        self.open_requests, self.last_request = self.open_requests + 1, time.monotonic()
        inputs, model = 0, ""
        try:
            self.check_key(request)
            if not self.ready:
                raise Problem(503, "Unhealthy", "the server is not ready", "try again", 1.0)
            body = await read_body(request, self.settings.limits)
            if (refusal := self.overload()) is not None and not any(word in body for word in DEADLINES):
                raise _overloaded(refusal)  # before any work is done
            call = parse(body, self.find, self.settings.limits)
            inputs, model = len(call.rows), call.service.name
            response = await self._answer(request, call, started)
        except Problem as problem:
            response = shape(problem)
        except OfframpError as error:
            response = shape(problem_of(error))
        except Exception as error:  # a bug; the client learns that much, the log the rest
            LOG.exception("a request failed")
            response = shape(Problem(500, "Backend", f"an internal error ({type(error).__name__})", "see the log"))
        finally:
            self.open_requests -= 1
        if self.draining:
            response.headers["Connection"] = "close"
        seconds = time.perf_counter() - started
        self.metrics.requests.labels(route, response.status_code).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        if LOG.isEnabledFor(logging.INFO):
            fields = {"route": route, "status": response.status_code, "ms": round(1000 * seconds, 2)}
            LOG.info("request", extra={"fields": {**fields, "inputs": inputs, "model": model}})
        return response

    def _wake(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        """Resolve a future from a worker's thread; the answers of one step wake the HTTP thread once."""
        with self._lock:  # of several workers
            first = not self._resolved
            self._resolved.append(future)
        if first:
            with contextlib.suppress(RuntimeError):  # the loop has ended and no client waits any more
                loop.call_soon_threadsafe(self._resolve_all)

    def _resolve_all(self) -> None:
        while self._resolved:
            future = self._resolved[0]
            if not future.done():
                future.set_result(None)
            self._resolved.popleft()  # last: a worker that finds one here counts on this loop

    async def _answer(self, request: Request, call: Call, started: float) -> Response:
        options = _options_in_time(call.options, request.scope.get(ELAPSED, 0.0))
        loop = asyncio.get_running_loop()
        before = time.perf_counter()
        if sum(_characters(row) for row in call.rows) > LONG_TEXTS:
            encoded = await loop.run_in_executor(self._long_texts, call.service.prepare_long, call.rows)
        else:
            encoded = call.service.prepare(call.rows)
        tokenised = time.perf_counter()
        future: asyncio.Future[None] = loop.create_future()
        missing = len(call.rows)

        def done(work: Work) -> None:  # in the worker's thread; all inputs of a request have the same worker
            nonlocal missing
            missing -= 1
            if missing == 0:
                self._wake(loop, future)

        result = call.service.submit(call.rows, encoded, options, done, self.time_outside)
        if isinstance(result, Refusal):
            raise _overloaded(result)
        tickets, worker = result
        watch = HangUpWatch(request, future)
        self.crowd.open += 1
        try:
            await future
        finally:
            watch.stop()
            self.crowd.leave()
            if missing:  # the client has gone, or this task was cancelled
                for ticket in tickets:
                    worker.cancel(ticket)
        if watch.gone and missing:
            raise Problem(CLOSED_BY_CLIENT, "Cancelled", "the client has gone")
        works: list[Work] = [ticket.payload for ticket in tickets]
        response = call.render(works)
        times = _times(works, started, tokenised - before).items()
        response.raw_headers += [(name.encode(), value.encode()) for name, value in times]
        if self.settings.log_texts:
            LOG.info("inputs", extra={"fields": {"inputs": call.rows, "answers": [work.prediction for work in works]}})
        return response


class Crowd:
    """Requests that wait for their answer, and how long a new one would: as many answers, at the rate they come.

    The rate is learned while many wait. It covers what the scheduler does not see: the HTTP thread, and both threads
    waiting for each other. Unlike the lag of the HTTP thread it counts at once when many requests arrive together.
    """

    def __init__(self) -> None:
        self.open = 0
        self._left = 0  # since the last note
        self._crowded = False  # all the time since then
        self._each = 0.0  # seconds between two answers in a crowd

    def leave(self) -> None:
        """Count a request that is not open any more."""
        self.open -= 1
        self._left += 1
        self._crowded = self._crowded and self.open >= CROWD

    def note(self, seconds: float) -> None:
        """Learn from the time since the last note."""
        if self._crowded and self._left:
            each = seconds / self._left
            self._each += 0.2 * (each - self._each) if self._each else each
        self._left, self._crowded = 0, self.open >= CROWD

    @property
    def seconds(self) -> float:
        """The predicted seconds until a new request is answered."""
        return self.open * self._each


def _options_in_time(options: RequestOptions, elapsed: float) -> RequestOptions:
    """Return the options of a request that spent some time at a gateway: its deadline is that much sooner."""
    if options.deadline is None or not elapsed:
        return options
    if options.deadline <= elapsed:
        raise Problem(504, "Timeout", "the deadline passed before the request reached a replica", "give more time")
    return replace(options, deadline=options.deadline - elapsed)


def _overloaded(refusal: Refusal) -> Problem:
    fix = "try again later, with a longer deadline, or with fewer inputs"
    return Problem(429, "Overloaded", f"overloaded: {refusal.reason}", fix, refusal.retry_after)


class HangUpWatch:
    """Resolves a future when the client has gone. Begins after `WATCH_AFTER`: most answers come sooner."""

    def __init__(self, request: Request, future: asyncio.Future[None]) -> None:
        self.request, self.future, self.gone = request, future, False
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER, self._begin)

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        await client_gone(self.request)
        self.gone = True
        if not self.future.done():
            self.future.set_result(None)

    def stop(self) -> None:
        """End watching."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


async def client_gone(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _characters(row: Mapping[str, Any]) -> int:
    """Return the characters of an input: of its texts, and of its words where it has a list of them."""
    return sum(len(value) if isinstance(value, str) else sum(map(len, value)) for value in row.values())


def _times(works: Sequence[Work], started: float, tokenisation: float) -> dict[str, str]:
    """Return TEI's headers (milliseconds), and what the answers cost."""
    answered = [work for work in works if work.prediction is not None]
    headers = {
        "x-compute-type": "cpu",
        "x-total-time": f"{1000 * (time.perf_counter() - started):.0f}",
        "x-tokenization-time": f"{1000 * tokenisation:.0f}",
        "x-queue-time": f"{1000 * max((work.queue_seconds for work in works), default=0.0):.0f}",
        "x-inference-time": f"{1000 * max((work.run_seconds for work in works), default=0.0):.0f}",
        "x-compute-tokens": str(sum(work.tokens for work in works)),
        "x-compute-characters": str(sum(_characters(work.row) for work in works)),
    }
    if answered:
        layers = [float(work.prediction["exit_layer"]) for work in answered if work.prediction]
        headers["x-exit-layer"] = f"{sum(layers) / len(layers):g}"
        shares = [work.gear.mac_share for work in answered if work.gear and work.gear.mac_share is not None]
        if shares:
            headers["x-budget"] = f"{max(shares):.4f}"
    return headers


def info_of(server: Server, service: Service) -> dict[str, Any]:
    """Return the fields of TEI's `/info` for a model, and fields of Offramp's own."""
    predictor, limits = service.predictor, server.settings.limits
    id2label = {str(index): label for index, label in service.task.config().get("id2label", {}).items()}
    points = predictor.points
    return {
        "model_id": service.name,
        "model_sha": None,
        "model_dtype": {"fp32": "float32", "bf16": "bfloat16"}.get(predictor.how.precision, predictor.how.precision),
        "model_type": {
            "classifier": {"id2label": id2label, "label2id": {name: int(i) for i, name in id2label.items()}}
        },
        "max_concurrent_requests": service.settings.queue_requests,
        "max_input_length": predictor.model.max_length,
        "max_batch_tokens": service.workers[0].scheduler.limits.batch_tokens,
        "max_client_batch_size": limits.client_batch,
        "auto_truncate": service.task.truncates,
        "tokenization_workers": 1,
        "version": __version__,
        "task": service.task.name,
        "pipeline": service.task.pipeline,
        "inputs": list(service.task.input_columns),
        "method": predictor.model.method.name,
        "layers": service.depth,
        "engine": predictor.engine_name,
        "precision": predictor.how.precision,
        "slo_ms": 1000 * service.settings.slo,
        "gears": service.status()["gears"],
        "normal_gear": service.governor.normal,
        "risks": sorted(one.risk for one in points.guarantees) if points else [],
        "models": list(server.services),
    }


class OfframpApp(FastAPI):
    """The application; model routes with a fixed address are served without FastAPI's layers, which cost more."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.direct: dict[str, Callable[[Request], Awaitable[Response]]] = {}  # by address
        self.models: Sequence[str] = ()

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document; where a request names a model, it lists those that are served."""
        document: dict[str, Any] = super().openapi()
        for operation in (one for methods in document["paths"].values() for one in methods.values()):
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = {"type": "string", "enum": list(self.models)}
        return document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a POST to one of the fixed addresses; leave anything else to FastAPI."""
        endpoint = self.direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def build_app(services: Sequence[Service], settings: AppSettings | None = None) -> FastAPI:
    """Return the application for runs; it starts their workers and ends them."""
    server = Server(services, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for service in services:
            service.start()
        lag = asyncio.ensure_future(server.watch_lag())
        yield
        lag.cancel()
        for service in services:
            service.stop()

    app = OfframpApp(title="Offramp", version=__version__, lifespan=lifespan, description=_ABOUT)
    app.state.server, app.models = server, list(server.services)
    app.add_exception_handler(HTTPException, _not_found)
    _add_model_routes(app, server)
    _add_reading_routes(app, server)
    _add_open_inference_routes(app, server)
    return app


_ABOUT = (
    "Transformers that spend only the compute an input needs. Every request may carry one budget (budget, max_loss, "
    "max_disagreement or risk), a deadline_ms and a priority."
)


async def _not_found(request: Request, error: Exception) -> Response:
    """Answer an unknown address or method in the shape of the protocol whose address it resembles."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "an internal error"
    problem = Problem(status, "NotFound", f"{request.method} {request.url.path[:200]!r}: {detail}", "see /docs")
    response = protocols.error_shape(request.url.path)(problem)
    headers = error.headers if isinstance(error, HTTPException) else None
    for name, value in (headers or {}).items():
        response.headers[name] = value
    return response


def _documented(model: type[BaseModel], answer: str, server: Server) -> dict[str, Any]:
    """Return the OpenAPI description of a route whose body is parsed here and not by FastAPI."""
    body = {"required": True, "content": {"application/json": {"schema": schema_of(model, list(server.services))}}}
    responses = {status: {"description": about} for status, about in ERRORS.items()}
    return {"openapi_extra": {"requestBody": body}, "responses": {200: {"description": answer}, **responses}}


def _add_model_routes(app: OfframpApp, server: Server) -> None:
    plain = protocols.plain_error
    routes: list[tuple[str, Callable[[bytes, Find, HTTPLimits], Call], ErrorShape, type[BaseModel], str, str]] = [
        ("/v1/predict", protocols.native, plain, protocols.NativeRequest, "Offramp", "a prediction for every input"),
        ("/", protocols.hugging_face, plain, protocols.PipelineRequest, "Hugging Face", "what the pipeline returns"),
        ("/predict", protocols.tei_predict, plain, protocols.TEIPredictRequest, "TEI", "labels with scores"),
        ("/rerank", protocols.tei_rerank, plain, protocols.TEIRerankRequest, "TEI", "texts by their score"),
        ("/classify", protocols.vllm_classify, protocols.vllm_error, protocols.ClassifyRequest, "vLLM", "labels"),
        ("/score", protocols.vllm_score, protocols.vllm_error, protocols.ScoreRequest, "vLLM", "scores of pairs"),
    ]
    for path, parse, shape, model, tag, answer in routes:
        app.direct[path] = _endpoint(server, path, parse, shape)
        app.post(path, tags=[tag], summary=f"POST {path}", **_documented(model, answer, server))(app.direct[path])

    @app.post(
        "/models/{name}",
        tags=["Hugging Face"],
        summary="POST / of one of several models",
        **_documented(protocols.PipelineRequest, "what the pipeline returns", server),
    )
    async def one_model(request: Request, name: str) -> Response:
        def parse(body: bytes, find: Find, limits: HTTPLimits) -> Call:
            return protocols.hugging_face(body, find, limits, name)

        return await server.serve(request, "/models", parse, plain)


def _endpoint(
    server: Server, path: str, parse: Callable[[bytes, Find, HTTPLimits], Call], shape: ErrorShape
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await server.serve(request, path, parse, shape)

    endpoint.__name__ = "post_" + (path.strip("/").replace("/", "_") or "root")
    return endpoint


def _checked(server: Server, request: Request, shape: ErrorShape, content: Callable[[], Any]) -> Response:
    """Return JSON to a client with a key, and problems in the protocol's shape."""
    try:
        server.check_key(request)
        return json_response(content())
    except Problem as problem:
        return shape(problem)


def _add_reading_routes(app: FastAPI, server: Server) -> None:
    page = PAGE.read_text(encoding="utf-8")
    plain = protocols.plain_error
    refused: Responses = {401: {"description": ERRORS[401]}}

    @app.get("/", include_in_schema=False)
    async def show_page() -> Response:
        return HTMLResponse(page, headers=_page_headers())

    @app.head("/health", include_in_schema=False)  # probes like `wget --spider`
    @app.get("/health", tags=["Offramp"], responses={503: {"description": ERRORS[503]}})
    async def health() -> Response:
        """Whether requests are taken."""
        return json_response({"status": "ok"}) if server.ready else plain(_unready(server))

    @app.get("/info", tags=["TEI"], responses={**refused, 404: {"description": ERRORS[404]}})
    async def info(request: Request, model: str | None = None) -> Response:
        """What is served."""
        return _checked(server, request, plain, lambda: info_of(server, server.find(model)))

    @app.get("/v1/status", tags=["Offramp"], responses=refused)
    async def status(request: Request) -> Response:
        """Load, gear, queue, exits and disagreement of every run."""
        return _checked(server, request, plain, lambda: {"models": [one.status() for one in server.services.values()]})

    @app.get("/metrics", tags=["Offramp"], responses=refused)
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        try:
            server.check_key(request)
        except Problem as problem:
            return plain(problem)
        return Response(server.metrics.text(), media_type=CONTENT_TYPE)


def _page_headers() -> Mapping[str, str]:
    policy = (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    )
    return {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def _unready(server: Server) -> Problem:
    what = "the server is shutting down" if server.draining else "the server is warming up"
    return Problem(503, "Unhealthy", what, "", 1.0)


def _add_open_inference_routes(app: FastAPI, server: Server) -> None:
    shape = protocols.infer_error
    tag: list[str | Enum] = ["Open Inference Protocol"]
    refused: Responses = {401: {"description": ERRORS[401]}, 404: {"description": ERRORS[404]}}
    unready: Responses = {503: {"description": ERRORS[503]}}

    @app.head("/v2/health/live", include_in_schema=False)  # probes like `wget --spider`
    @app.get("/v2/health/live", tags=tag)
    async def live() -> Response:
        """Whether the process runs."""
        return json_response({"live": True})

    @app.head("/v2/health/ready", include_in_schema=False)  # probes like `wget --spider`
    @app.get("/v2/health/ready", tags=tag, responses=unready)
    async def ready() -> Response:
        """Whether requests are taken."""
        return json_response({"ready": True}) if server.ready else shape(_unready(server))

    @app.get("/v2", tags=tag, responses=refused)
    async def server_metadata(request: Request) -> Response:
        """Name, version and extensions of the server."""
        about = {"name": "offramp", "version": __version__, "extensions": ["binary_tensor_data"]}
        return _checked(server, request, shape, lambda: about)

    @app.get("/v2/models/{name}", tags=tag, responses=refused)
    async def model_metadata(request: Request, name: str) -> Response:
        """Inputs and outputs of a model."""
        return _checked(server, request, shape, lambda: _metadata(server.find(name)))

    @app.get("/v2/models/{name}/ready", tags=tag, responses={**refused, **unready})
    async def model_ready(request: Request, name: str) -> Response:
        """Whether a model takes requests."""
        try:
            server.check_key(request)
            server.find(name)
        except Problem as problem:
            return shape(problem)
        return json_response({"ready": True}) if server.ready else shape(_unready(server))

    async def infer(request: Request, name: str) -> Response:
        length = protocols.header_length_of(request)

        def parse(body: bytes, find: Find, limits: HTTPLimits) -> Call:
            return protocols.infer(body, find, limits, name, length)

        return await server.serve(request, "/v2/models/infer", parse, shape)

    documented = _documented(protocols.InferRequest, "the outputs, in JSON or binary", server)
    app.post("/v2/models/{name}/infer", tags=tag, summary="Infer", **documented)(infer)

    @app.post("/v2/models/{name}/versions/{version}/infer", include_in_schema=False)
    async def infer_version(request: Request, name: str, version: str) -> Response:
        return await infer(request, name)


def _metadata(service: Service) -> dict[str, Any]:
    inputs = [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in protocols.tensor_names(service)]
    names = {"name": service.name, "versions": ["1"], "platform": "offramp"}
    return {**names, "inputs": inputs, "outputs": protocols.output_tensors(service)}
