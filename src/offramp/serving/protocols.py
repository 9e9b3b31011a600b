"""The protocols: how each one writes inputs, answers and errors.

- native: `POST /v1/predict`, all fields of a prediction for every task.
- Hugging Face: `POST /` and `POST /models/{name}`, what `huggingface_hub.InferenceClient(model=URL)` sends.
- TEI (Text Embeddings Inference): `POST /predict`, `POST /rerank`.
- vLLM: `POST /classify`, `POST /score`.
- Open Inference Protocol (KServe, Triton, MLServer): `POST /v2/models/{name}/infer`, JSON and binary.

A protocol parses a body into a `Call` and renders the finished work; it knows nothing of threads and queues.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from offramp.serving.http import (
    LONGEST_DEADLINE,
    HTTPLimits,
    Problem,
    RequestOptionFields,
    Text,
    check_text,
    json_response,
    make_request_options,
    parse_json,
    sorted_scores,
    validate,
)
from offramp.serving.service import RequestOptions, Service, Work

FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {  # from the logits of an input to what clients ask for
    "softmax": lambda logits: np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum(),
    "sigmoid": lambda logits: 1.0 / (1.0 + np.exp(-logits)),
    "none": lambda logits: logits,
}
Find = Callable[[str | None], Service]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """A parsed request: which run, which inputs, which options, and how the answer is written."""

    service: Service
    rows: Rows
    options: RequestOptions
    render: Callable[[list[Work]], Response]


def row_of(service: Service, item: Any, limits: HTTPLimits) -> dict[str, Any]:
    """Return one input as a row of the task: a text, a list of texts in the task's order, or named columns."""
    task, names = service.task, service.task.input_columns
    if task.words:
        return _words_row(item, task.words, limits)
    if isinstance(item, Mapping):
        aliases = {"text_a": "text", "text_b": "text_pair"}
        missing = [name for name in names if name not in item and aliases.get(name) not in item]
        if missing:
            message = f"an input lacks {missing[0]!r}; it has {', '.join(map(str, item)) or 'nothing'}"
            raise Problem(422, "Validation", message, f"send {' and '.join(names)}")
        return {name: check_text(item.get(name, item.get(aliases.get(name, ""))), limits) for name in names}
    parts = [item] if isinstance(item, str) else item
    if not isinstance(parts, list) or len(parts) != len(names):
        wanted = "one text" if len(names) == 1 else " and ".join(names)
        given = f"{len(parts)} parts" if isinstance(parts, list) else f"a {type(item).__name__}"
        raise Problem(422, "Validation", f"an input has {given}, and {service.name} takes {wanted}", f"send {wanted}")
    return {name: check_text(part, limits) for name, part in zip(names, parts, strict=True)}


def _words_row(item: Any, name: str, limits: HTTPLimits) -> dict[str, Any]:
    """Return words, or a raw sentence as it is: the task splits it, and answers with places in it."""
    if isinstance(item, Mapping):
        item = item[name] if item.get(name) is not None else item.get("text")
    if not isinstance(item, list):
        return {name: check_text(item, limits)}
    if not item:
        raise Problem(400, "Empty", "an input has no words", "send words or a text")
    return {name: [check_text(word, limits) for word in item]}


def rows_of(service: Service, items: Sequence[Any], limits: HTTPLimits) -> Rows:
    """Return the inputs of a request, neither none nor too many."""
    if not items:
        raise Problem(400, "Empty", "the request has no inputs", "send at least one")
    if len(items) > limits.client_batch:
        message = f"the request has {len(items)} inputs, and {limits.client_batch} are allowed"
        raise Problem(422, "Validation", message, "send several requests")
    return [row_of(service, item, limits) for item in items]


def prediction_of(work: Work) -> dict[str, Any]:
    """Return the prediction of finished work; raises what happened if there is none."""
    if work.kind == "expired":
        raise Problem(504, "Timeout", "the deadline passed before the answer was ready", "give more time")
    if work.prediction is None or work.gear is None:
        raise Problem(500, "Backend", "the model failed on this input", "see the server's log")
    return work.prediction


