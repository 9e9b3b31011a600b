"""What all protocols share: bounded bodies, bounded JSON, problems, and the options of a request."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from offramp.errors import OfframpError
from offramp.inference.budget import Budget
from offramp.serving.scheduler import DEFAULT_PRIORITY
from offramp.serving.service import RequestOptions

STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.S)
OPENING = re.compile(rb"[\[{]")
CLOSED_BY_CLIENT = 499  # the client has gone, so this is only counted
LONGEST_DEADLINE = 3_600_000  # milliseconds
M = TypeVar("M", bound=BaseModel)
# documented only: `check_text` refuses an empty text with the protocol's own error
Text = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "pattern": r"\S"})]


class Problem(Exception):
    """A request that cannot be served: status, kind, and what to do about it."""

    def __init__(self, status: int, kind: str, message: str, fix: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.fix = status, kind, message, fix
        self.retry_after = retry_after

    @property
    def text(self) -> str:
        """The message with its fix."""
        return f"{self.message}; {self.fix}" if self.fix else self.message

    @property
    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, where trying again makes sense."""
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        return {**headers, "WWW-Authenticate": "Bearer"} if self.status == 401 else headers


def problem_of(error: OfframpError) -> Problem:
    """Return the problem that an error of Offramp means for a request."""
    kind, status = ("Empty", 400) if "is empty" in error.given else ("Validation", 422)
    return Problem(status, kind, f"asked: {error.asked}; given: {error.given}", error.fix)


@dataclass(frozen=True)
class HTTPLimits:
    """Bounds of what a request may bring."""

    payload_bytes: int = 2_000_000
    client_batch: int = 256  # inputs of one request
    json_depth: int = 32
    text_characters: int = 100_000  # of one text
    body_seconds: float = 10.0  # until the whole body has arrived


async def read_body(request: Request, limits: HTTPLimits) -> bytes:
    """Return the body of a request, read no further than the limit."""
    too_large = Problem(
        413,
        "Validation",
        f"the body is larger than {limits.payload_bytes} bytes",
        "send fewer or shorter texts at once",
    )
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Problem(415, "Validation", "the body is compressed", "send it without Content-Encoding")
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > limits.payload_bytes:
        raise too_large
    task, late = asyncio.current_task(), False

    def give_up() -> None:  # much cheaper than `asyncio.wait_for`, which starts a task
        nonlocal late
        late = True
        if task is not None:
            task.cancel()

    timer = asyncio.get_running_loop().call_later(limits.body_seconds, give_up)
    try:
        return await _read(request, limits.payload_bytes, too_large)
    except ClientDisconnect as gone:
        raise Problem(CLOSED_BY_CLIENT, "Cancelled", "the client has gone") from gone
    except asyncio.CancelledError as error:
        if not late:
            raise
        message = f"the body did not arrive within {limits.body_seconds:g} s"
        raise Problem(408, "Timeout", message, "send it faster, or in smaller requests") from error
    finally:
        timer.cancel()


async def _read(request: Request, most: int, too_large: Problem) -> bytes:
    parts, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise too_large
        parts.append(chunk)
    return b"".join(parts)


