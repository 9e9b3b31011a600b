"""Every route and every refusal, over real HTTP."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from offramp.inference.predictor import Predictor
from offramp.serving.app import CROWD, LONG_TEXTS, AppSettings, Crowd, Server
from offramp.serving.http import HTTPLimits
from offramp.serving.metrics import Metrics
from offramp.serving.service import Service, ServiceSettings, Work
from tests import factories
from tests.serving.conftest import StartServer

TEXTS = [row["text"] for row in factories.labelled_rows(count=6, seed=9)]
SENTENCES = [
    "Scotland's Anne-Marie didn't call; who saw it?",
    "the well-known man (a rock ’n’ roll woman) lives in São Paulo, or not!",
    'EU rejects\n  "films" — 東京 and Zoë’s café …',
]


def post(address: str, path: str, content: Any, **headers: str) -> httpx.Response:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return httpx.post(address + path, content=body, headers={"Content-Type": "application/json", **headers}, timeout=30)


def message(response: httpx.Response) -> str:
    error = response.json()["error"]
    return error if isinstance(error, str) else error["message"]


# reading


def test_health_info_status_and_metadata(address: str) -> None:
    assert httpx.get(address + "/health").json() == {"status": "ok"}
    info = httpx.get(address + "/info").json()
    assert info["model_id"] == "classification" and info["max_client_batch_size"] == 256
    assert info["model_type"]["classifier"]["label2id"] == {"bad": 0, "good": 1}
    assert httpx.get(address + "/info", params={"model": "tagging"}).json()["task"] == "tagging"
    assert httpx.get(address + "/info", params={"model": "none"}).status_code == 404
    assert [one["model"] for one in httpx.get(address + "/v1/status").json()["models"]] == info["models"]
    assert httpx.get(address + "/v2").json()["extensions"] == ["binary_tensor_data"]
    assert httpx.get(address + "/v2/health/live").status_code == 200
    assert httpx.get(address + "/v2/health/ready").status_code == 200
    for path in ("/health", "/v2/health/live", "/v2/health/ready"):  # some probes send HEAD
        assert httpx.head(address + path).status_code == 200
    assert httpx.get(address + "/v2/models/pairs").json()["inputs"][1]["name"] == "text_b"
    assert httpx.get(address + "/v2/models/pairs/ready").status_code == 200
    assert httpx.get(address + "/v2/models/none/ready").status_code == 404
    assert "<title>" in httpx.get(address + "/").text


def test_metrics_count_requests_exits_and_queue(address: str) -> None:
    post(address, "/predict", {"inputs": "a good film"})
    text = httpx.get(address + "/metrics").text
    assert 'offramp_requests_total{route="/predict",status="200"}' in text
    assert 'offramp_inputs_total{model="classification",outcome="answered"}' in text
    assert 'offramp_exit_layer_bucket{le="3.0",model="classification"}' in text
    assert 'offramp_gear{model="tagging"}' in text


def test_names_of_metrics_do_not_depend_on_the_runs(translation_run: Path, trained: Path) -> None:
    one, two = (Service(name, Predictor.load(run, "torch")) for name, run in (("a", translation_run), ("b", trained)))
    assert one.depth == two.depth == 3
    two.depth = 5
    alone, together = Metrics([one]), Metrics([one, two])
    for metrics, services in ((alone, [one]), (together, [one, two])):
        for service in services:
            prediction = {"exit_layer": 2, "macs": 1, "tokens_kept": 1.0}
            metrics.note(service, [Work({}, lambda _: None, prediction=prediction, kind="answered", tokens=1)])
    samples = [{line.split("{")[0] for line in each.text().decode().splitlines()} for each in (alone, together)]
    assert samples[0] == samples[1] and "offramp_exit_layer_bucket" in samples[0]
    assert 'offramp_exit_layer_bucket{le="5.0",model="b"} 1.0' in together.text().decode()
    assert 'offramp_exit_layer_count{model="a"} 1.0' in together.text().decode()


def test_openapi_names_every_protocol(address: str) -> None:
    paths = httpx.get(address + "/openapi.json").json()["paths"]
    assert {"/", "/v1/predict", "/predict", "/rerank", "/classify", "/score", "/v2/models/{name}/infer"} <= set(paths)
    assert httpx.get(address + "/docs").status_code == 200


def test_openapi_lists_the_models_and_its_examples_are_answered(address: str) -> None:
    models = httpx.get(address + "/info").json()["models"]
    paths = httpx.get(address + "/openapi.json").json()["paths"]
    assert paths["/v2/models/{name}"]["get"]["parameters"][0]["schema"]["enum"] == models
    assert paths["/info"]["get"]["parameters"][0]["schema"]["enum"] == models
    for path in ("/", "/models/{name}", "/v1/predict", "/predict", "/classify", "/v2/models/{name}/infer"):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["properties"].get("model", {"enum": [*models, None]})["enum"] == [*models, None]
        example = schema["examples"][0]
        assert post(address, path.replace("{name}", models[0]), example).status_code == 200, path


# native


def test_native_predictions_are_those_of_the_predictor(address: str, every_task: dict[str, Path]) -> None:
    predictor = Predictor.load(every_task["classification"], "torch")
    answer = post(address, "/v1/predict", {"inputs": TEXTS, "budget": 0.5}).json()
    for got, wanted in zip(answer["predictions"], predictor.predict(TEXTS, budget=0.5), strict=True):
        assert (got["label"], got["exit_layer"]) == (wanted["label"], wanted["exit_layer"])
        assert got["scores"] == pytest.approx(wanted["scores"], abs=1e-4)
        assert set(got["budget"]) == {"mac_share", "expected_loss"} and got["queue_ms"] >= 0


@pytest.mark.parametrize(
    ("model", "inputs", "field"),
    [
        ("pairs", [["a film", "a good film"]], "label"),
        ("pairs", [{"text": "a film", "text_pair": "a bad film"}], "label"),
        ("multi_label", ["a good film"], "labels"),
        ("regression", ["a good film"], "value"),
        ("tagging", ["a good film", ["a", "bad", "film"]], "tags"),
        ("question_answering", [{"question": "who ?", "context": "a man lives in paris ."}], "answer"),
        ("question_answering", [["who ?", "a man lives in paris ."]], "answer"),
        ("masked_lm", ["a [MASK] film"], "text"),
    ],
)
def test_native_serves_every_task(address: str, model: str, inputs: list[Any], field: str) -> None:
    response = post(address, "/v1/predict", {"inputs": inputs, "model": model})
    assert response.status_code == 200, response.text
    assert len(response.json()["predictions"]) == len(inputs)
    assert all(field in one and "macs" in one for one in response.json()["predictions"])


def biased_tagger(run: Path, folder: Path, tag: int) -> Path:
    """Copy a tagger whose full model gives one tag to every word."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("points.json"))  # they belong to other weights
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"][tag] += 100.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "form", [lambda text: text, lambda text: {"text": text}, lambda text: text.split()], ids=["raw", "named", "words"]
)
def test_sentences_are_tagged_as_by_the_predictor(
    start_server: StartServer, every_task: dict[str, Path], tmp_path: Path, form: Any
) -> None:
    run = biased_tagger(every_task["tagging"], tmp_path / "run", 1)
    inputs = [form(text) for text in SENTENCES]
    answer = post(start_server({"tagger": run}), "/v1/predict", {"inputs": inputs}).json()
    wanted = Predictor.load(run, "torch").predict(inputs)
    for got, one, text in zip(answer["predictions"], wanted, SENTENCES, strict=True):
        assert set(got) == {*one, "budget", "queue_ms", "run_ms"}
        for name in set(one) - {"entities"}:
            assert got[name] == one[name], name
        for ours, theirs in zip(got["entities"], one["entities"], strict=True):
            assert ours == {**theirs, "score": pytest.approx(theirs["score"], abs=1e-5)}
        if isinstance(inputs[0], list):
            assert "tokens" not in got
            continue
        assert got["tokens"] == [entity["text"] for entity in got["entities"]], "every word is an entity here"
        assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in got["entities"])
        assert text.replace(" ", "").replace("\n", "") == "".join(got["tokens"])