def spent(work: Work) -> dict[str, Any]:
    """Return what an answer cost and which budget it got."""
    prediction = prediction_of(work)
    assert work.gear is not None, "an answer has a gear"
    return {
        **{name: prediction[name] for name in ("exit_layer", "tokens_kept", "macs")},
        "budget": work.gear.describe(),
    }


def label_scores(service: Service, work: Work, function: str | None = None) -> dict[Any, float]:
    """Return every label with its score, in the order of the logits; refuse tasks without labels of a whole text."""
    scores = _label_scores(service, work, function)
    if scores is None:
        message = f"{service.name} is a model for {service.task.name}, which has no label of a whole text"
        raise Problem(422, "Validation", message, "use /v1/predict or POST /")
    return scores


def _label_scores(service: Service, work: Work, function: str | None) -> dict[Any, float] | None:
    """Return the scores of the prediction, or those that a function of the logits gives; None if there are none."""
    scores, labels = service.task.label_scores(prediction_of(work)), service.task.scored_labels
    if function is None or not labels:
        return scores
    return dict(zip(labels, FUNCTIONS[function](work.logits[0].astype(np.float64)).tolist(), strict=True))


# native


class NativeRequest(RequestOptionFields):
    """Inputs with options."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": ["an example"], "budget": 0.5}]})

    inputs: list[Text | list[Text] | dict[str, Any]] = Field(description="texts, pairs of texts, or named columns")
    model: str | None = None


def native(body: bytes, find: Find, limits: HTTPLimits) -> Call:
    """Parse `POST /v1/predict`."""
    request = validate(NativeRequest, parse_json(body, limits))
    service = find(request.model)

    def render(works: list[Work]) -> Response:
        predictions = []
        for work in works:
            times = {"queue_ms": _ms(work.queue_seconds), "run_ms": _ms(work.run_seconds)}
            prediction = {name: _named(value) for name, value in prediction_of(work).items()}
            predictions.append({**prediction, **spent(work), **times})
        return json_response({"model": service.name, "predictions": predictions})

    return Call(service, rows_of(service, request.inputs, limits), request.options(), render)


def _named(value: Any) -> Any:
    """Return scores with texts as keys, as JSON requires."""
    return {str(name): score for name, score in value.items()} if isinstance(value, dict) else value


# Hugging Face


class PipelineParameters(RequestOptionFields):
    """Parameters of a pipeline; those of other tasks are ignored."""

    top_k: int | None = Field(default=None, ge=1)
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None
    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None = None
    ignore_labels: list[str] | None = None


class PipelineRequest(RequestOptionFields):
    """What `InferenceClient` sends."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "an example", "parameters": {"top_k": 2}}]})

    inputs: Text | list[Text] | dict[str, Any]
    parameters: PipelineParameters | None = None


def hugging_face(body: bytes, find: Find, limits: HTTPLimits, name: str | None = None) -> Call:
    """Parse `POST /`."""
    request = validate(PipelineRequest, parse_json(body, limits))
    service, parameters = find(name), request.parameters or PipelineParameters()
    items = request.inputs if isinstance(request.inputs, list) else [request.inputs]
    rows = rows_of(service, items, limits)
    options = _options_of(request, parameters)
    if not service.task.serves_pipeline:
        message = f"{service.name} is a model for {service.task.pipeline}, which this protocol does not serve"
        raise Problem(422, "Validation", message, "use /v1/predict")

    def render(works: list[Work]) -> Response:
        content: Any = [_pipeline_answer(service, work, row, parameters) for work, row in zip(works, rows, strict=True)]
        nested = service.task.kind != "token" or isinstance(request.inputs, list)  # as transformers' pipelines do
        return json_response(content if nested else content[0])

    return Call(service, rows, options, render)


