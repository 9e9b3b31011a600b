"""Clients that exist already, unchanged: huggingface_hub, tritonclient, and Schemathesis over the whole schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from huggingface_hub import InferenceClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from tests.serving.conftest import StartServer

# huggingface_hub


def test_inference_client_classifies_texts(address: str) -> None:
    client = InferenceClient(model=address)
    labels = client.text_classification("a good film")
    assert [one.label for one in labels] in (["good", "bad"], ["bad", "good"])
    assert sum(one.score for one in labels) == pytest.approx(1.0)
    assert labels[0].exit_layer <= 3 and labels[0].budget  # type: ignore[attr-defined]  # extra fields survive
    assert len(client.text_classification("a good film", top_k=1)) == 1
    raw = client.text_classification("a good film", function_to_apply="none")
    assert sum(one.score for one in raw) != pytest.approx(1.0)


def test_inference_client_tags_words(address: str) -> None:
    client = InferenceClient(model=f"{address}/models/tagging")
    text = "The man saw a good, very good film."
    everything = client.token_classification(text, aggregation_strategy="none", ignore_labels=[])
    assert [one.word for one in everything] == ["The", "man", "saw", "a", "good", ",", "very", "good", "film", "."]
    assert all(text[one.start : one.end] == one.word and one.entity for one in everything)
    groups = client.token_classification(text, aggregation_strategy="simple", ignore_labels=[])
    assert all(one.entity_group in ("O", "ORG") and 0.0 <= one.score <= 1.0 for one in groups)
    assert all(one.entity_group != "O" for one in client.token_classification(text))


def test_inference_client_answers_questions(address: str) -> None:
    client = InferenceClient(model=f"{address}/models/question_answering")
    context = "a man lives in paris ."
    answer: Any = client.question_answering(question="who ?", context=context)
    assert answer.answer == context[answer.start : answer.end] and 0.0 <= answer.score <= 1.0


def test_inference_client_translates(start_server: StartServer, translation_run: Path) -> None:
    address = start_server({"letters": translation_run})
    assert InferenceClient(model=address).translation("a b c").translation_text
    long = httpx.post(address, json={"inputs": "a b c " * 50})
    assert long.status_code == 422 and "pieces" in long.json()["error"]


# tritonclient


def tensor(texts: list[str], binary: bool) -> Any:
    one = triton.InferInput("text", [len(texts)], "BYTES")
    one.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_), binary_data=binary)
    return one


@pytest.mark.parametrize("binary", [True, False])
def test_triton_client_sends_and_reads_both_forms(address: str, binary: bool) -> None:
    client = triton.InferenceServerClient(address.removeprefix("http://"))
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("classification")
    assert client.get_model_metadata("classification")["platform"] == "offramp"
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("label", "scores", "macs")]
    result = client.infer("classification", [tensor(["a good film", "bad ü"], binary)], outputs=wanted)
    scores = result.as_numpy("scores")
    assert scores.shape == (2, 2) and scores.sum(axis=1) == pytest.approx([1.0, 1.0], abs=1e-5)
    assert {label.decode() if isinstance(label, bytes) else label for label in result.as_numpy("label")} <= {
        "good",
        "bad",
    }
    assert (result.as_numpy("macs") > 0).all()
    client.close()


def test_triton_client_sets_deadline_and_priority_and_reads_errors(address: str) -> None:
    client = triton.InferenceServerClient(address.removeprefix("http://"))
    result = client.infer("classification", [tensor(["a"], True)], priority=1, timeout=10_000_000, request_id="one")
    assert result.get_response()["id"] == "one"
    whole = json.loads(result.as_numpy("prediction")[0])
    assert whole["exit_layer"] <= 3 and "budget" in whole
    cheap = client.infer("classification", [tensor(["a"], True)], parameters={"budget": 0.5})
    assert json.loads(cheap.as_numpy("prediction")[0])["budget"]["mac_share"] <= 0.5
    with pytest.raises(InferenceServerException, match="no model"):
        client.infer("none", [tensor(["a"], True)])
    with pytest.raises(InferenceServerException, match="empty"):
        client.infer("classification", [tensor([""], True)])
    client.close()


# Schemathesis and garbage


def test_no_request_of_the_schema_makes_the_server_fail(address: str) -> None:
    document = httpx.get(f"{address}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    for operation in schema.get_all_operations():
        strategy = operation.ok().as_strategy()

        @settings(
            max_examples=8,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @given(case=strategy)
        def ask(case: Any) -> None:
            response = case.call(base_url=address)
            assert response.status_code < 500, response.text

        ask()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = ("inputs", "input", "text_1", "text_2", "query", "texts", "parameters", "budget", "deadline_ms", "outputs", "id")
PATHS = ("/", "/v1/predict", "/predict", "/rerank", "/classify", "/score", "/v2/models/classification/infer")


@settings(max_examples=60, database=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4) | JSON | st.binary())
def test_garbage_is_refused(address: str, path: str, body: Any) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
    response = httpx.post(address + path, content=content)
    assert response.status_code < 500, response.text
    json.loads(response.content)