def parse_json(body: bytes, limits: HTTPLimits) -> Any:
    """Return the JSON of a body: UTF-8, not too deep, finite numbers."""
    if json_depth(body, limits.json_depth) > limits.json_depth:
        raise Problem(400, "Validation", f"the JSON is nested deeper than {limits.json_depth}", "send it flatter")
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise Problem(400, "Validation", f"the body is no valid UTF-8 (byte {error.start})", "send UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Problem(400, "Validation", f"the body is no valid JSON ({error})", "send a JSON object") from error


def json_depth(body: bytes, enough: int) -> int:
    """Return how deep JSON is nested; exact only where it could be deeper than `enough`."""
    if len(OPENING.findall(body)) <= enough:
        return enough
    depth = deepest = 0
    for bracket in re.findall(rb"[\[\]{}]", STRINGS.sub(b"", body)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


class RequestOptionFields(BaseModel):
    """Fields of every request that say what an answer may cost and when it must come."""

    model_config = ConfigDict(strict=True, extra="ignore")

    budget: float | None = Field(default=None, gt=0, le=1, description="share of the full model's compute")
    max_loss: float | None = Field(default=None, ge=0, description="what the metric may lose against the full model")
    max_disagreement: float | None = Field(default=None, ge=0, lt=1, description="share of answers that may differ")
    risk: float | None = Field(default=None, gt=0, lt=1, description="a proven bound of the disagreement")
    deadline_ms: float | None = Field(default=None, gt=0, le=LONGEST_DEADLINE, description="milliseconds from now")
    priority: int | None = Field(default=None, ge=1, le=9, description="1 is served first")

    def options(self) -> RequestOptions:
        """Return the fields as one value; at most one kind of budget may be given."""
        return make_request_options(
            self.budget, self.max_loss, self.max_disagreement, self.risk, self.deadline_ms, self.priority
        )


def make_request_options(
    budget: float | None = None,
    max_loss: float | None = None,
    max_disagreement: float | None = None,
    risk: float | None = None,
    deadline_ms: float | None = None,
    priority: int | None = None,
) -> RequestOptions:
    """Return what a request asks for; refuses two budgets at once."""
    given = (budget, max_loss, max_disagreement, risk)
    try:
        chosen = Budget.parse(budget, max_loss=max_loss, max_disagreement=max_disagreement, risk=risk)
    except OfframpError as error:
        raise problem_of(error) from error
    own = chosen if any(value is not None for value in given) else None
    return RequestOptions(own, None if deadline_ms is None else deadline_ms / 1000, priority or DEFAULT_PRIORITY)


def validate(model: type[M], content: Any) -> M:
    """Return JSON as a request of a protocol; an error names the wrong field."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the body"
        raise Problem(422, "Validation", f"{place}: {first['msg']}", "see /docs for the fields") from error


def check_text(text: Any, limits: HTTPLimits) -> str:
    """Return a text that can be tokenised: a string, not empty, not too long, valid Unicode."""
    if not isinstance(text, str):
        raise Problem(422, "Validation", f"a {type(text).__name__} stands where a text is expected", "send a string")
    if not text.strip():
        raise Problem(400, "Empty", "an input is empty", "send a text that is not empty")
    if len(text) > limits.text_characters:
        message = f"a text has {len(text)} characters, and {limits.text_characters} are allowed"
        raise Problem(413, "Validation", message, "send a shorter text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Problem(422, "Validation", "a text has a lone surrogate, which is no character", "send UTF-8") from error
    return text


def json_response(
    content: Any, headers: Mapping[str, str] | None = None, status: int = 200, media_type: str = "application/json"
) -> Response:
    """Return JSON; numpy's numbers become plain ones, and a lone surrogate that a client sent is escaped."""
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, default=lambda value: value.item())
    return Response(body.encode(errors="backslashreplace"), status, dict(headers or {}), media_type)


def schema_of(model: type[BaseModel], names: Sequence[str]) -> dict[str, Any]:
    """Return the JSON schema of a request with its definitions put in place; `names` are the models that are served."""
    schema = model.model_json_schema()
    if "model" in schema["properties"]:
        schema["properties"]["model"] = {"enum": [*names, None], "default": None, "description": "one of the models"}
    definitions = schema.pop("$defs", {})

    def inline(part: Any) -> Any:
        if isinstance(part, dict):
            if "$ref" in part:
                return inline(definitions[part["$ref"].rsplit("/", 1)[1]])
            return {name: inline(value) for name, value in part.items()}
        return [inline(value) for value in part] if isinstance(part, list) else part

    result: dict[str, Any] = inline(schema)
    return result


def sorted_scores(scores: Mapping[Any, float]) -> list[dict[str, Any]]:
    """Return labels as texts with their scores, the highest first."""
    pairs = sorted(scores.items(), key=lambda pair: -pair[1])
    return [{"label": str(label), "score": float(score)} for label, score in pairs]