def _options_of(request: RequestOptionFields, parameters: RequestOptionFields) -> RequestOptions:
    """Return options that may stand in the request or in its parameters; in the request they win."""
    names = RequestOptionFields.model_fields
    fields = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    more = {name: getattr(parameters, name) for name in names if name not in fields}
    return make_request_options(**{**more, **fields})


def _pipeline_answer(service: Service, work: Work, row: Mapping[str, Any], parameters: PipelineParameters) -> Any:
    """Return the answer of a row as a pipeline writes it, with what it cost beside every part."""
    task, prediction, given = service.task, prediction_of(work), parameters.model_dump()
    answer = task.pipeline_answer(row, prediction, work.encoded, work.logits, given)
    if answer is None:
        scores = _label_scores(service, work, parameters.function_to_apply)
        named = {name: _named(value) for name, value in prediction.items()}
        answer = named if scores is None else sorted_scores(scores)[: parameters.top_k]
    if isinstance(answer, list):
        return [{**one, **spent(work)} for one in answer]
    return {**answer, **spent(work)}


# Text Embeddings Inference


class TEIPredictRequest(RequestOptionFields):
    """A text, a pair of texts, or a batch of such lists."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": [["an example"]]}]})

    inputs: Text | list[Text] | list[list[Text]]
    raw_scores: bool = False
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None


def tei_predict(body: bytes, find: Find, limits: HTTPLimits) -> Call:
    """Parse `POST /predict`; texts that are too long are always cut on the right."""
    request = validate(TEIPredictRequest, parse_json(body, limits))
    service, inputs = find(None), request.inputs
    if request.truncation_direction in ("left", "Left"):
        raise Problem(422, "Validation", "texts are cut on the right only", "leave truncation_direction out")
    batch = isinstance(inputs, list) and all(isinstance(one, list) for one in inputs)
    items: list[Any] = list(inputs) if batch and isinstance(inputs, list) else [inputs]
    rows = rows_of(service, [one[0] if isinstance(one, list) and len(one) == 1 else one for one in items], limits)

    def render(works: list[Work]) -> Response:
        function = "none" if request.raw_scores else None
        scores = [sorted_scores(label_scores(service, work, function)) for work in works]
        return json_response(scores if batch else scores[0])

    return Call(service, rows, request.options(), render)


class TEIRerankRequest(RequestOptionFields):
    """A query and texts to order by it; for models of pairs."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": "an example", "texts": ["a text"]}]})

    query: Text
    texts: list[Text]
    raw_scores: bool = False
    return_text: bool = False


def tei_rerank(body: bytes, find: Find, limits: HTTPLimits) -> Call:
    """Parse `POST /rerank`."""
    request = validate(TEIRerankRequest, parse_json(body, limits))
    service = find(None)
    rows = rows_of(service, [[request.query, text] for text in request.texts], limits)

    def render(works: list[Work]) -> Response:
        scores = [pair_score(service, work, request.raw_scores) for work in works]
        order = sorted(range(len(scores)), key=lambda place: -scores[place])
        texts = [{"text": request.texts[place]} if request.return_text else {} for place in order]
        found = [{"index": place, "score": scores[place], **text} for place, text in zip(order, texts, strict=True)]
        return json_response(found)

    return Call(service, rows, request.options(), render)


def pair_score(service: Service, work: Work, raw: bool = False) -> float:
    """Return how well a pair fits: the score of the last label, where the answer is a number that number."""
    scores = _label_scores(service, work, "none" if raw else None)
    if scores is None:
        raise Problem(422, "Validation", "this model does not score pairs of texts", "use /v1/predict")
    return float(list(scores.values())[-1])


# vLLM