def test_options_of_a_pipeline_stand_in_its_parameters_or_beside_them(address: str) -> None:
    wanted, full = (
        post(address, "/v1/predict", {"inputs": ["a film"], "budget": budget}).json()["predictions"][0]["budget"]
        for budget in (0.5, 1.0)
    )
    content = {"inputs": "a film", "parameters": {"budget": 0.5}, "deadline_ms": 20_000}
    assert post(address, "/", content).json()[0][0]["budget"] == wanted != full
    refused = post(address, "/", {**content, "max_loss": 0.1})
    assert refused.status_code == 422 and "only one" in message(refused)


def test_a_pipeline_names_the_words_of_the_text_that_was_sent(
    start_server: StartServer, every_task: dict[str, Path], tmp_path: Path
) -> None:
    run = biased_tagger(every_task["tagging"], tmp_path / "run", 1)
    words = [one["tokens"] for one in Predictor.load(run, "torch").predict(SENTENCES)]
    address = start_server({"tagger": run})
    for text, expected in zip(SENTENCES, words, strict=True):
        found = post(address, "/", {"inputs": text, "parameters": {"aggregation_strategy": "none"}}).json()
        assert [one["word"] for one in found] == expected
        assert [text[one["start"] : one["end"]] for one in found] == expected


def test_rows_with_different_budgets_are_served_at_the_same_time(address: str, every_task: dict[str, Path]) -> None:
    predictor = Predictor.load(every_task["classification"], "torch")
    budgets = [0.3, 0.5, 1.0] * 4
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        answer = post(address, "/v1/predict", {"inputs": TEXTS[:3], "budget": budgets[number], "priority": 1})
        found[number] = answer.json()["predictions"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(budgets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, budget in enumerate(budgets):
        wanted = predictor.predict(TEXTS[:3], budget=budget)
        assert [one["exit_layer"] for one in found[number]] == [one["exit_layer"] for one in wanted]


# Text Embeddings Inference and vLLM


def test_tei_predict_is_flat_for_one_text_and_nested_for_a_batch(address: str) -> None:
    one = post(address, "/predict", {"inputs": "a good film"})
    scores = one.json()
    assert [set(entry) for entry in scores] == [{"label", "score"}] * 2
    assert scores[0]["score"] >= scores[1]["score"] and sum(entry["score"] for entry in scores) == pytest.approx(1.0)
    assert {"x-total-time", "x-queue-time", "x-compute-tokens", "x-exit-layer"} <= set(one.headers)
    batch = post(address, "/predict", {"inputs": [["a good film"], ["a bad film"]]}).json()
    assert [entry["label"] for entry in batch[0]] == [entry["label"] for entry in scores]
    assert batch[0][0]["score"] == pytest.approx(scores[0]["score"], abs=1e-5)
    raw = post(address, "/predict", {"inputs": "a good film", "raw_scores": True}).json()
    assert [entry["label"] for entry in raw] == [entry["label"] for entry in scores]


def test_tei_predict_takes_two_texts_as_a_pair(address: str) -> None:
    response = post(address, "/predict", {"inputs": ["a good film", "a bad film"]})
    assert response.status_code == 422 and response.json()["error_type"] == "Validation"


def test_tei_rerank_and_vllm_score_need_a_model_of_pairs(
    address: str, start_server: StartServer, every_task: Any
) -> None:
    assert post(address, "/rerank", {"query": "a film", "texts": ["good", "bad"]}).status_code == 422
    pairs = start_server({"pairs": every_task["pairs"]})
    ranked = post(pairs, "/rerank", {"query": "a film", "texts": ["good", "bad", "a man"], "return_text": True}).json()
    assert sorted(one["index"] for one in ranked) == [0, 1, 2]
    assert ranked[0]["score"] >= ranked[1]["score"] and ranked[0]["text"] in ("good", "bad", "a man")
    scored = post(pairs, "/score", {"text_1": "a film", "text_2": ["good", "bad"]}).json()
    assert [one["index"] for one in scored["data"]] == [0, 1] and scored["data"][0]["object"] == "score"
    wrong = post(pairs, "/score", {"text_1": ["a", "b", "c"], "text_2": ["good", "bad"]})
    assert wrong.status_code == 400 and wrong.json()["error"]["type"] == "BadRequestError"


def test_vllm_classify(address: str) -> None:
    answer = post(address, "/classify", {"model": "classification", "input": ["a good film", "bad"]}).json()
    assert answer["object"] == "list" and answer["usage"]["prompt_tokens"] > 0
    assert [one["index"] for one in answer["data"]] == [0, 1]
    first = answer["data"][0]
    assert first["num_classes"] == len(first["probs"]) == 2 and first["label"] in ("good", "bad")
    unknown = post(address, "/classify", {"model": "none", "input": "x"})
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == 404


# Open Inference Protocol


def test_open_inference_in_json(address: str) -> None:
    tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a good film", "bad"]}
    path = "/v2/models/classification/infer"
    answer = post(address, path, {"id": "7", "inputs": [tensor], "parameters": {"timeout": 20_000_000}}).json()
    assert answer["id"] == "7" and answer["model_name"] == "classification"
    outputs = {one["name"]: one for one in answer["outputs"]}
    assert outputs["label"]["shape"] == [2] and outputs["scores"]["shape"] == [2, 2]
    assert json.loads(outputs["prediction"]["data"][0])["label"] == outputs["label"]["data"][0]
    only = post(address, path, {"inputs": [tensor], "outputs": [{"name": "exit_layer"}]}).json()
    assert [one["name"] for one in only["outputs"]] == ["exit_layer"]


@pytest.mark.parametrize("kind", factories.KINDS)
def test_open_inference_gives_the_outputs_that_it_announces(address: str, every_task: Any, kind: str) -> None:
    metadata = httpx.get(f"{address}/v2/models/{kind}").json()
    texts = {"context": "a man lives in paris .", "question": "who ?"}
    inputs = [
        {"name": one["name"], "shape": [1], "datatype": "BYTES", "data": [texts.get(one["name"], "a good film")]}
        for one in metadata["inputs"]
    ]
    response = post(address, f"/v2/models/{kind}/infer", {"inputs": inputs})
    assert response.status_code == 200, response.text
    outputs = response.json()["outputs"]
    assert [(one["name"], one["datatype"]) for one in outputs] == [
        (one["name"], one["datatype"]) for one in metadata["outputs"]
    ]
    target = Predictor.load(every_task[kind], "torch").task.target
    assert (target in {one["name"] for one in outputs}) == (kind in ("classification", "pairs", "multi_label"))


def test_several_labels_a_text_are_answered_in_every_protocol(address: str, every_task: dict[str, Path]) -> None:
    texts = [row["text"] for row in factories.labelled_rows("multi_label", 12, seed=9)]
    wanted = Predictor.load(every_task["multi_label"], "torch").predict(texts, budget=1.0)
    assert len({len(one["labels"]) for one in wanted}) > 1, "rows with different numbers of labels"
    native = post(address, "/v1/predict", {"inputs": texts, "model": "multi_label", "budget": 1.0}).json()
    assert [one["labels"] for one in native["predictions"]] == [one["labels"] for one in wanted]
    tensor = {"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
    infer = {"inputs": [tensor], "parameters": {"budget": 1.0}}
    outputs = {one["name"]: one for one in post(address, "/v2/models/multi_label/infer", infer).json()["outputs"]}
    assert [json.loads(one) for one in outputs["labels"]["data"]] == [one["labels"] for one in wanted]
    assert outputs["labels"]["shape"] == [12] and outputs["scores"]["shape"] == [12, 2] and "label" not in outputs
    scores = {"good": wanted[0]["scores"]["good"], "long": wanted[0]["scores"]["long"]}
    classified = post(address, "/classify", {"model": "multi_label", "input": texts[0], "budget": 1.0}).json()["data"]
    assert classified[0]["probs"] == pytest.approx(list(scores.values()), abs=1e-4)
    pipeline = post(address, "/models/multi_label", {"inputs": texts[0], "budget": 1.0}).json()[0]
    assert {one["label"]: one["score"] for one in pipeline} == pytest.approx(scores, abs=1e-4)
    one_of_all = {"inputs": texts[0], "parameters": {"function_to_apply": "softmax"}}
    pipeline = post(address, "/models/multi_label", one_of_all).json()[0]
    assert sum(one["score"] for one in pipeline) == pytest.approx(1.0), "as if one label excluded the others"


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        ({"datatype": "FP32", "data": [1.0]}, "BYTES"),
        ({"shape": [3]}, "shape"),
        ({"data": [""]}, "empty"),
        ({"data": [5]}, "int"),
        ({"data": None, "parameters": {"binary_data_size": 100}}, "binary_data_size"),
        ({"shape": [-1]}, "shape"),
    ],
)
def test_open_inference_refuses_wrong_tensors(address: str, tensor: dict[str, Any], part: str) -> None:
    whole = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"], **tensor}
    response = post(address, "/v2/models/classification/infer", {"inputs": [whole]})
    assert response.status_code == 400 and part in message(response)


def test_open_inference_answers_requests_with_an_id_that_is_no_text_and_any_timeout(address: str) -> None:
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a good film"]}
    path = "/v2/models/classification/infer"
    response = post(address, path, {"id": "\ud800", "inputs": [tensor], "parameters": {"timeout": 10**400}})
    assert response.status_code == 200 and b'"id": "\\ud800"' in response.content
    unnamed = post(address, path, {"inputs": [{**tensor, "name": "\ud800"}, {**tensor, "name": "b"}]})
    assert unnamed.status_code == 400 and "missing" in message(unnamed)


def test_open_inference_refuses_a_wrong_header_length(address: str) -> None:
    for length in ("abc", "100000"):
        headers = {"Inference-Header-Content-Length": length}
        assert post(address, "/v2/models/classification/infer", b"{}", **headers).status_code == 400


# refusals


@pytest.mark.parametrize(
    ("content", "status", "part"),
    [
        ({"inputs": [""]}, 400, "empty"),
        ({"inputs": []}, 400, "no inputs"),
        ({"inputs": [5]}, 422, "inputs"),
        ({"inputs": "a"}, 422, "inputs"),
        ({}, 422, "inputs"),
        ([], 422, "body"),
        ({"inputs": ["a"], "budget": 0}, 422, "budget"),
        ({"inputs": ["a"], "budget": 1.5}, 422, "budget"),
        ({"inputs": ["a"], "budget": "0.5"}, 422, "budget"),
        ({"inputs": ["a"], "budget": 0.5, "max_loss": 0.1}, 422, "only one"),
        ({"inputs": ["a"], "risk": 0.01}, 422, "risk"),
        ({"inputs": ["a"], "max_disagreement": 0.01}, 422, "disagree"),
        ({"inputs": ["a"], "deadline_ms": -5}, 422, "deadline_ms"),
        ({"inputs": ["a"], "priority": 77}, 422, "priority"),
        ({"inputs": ["a"], "model": "none"}, 404, "none"),
        ({"inputs": ["x" * 200_000]}, 413, "characters"),
        ({"inputs": ["a"] * 300}, 422, "300"),
        ({"inputs": [["a", "b"]]}, 422, "parts"),
        ({"inputs": [{"question": "a"}]}, 422, "lacks"),
        (b'{"inputs": ["\\ud800"]}', 422, "surrogate"),
        (b'{"inputs": [{"\\ud800": "a"}]}', 422, "lacks"),
        (b'{"inputs": ["a"], "budget": NaN}', 400, "NaN"),
        (b"{", 400, "JSON"),
        (b"", 400, "JSON"),
        (b'{"inputs": ["\xff"]}', 400, "UTF-8"),
        (b'{"inputs": ' + b"[" * 100 + b"]" * 100 + b"}", 400, "nested"),
        (b"[" * 100_000, 400, "nested"),
        (b'{"inputs": ["a"], "priority": ' + b"9" * 6000 + b"}", 400, "JSON"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(address: str, content: Any, status: int, part: str) -> None:
    response = post(address, "/v1/predict", content)
    assert response.status_code == status, response.text
    assert part in message(response) and "Traceback" not in response.text


def test_brackets_within_texts_are_no_depth(address: str) -> None:
    assert post(address, "/v1/predict", {"inputs": ["[" * 60 + ' a "quoted\\" film']}).status_code == 200


@pytest.mark.parametrize("path", ["/predict", "/classify", "/", "/v2/models/classification/infer", "/rerank"])
def test_every_protocol_refuses_bad_bodies_in_its_own_shape(address: str, path: str) -> None:
    response = post(address, path, b"{")
    error = response.json()["error"]
    assert response.status_code == 400
    if path == "/classify":
        assert error["code"] == 400 and error["type"] == "BadRequestError"
    elif path.startswith("/v2"):
        assert set(response.json()) == {"error"} and isinstance(error, str)
    else:
        assert response.json()["error_type"] == "Validation"


def test_unknown_addresses_and_methods(address: str) -> None:
    assert httpx.get(address + "/nothing").json()["error_type"] == "NotFound"
    assert set(httpx.get(address + "/v2/nothing").json()) == {"error"}
    assert httpx.delete(address + "/predict").status_code == 405


def test_bodies_are_bounded_with_and_without_a_stated_length(address: str) -> None:
    large = b'{"inputs": ["' + b"a" * 3_000_000 + b'"]}'
    assert post(address, "/v1/predict", large).status_code == 413

    def chunks() -> Any:
        for start in range(0, len(large), 100_000):
            yield large[start : start + 100_000]

    with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError):  # the server may close before all was sent
        assert httpx.post(address + "/v1/predict", content=chunks()).status_code == 413
    gzipped = post(address, "/v1/predict", b"{}", **{"Content-Encoding": "gzip"})
    assert gzipped.status_code == 415


def test_a_client_that_hangs_up_leaves_no_work_behind(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"inputs": ["a good film"] * 100}).encode()
    head = f"POST /v1/predict HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(20):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + body)
    for _ in range(200):
        states = httpx.get(address + "/v1/status").json()["models"]
        if not any(one["queue_inputs"] or one["batches"] for one in states):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("work is left behind")
    assert post(address, "/predict", {"inputs": "a good film"}).status_code == 200


# keys and limits


def test_keys_are_required_where_they_are_set(start_server: StartServer, trained: Path) -> None:
    address = start_server({"run": trained}, AppSettings(api_keys=("first", "second")))
    for path in ("/info", "/v1/status", "/metrics", "/v2", "/v2/models/run", "/v2/models/run/ready"):
        assert httpx.get(address + path).status_code == 401
        assert httpx.get(address + path, headers={"Authorization": "Bearer second"}).status_code == 200
    content = {"inputs": "a good film"}
    assert post(address, "/predict", content).status_code == 401
    assert post(address, "/predict", content, Authorization="Bearer wrong").status_code == 401
    refused = post(address, "/classify", {"input": "x"}, Authorization="Basic first")
    assert refused.status_code == 401 and refused.headers["WWW-Authenticate"] == "Bearer"
    assert post(address, "/predict", content, **{"X-API-Key": "first"}).status_code == 200
    assert post(address, "/predict", content, Authorization="bearer first").status_code == 200
    assert httpx.get(address + "/health").status_code == 200 and httpx.get(address + "/").status_code == 200


def test_foreign_host_names_are_refused_without_keys(start_server: StartServer, trained: Path) -> None:
    address = start_server({"run": trained}, AppSettings(hosts=("127.0.0.1", "localhost", "::1")))
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", ""):
        assert post(address, "/predict", {"inputs": "a film"}, Host=host).status_code == 403
    for host in ("localhost:80", "LOCALHOST", "[::1]", "[::1]:80"):
        assert post(address, "/predict", {"inputs": "a film"}, Host=host).status_code == 200


def test_a_crowd_predicts_the_time_of_an_answer_from_the_rate_of_answers() -> None:
    crowd = Crowd()
    crowd.open = CROWD - 2
    crowd.note(0.02)
    crowd.leave()
    crowd.note(0.02)
    assert crowd.seconds == 0.0, "few open requests show nothing of the rate"
    crowd.open = 3 * CROWD
    crowd.note(0.02)
    for _ in range(CROWD):
        crowd.leave()
    crowd.note(0.02)
    assert crowd.seconds == pytest.approx(2 * CROWD * 0.02 / CROWD)
    crowd.open += 10  # a burst counts at once
    assert crowd.seconds == pytest.approx((2 * CROWD + 10) * 0.02 / CROWD)


def test_a_crowd_that_would_wait_too_long_is_refused(trained: Path) -> None:
    server = Server([Service("films", Predictor.load(trained, "torch"), ServiceSettings(slo=0.05))])
    assert server.overload() is None
    server.crowd.open, server.crowd._each = 50, 0.001
    refusal = server.overload()
    assert refusal is not None and "predicted time of an answer is 50 ms" in refusal.reason


def test_a_late_http_thread_refuses_no_request_of_an_empty_server(trained: Path) -> None:
    server = Server([Service("films", Predictor.load(trained, "torch"), ServiceSettings(slo=0.05))])
    server.behind = 0.2
    assert server.overload() is None
    server.crowd.open = 1
    assert server.overload() is not None


def test_overload_gives_429_with_a_time_to_try_again(start_server: StartServer, trained: Path) -> None:
    limits = AppSettings(HTTPLimits(client_batch=50))
    address = start_server({"run": trained}, limits, queue_requests=10)
    response = post(address, "/v1/predict", {"inputs": ["a good film"] * 20})
    assert response.status_code == 429 and int(response.headers["Retry-After"]) >= 1
    assert response.json()["error_type"] == "Overloaded"
    assert post(address, "/v1/predict", {"inputs": ["a good film"] * 10}).status_code == 200


def test_a_deadline_that_cannot_be_met_is_refused_or_times_out(address: str) -> None:
    response = post(address, "/v1/predict", {"inputs": ["a good film " * 15] * 200, "deadline_ms": 0.001})
    assert response.status_code in (429, 504)
    assert post(address, "/v1/predict", {"inputs": ["a good film"], "deadline_ms": 20_000}).status_code == 200


def test_long_and_short_texts_are_tokenised_at_the_same_time(address: str) -> None:
    long, short = "a good film and " * (LONG_TEXTS // 8), "a bad film"
    with ThreadPoolExecutor(8) as pool:
        statuses = [
            pool.submit(httpx.post, f"{address}/v1/predict", json={"inputs": [text]}, timeout=60)
            for text in [long, short, short, short] * 12
        ]
        assert {one.result().status_code for one in statuses} == {200}


def test_scores_that_are_no_numbers_are_an_error_and_never_an_answer(
    start_server: StartServer, trained: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(trained, broken, ignore=shutil.ignore_patterns("points.json"))  # they belong to other weights
    weights = load_file(broken / "model.safetensors")
    save_file({name: torch.full_like(value, float("nan")) for name, value in weights.items()},
              broken / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    address = start_server({"broken": broken})
    for path, content in (("/predict", {"inputs": "a film"}), ("/classify", {"model": "broken", "input": ["a film"]})):
        response = post(address, path, content)
        assert response.status_code == 500 and "NaN" not in response.text, path
        assert response.json()