class ClassifyRequest(RequestOptionFields):
    """One text or several."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["an example"]}]})

    model: str | None = None
    input: Text | list[Text]


def vllm_classify(body: bytes, find: Find, limits: HTTPLimits) -> Call:
    """Parse `POST /classify`."""
    request = validate(ClassifyRequest, parse_json(body, limits))
    service = find(request.model)
    rows = rows_of(service, [request.input] if isinstance(request.input, str) else request.input, limits)

    def render(works: list[Work]) -> Response:
        data = []
        for index, work in enumerate(works):
            scores = label_scores(service, work)
            best = sorted_scores(scores)[0]["label"]
            shown = {"label": best, "probs": list(scores.values()), "num_classes": len(scores)}
            data.append({"index": index, **shown, **spent(work)})
        return json_response(_vllm_list("classify", service, works, data))

    return Call(service, rows, request.options(), render)


class ScoreRequest(RequestOptionFields):
    """Pairs: one text with one or many, or as many with as many."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text_1": "an example", "text_2": ["a text"]}]})

    model: str | None = None
    text_1: Text | list[Text]
    text_2: Text | list[Text]


def vllm_score(body: bytes, find: Find, limits: HTTPLimits) -> Call:
    """Parse `POST /score`."""
    request = validate(ScoreRequest, parse_json(body, limits))
    service = find(request.model)
    first, second = ([one] if isinstance(one, str) else one for one in (request.text_1, request.text_2))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        message = f"text_1 has {len(first)} texts and text_2 has {len(second)}"
        raise Problem(422, "Validation", message, "send one text_1, or as many as text_2 has")
    rows = rows_of(service, [list(pair) for pair in zip(first, second, strict=True)], limits)

    def render(works: list[Work]) -> Response:
        data = [
            {"index": index, "object": "score", "score": pair_score(service, work), **spent(work)}
            for index, work in enumerate(works)
        ]
        return json_response(_vllm_list("score", service, works, data))

    return Call(service, rows, request.options(), render)


def _vllm_list(kind: str, service: Service, works: Sequence[Work], data: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(work.tokens for work in works)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    head = {"id": f"{kind}-{time.time_ns():x}", "object": "list", "created": int(time.time()), "model": service.name}
    return {**head, "data": data, "usage": usage}


# Open Inference Protocol


class InferTensor(BaseModel):
    """A tensor of texts, in JSON or (with `parameters.binary_data_size`) behind it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    shape: list[int] = Field(max_length=4)
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class InferOutput(BaseModel):
    """The name of an output that is wanted."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    parameters: dict[str, Any] | None = None


class InferParameters(RequestOptionFields):
    """Triton's `timeout` (microseconds) and `priority`, and the options of all requests."""

    timeout: int | None = Field(default=None, ge=0)
    priority: int | None = Field(default=None, ge=0)
    binary_data_output: bool | None = None


class InferRequest(BaseModel):
    """A request of the Open Inference Protocol."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        json_schema_extra={
            "examples": [{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["an example"]}]}]
        },
    )

    id: str | None = None
    parameters: InferParameters | None = None
    inputs: list[InferTensor] = Field(min_length=1, max_length=8)
    outputs: list[InferOutput] | None = None


def infer(body: bytes, find: Find, limits: HTTPLimits, name: str, header_length: str | None) -> Call:
    """Parse `POST /v2/models/{name}/infer`."""
    service = find(name)
    size = len(body)
    if header_length is not None:
        if not header_length.isdecimal() or int(header_length[:20]) > len(body):
            message = f"Inference-Header-Content-Length is {header_length!r:.40} of a body of {len(body)} bytes"
            raise Problem(400, "Validation", message, "give the length of the JSON part")
        size = int(header_length)
    request = validate(InferRequest, parse_json(body[:size], limits))
    columns = _columns(request.inputs, body[size:])
    names = tensor_names(service)
    missing = [one for one in names if one not in columns]
    if missing and len(names) == len(columns) == 1:  # one text, whatever it is called
        columns = {names[0]: next(iter(columns.values()))}
    elif missing:
        message = f"the tensor {missing[0]!r} is missing; the request has {', '.join(columns)}"
        raise Problem(400, "Validation", message, f"send {' and '.join(names)}")
    if len({len(columns[one]) for one in names}) > 1:
        raise Problem(400, "Validation", "tensors have different numbers of texts", "send as many of each")
    items = [dict(zip(names, texts, strict=True)) for texts in zip(*(columns[one] for one in names), strict=True)]
    parameters = request.parameters or InferParameters()
    wanted = request.outputs
    binary = bool(parameters.binary_data_output)

    def render(works: list[Work]) -> Response:
        return _infer_response(service, works, request.id, wanted, binary)

    return Call(service, rows_of(service, items, limits), _infer_options(parameters), render)


def _infer_options(parameters: InferParameters) -> RequestOptions:
    timeout = min(parameters.timeout or 0, 1000 * LONGEST_DEADLINE)
    deadline = timeout / 1000 if timeout else parameters.deadline_ms
    priority = min(9, parameters.priority) if parameters.priority else None  # 0 is Triton's default level
    budgets = parameters.budget, parameters.max_loss, parameters.max_disagreement, parameters.risk
    return make_request_options(*budgets, deadline, priority)


def tensor_names(service: Service) -> tuple[str, ...]:
    """Return the names of the input tensors of a run."""
    return ("text",) if service.task.words else tuple(service.task.input_columns)


def output_tensors(service: Service) -> list[dict[str, Any]]:
    """Return names, types and shapes of the outputs of a run."""
    fixed = [("exit_layer", "FP32"), ("tokens_kept", "FP32"), ("macs", "INT64"), ("prediction", "BYTES")]
    outputs = [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in fixed]
    if labels := service.task.scored_labels:
        scores = {"name": "scores", "datatype": "FP32", "shape": [-1, len(labels)]}
        return [{"name": service.task.answer, "datatype": "BYTES", "shape": [-1]}, scores, *outputs]
    return outputs


def _columns(tensors: Sequence[InferTensor], binary: bytes) -> dict[str, list[str]]:
    """Return the texts of each tensor, from JSON or from the bytes behind it."""
    columns, place = {}, 0
    for tensor in tensors:
        if tensor.datatype != "BYTES":
            message = f"the tensor {tensor.name!r} has the type {tensor.datatype!r:.20}"
            raise Problem(400, "Validation", message, "send texts as BYTES")
        size = (tensor.parameters or {}).get("binary_data_size")
        if size is None:
            texts = list(_flat(tensor.data or []))
        else:
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(binary) - place:
                message = (
                    f"binary_data_size of {tensor.name!r} is {size!r:.20}, and {len(binary) - place} bytes are left"
                )
                raise Problem(400, "Validation", message, "give the number of bytes of the tensor")
            texts, place = _strings(binary[place : place + size], tensor.name), place + size
        expected = int(np.prod(tensor.shape, dtype=object)) if tensor.shape else 1
        if expected != len(texts):
            message = f"the tensor {tensor.name!r} has the shape {tensor.shape} and {len(texts)} elements"
            raise Problem(400, "Validation", message, "send as many elements as the shape says")
        columns[tensor.name] = texts
    return columns


def _flat(data: Any) -> Any:
    for item in data:
        if isinstance(item, list):
            yield from _flat(item)
        else:
            yield item


def _strings(content: bytes, name: str) -> list[str]:
    """Return the elements of a binary tensor: each has its length in four bytes, little-endian, before it."""
    texts, place = [], 0
    try:
        while place < len(content):
            (size,) = struct.unpack_from("<I", content, place)
            if place + 4 + size > len(content):
                raise Problem(400, "Validation", f"the tensor {name!r} ends within an element", "send whole elements")
            texts.append(content[place + 4 : place + 4 + size].decode("utf-8"))
            place += 4 + size
    except struct.error as error:
        raise Problem(400, "Validation", f"the tensor {name!r} ends within an element", "send whole ones") from error
    except UnicodeDecodeError as error:
        raise Problem(400, "Validation", f"an element of {name!r} is no valid UTF-8", "send UTF-8") from error
    return texts


def _infer_response(
    service: Service, works: list[Work], id: str | None, wanted: Sequence[InferOutput] | None, binary: bool
) -> Response:
    predictions = [prediction_of(work) for work in works]
    known = {one["name"]: one["datatype"] for one in output_tensors(service)}
    chosen = {one.name: bool((one.parameters or {}).get("binary_data", binary)) for one in wanted or ()}
    unknown = [name for name in chosen if name not in known]
    if unknown:
        message = f"the output {unknown[0]!r:.40} does not exist"
        raise Problem(400, "Validation", message, f"use one of: {', '.join(known)}")
    outputs, tail = [], []
    for name, in_binary in (chosen or dict.fromkeys(known, binary)).items():
        pairs = zip(predictions, works, strict=True)
        values = [_output_value(service, name, prediction, work) for prediction, work in pairs]
        shape = [len(values), len(values[0])] if name == "scores" else [len(values)]
        tensor: dict[str, Any] = {"name": name, "datatype": known[name], "shape": shape}
        if in_binary:
            content = _encoded(values, known[name])
            tensor["parameters"] = {"binary_data_size": len(content)}
            tail.append(content)
        else:
            tensor["data"] = [one for value in values for one in value] if name == "scores" else values
        outputs.append(tensor)
    answer = {"model_name": service.name, "model_version": "1", "outputs": outputs}
    response = json_response({**answer, "id": id} if id else answer)
    if not tail:
        return response
    head = bytes(response.body)
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return Response(head + b"".join(tail), 200, headers, "application/octet-stream")


def _output_value(service: Service, name: str, prediction: Mapping[str, Any], work: Work) -> Any:
    if name == "scores":
        return list(prediction["scores"].values())
    if name == service.task.answer:  # of several labels, one JSON text a row
        answer = prediction[name]
        return json.dumps(answer, ensure_ascii=False) if isinstance(answer, list) else str(answer)
    if name == "prediction":
        full = {**{key: _named(value) for key, value in prediction.items()}, **spent(work)}
        return json.dumps(full, ensure_ascii=False, default=lambda value: value.item())
    return prediction[name]


def _encoded(values: Sequence[Any], datatype: str) -> bytes:
    """Return values as a binary tensor."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(text)) + text for text in (value.encode() for value in values))
    return np.array(values, dtype="<f4" if datatype == "FP32" else "<i8").tobytes()


# errors, in each protocol's own shape


def plain_error(problem: Problem) -> Response:
    """Return an error as TEI and Hugging Face write it; ours adds the fix."""
    content = {"error": problem.text, "error_type": problem.kind}
    return json_response(content, problem.headers, problem.status)


def vllm_error(problem: Problem) -> Response:
    """Return an error as vLLM (and OpenAI) writes it."""
    names = {400: "BadRequestError", 404: "NotFoundError", 422: "BadRequestError", 429: "RateLimitError"}
    status = 400 if problem.status == 422 else problem.status
    kind = names.get(problem.status, problem.kind)
    content = {"error": {"message": problem.text, "type": kind, "param": None, "code": status}}
    return json_response(content, problem.headers, status)


def infer_error(problem: Problem) -> Response:
    """Return an error as the Open Inference Protocol writes it."""
    status = 400 if problem.status == 422 else problem.status
    return json_response({"error": problem.text}, problem.headers, status)


def error_shape(path: str) -> Callable[[Problem], Response]:
    """Return how errors look at an address: as in the protocol whose address it is, or resembles."""
    if path.startswith("/v2"):
        return infer_error
    return vllm_error if path in ("/classify", "/score") else plain_error


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def header_length_of(request: Request) -> str | None:
    """Return the length of the JSON part of a binary request, as its header states it."""
    return request.headers.get("inference-header-content-length")
