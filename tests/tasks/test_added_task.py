"""Adding a task touches no other file: a task that is written to a folder of its own is trained, calibrated, served,
explained, written by a cluster and recognised in a plain fine-tuned model."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from rich.console import Console

import offramp
from offramp import methods, tasks
from offramp.cli.printing.explanation import print_explanation
from offramp.commands.explain import explain
from offramp.distributed.shards import added_values
from offramp.inference.finetuned import find_model, task_of_model, trained_head
from offramp.inference.predictor import Predictor
from offramp.serving.app import build_app
from offramp.serving.service import Service, ServiceSettings
from offramp.training import attach as attach_training
from tests import factories
from tests.serving.conftest import RunningServer

STARS = '''
"""One to five stars for a review: a sigmoid says of each number from 2 on whether the review has as many stars."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from offramp.tasks import Task, _loss, _texts

MOST = 5


@dataclass(frozen=True)
class StarsTask(_texts.TextTask):
    texts: tuple[str, ...] = ("review",)

    name = "stars"
    target = answer = metric = "stars"
    outputs = MOST - 1
    provides = Task.provides | {"one answer a row", "several distributions a row"}

    @classmethod
    def columns_for(cls, rows):
        return ("review",)

    @classmethod
    def from_rows(cls, rows, source):
        task = cls()
        task.check_rows(rows, source)
        return task

    def check_rows(self, rows, source):
        self.check_inputs(rows, source)
        for number, row in enumerate(rows, 1):
            if row.get("stars") not in range(1, MOST + 1):
                raise _texts.row_error(source, number, f"{row.get('stars')!r} stars", "write 1 to 5")

    def config(self):
        return _texts.label_config([f"at least {count} stars" for count in range(2, MOST + 1)], None)

    def to_json(self):
        return {"name": self.name}

    @classmethod
    def from_json(cls, content):
        return cls()

    @classmethod
    def from_model(cls, config, texts):
        known = cls.has_head(config) and _texts.model_labels(config) == list(cls().config()["id2label"].values())
        return cls() if known else None

    def inputs_and_targets(self, encoded, row, rng):
        return encoded.ids, [float(row["stars"] >= count) for count in range(2, MOST + 1)]

    def stack_targets(self, targets):
        return torch.tensor(targets, dtype=torch.float32)

    def loss(self, logits, targets, lengths, reduction="mean"):
        each = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").mean(-1)
        return _loss.reduce_rows(each, reduction)

    def distributions(self, logits, lengths, scored=None):
        choices = torch.stack((torch.zeros_like(logits), logits), dim=-1).flatten(0, 1)
        return choices, torch.arange(len(logits)).repeat_interleave(logits.shape[1])

    def example_error(self, logits, targets, lengths):
        return ((logits > 0) != (targets > 0.5)).float().mean(-1)

    def predictions(self, rows, encoded, logits):
        return [{"stars": 1 + int((one > 0).sum()), "logits": one.tolist()} for one in logits]

    def disagreement(self, predictions, full):
        return [abs(a["stars"] - b["stars"]) / (MOST - 1) for a, b in zip(predictions, full)]

    def metrics(self, rows, predictions):
        return {"stars": float(np.mean([r["stars"] == p["stars"] for r, p in zip(rows, predictions)]))}
'''

STRESS = '''
"""Which words of a sentence are stressed: as tagging, of a column with another name."""

from offramp.tasks.tagging import TaggingTask


class StressTask(TaggingTask):
    name = "stress"

    @classmethod
    def recognises(cls, row):
        return False
'''
REVIEWS = {1: "bad", 2: "not good", 3: "is", 4: "good", 5: "very good good"}
TEXTS = ["a very good good film", "the film is bad"]


def reviews(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    stars = [1 + number % 5 for number in range(count)]
    return [{"review": f"{rng.choice(factories.FILLERS)} {REVIEWS[one]} film", "stars": one} for one in stars]


@pytest.fixture(scope="module", autouse=True)
def added(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Add a folder with two tasks to those in which tasks are found."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, code in (("stars", STARS), ("stress", STRESS)):
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    tasks.__path__.append(str(folder))
    yield
    tasks.__path__.remove(str(folder))
    for name in ("stars", "stress"):
        sys.modules.pop(f"offramp.tasks.{name}", None)
        if hasattr(tasks, name):
            delattr(tasks, name)


@pytest.fixture(scope="module")
def run(base: str, added: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the new task: its name and its method follow from the rows."""
    folder = tmp_path_factory.mktemp("run")
    files = {name: factories.write_jsonl(folder / f"{name}.jsonl", reviews(n, s)) for name, n, s in factories.SPLITS}
    given: dict[str, Any] = {"epochs": 4, "batch_size": 8, "lr": 0.005}
    trained = offramp.train(model=base, out=folder / "run", **files, **given)
    assert trained.model.network.task.name == "stars" and trained.points.metric == "stars"
    return trained.folder


@pytest.fixture(scope="module")
def stress(base: str, added: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the new task of words, trained a little."""
    folder = tmp_path_factory.mktemp("stress")
    train = factories.write_jsonl(folder / "train.jsonl", factories.labelled_rows("tagging", 24))
    more: dict[str, Any] = {"method": "full", "epochs": 1, "batch_size": 8}
    return offramp.train(model=base, train=train, out=folder / "run", task="stress", **more).folder


@pytest.fixture(scope="module")
def address(run: Path, stress: Path) -> Iterator[str]:
    """A server for runs of the two tasks."""
    folders = {"stars": run, "stress": stress}
    services = [Service(name, Predictor.load(one, "torch"), ServiceSettings(slo=30.0)) for name, one in folders.items()]
    server = RunningServer(uvicorn.Config(build_app(services, None), host="127.0.0.1", port=0, log_level="critical"))
    yield server.start()
    server.end()


def post(address: str, path: str, content: Any) -> Any:
    response = httpx.post(address + path, json=content, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_task_is_found_by_its_file_and_by_its_rows() -> None:
    assert "stars" in tasks.names() and tasks.get("stars").name == "stars"
    assert tasks.name_for(reviews(1, 0)[0]) == "stars"
    assert tasks.name_for({"text": "a film", "label": 1}) == "classification"


def test_auto_chooses_a_method_that_serves_it() -> None:
    task = tasks.get("stars").from_rows(reviews(5, 0), "rows")
    for rows in (reviews(5, 0), [{"review": "word " * 200, "stars": 1}]):
        assert methods.get(methods.choose_method(task, rows).method).serves(task)


def test_its_run_is_calibrated_and_answers_within_a_budget(run: Path, tmp_path: Path) -> None:
    rows = factories.write_jsonl(tmp_path / "rows.jsonl", reviews(30, 5))
    points = offramp.calibrate(run, rows, force=True)
    assert points.metric == "stars" and set(offramp.evaluate(run, rows, budget=1.0)["metrics"]) == {"stars"}
    predictor = offramp.load(run)
    fast, full = predictor.predict(TEXTS, budget=0.5), predictor.predict(TEXTS, budget=1.0)
    assert sum(p["macs"] for p in fast) <= sum(p["macs"] for p in full)
    assert all(p["stars"] in range(1, 6) for p in fast + full)


def test_its_answer_is_a_column_of_a_cluster(run: Path) -> None:
    predictor = offramp.load(run)
    (prediction,) = predictor.predict(TEXTS[:1])
    columns = added_values(prediction, predictor.task.answer)
    assert columns["label"] == str(prediction["stars"]) and json.loads(columns["scores"]) == {
        "logits": prediction["logits"]
    }


def test_its_answers_are_served(run: Path, address: str) -> None:
    wanted = offramp.load(run).predict(TEXTS, budget=1.0)
    answer = post(address, "/v1/predict", {"inputs": TEXTS, "model": "stars", "budget": 1.0})
    assert [one["stars"] for one in answer["predictions"]] == [one["stars"] for one in wanted]
    found = post(address, "/models/stars", {"inputs": TEXTS[0], "budget": 1.0})
    assert [one["stars"] for one in found] == [wanted[0]["stars"]] and found[0]["budget"]
    metadata = httpx.get(f"{address}/v2/models/stars").json()
    assert [one["name"] for one in metadata["inputs"]] == ["review"]
    tensor = {"name": "review", "shape": [2], "datatype": "BYTES", "data": TEXTS}
    infer = {"inputs": [tensor], "parameters": {"budget": 1.0}}
    outputs = {one["name"]: one["data"] for one in post(address, "/v2/models/stars/infer", infer)["outputs"]}
    assert [json.loads(one)["stars"] for one in outputs["prediction"]] == [one["stars"] for one in wanted]
    info = httpx.get(f"{address}/info", params={"model": "stars"}).json()
    assert info["model_type"]["classifier"]["id2label"]["0"] == "at least 2 stars" and info["auto_truncate"]
    classified = httpx.post(address + "/classify", json={"model": "stars", "input": TEXTS[0]}, timeout=30)
    assert classified.status_code == 400 and "which has no label of a whole text" in classified.text


def test_a_task_of_words_is_sent_raw_sentences(stress: Path, address: str) -> None:
    text = "Anne-Marie didn't call"
    (wanted,) = offramp.load(stress).predict([text])
    (answer,) = post(address, "/v1/predict", {"inputs": [text], "model": "stress"})["predictions"]
    assert answer["tags"] == wanted["tags"] and answer["tokens"] == wanted["tokens"] == text.split()
    parameters = {"aggregation_strategy": "none", "ignore_labels": []}
    words = post(address, "/models/stress", {"inputs": text, "parameters": parameters})
    assert [(one["word"], one["entity"]) for one in words] == list(zip(text.split(), wanted["tags"], strict=True))
    metadata = httpx.get(f"{address}/v2/models/stress").json()
    assert [one["name"] for one in metadata["inputs"]] == ["text"]
    assert explain(stress, [text]).inputs == {"tokens": text.split()}
    assert '["some", "words"]' in (stress / "README.md").read_text(encoding="utf-8")


def test_its_answer_is_explained(run: Path) -> None:
    explanation = explain(run, TEXTS[:1], budget=1.0)
    (wanted,) = offramp.load(run).predict(TEXTS[:1], budget=1.0)
    assert explanation.inputs == {"review": TEXTS[0]}
    assert explanation.passes[explanation.chosen].prediction["stars"] == wanted["stars"]
    printed = io.StringIO()
    print_explanation(explanation, Console(file=printed, width=200))
    assert f"stars: {wanted['stars']}" in printed.getvalue()


def test_attach_recognises_its_models(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_training, "EPOCHS", 4)
    find_model(str(run)).copy_to(tmp_path / "plain")
    assert trained_head(str(tmp_path / "plain")) == "BertForSequenceClassification"
    texts = factories.write_jsonl(tmp_path / "texts.jsonl", [{"review": row["review"]} for row in reviews(240, 3)])
    attached = offramp.attach(tmp_path / "plain", texts, tmp_path / "attached", exits="1,2")
    ours, theirs = (offramp.load(one).predict(TEXTS, budget=1.0) for one in (attached.folder, run))
    assert [one["stars"] for one in ours] == [one["stars"] for one in theirs]
    assert np.allclose([one["logits"] for one in ours], [one["logits"] for one in theirs], atol=1e-5)


def test_a_model_of_another_task_is_not_taken_for_one_of_it() -> None:
    config = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
    assert task_of_model(config, "model").name == "classification"


def test_a_run_names_the_task_that_no_configuration_tells() -> None:
    class Choice(tasks.get("stars")):  # type: ignore[misc]  # a class that is known at run time only
        auto_class = "AutoModelForMultipleChoice"

    config, own = {"architectures": ["BertForMultipleChoice"]}, Choice()
    assert task_of_model(config, "run", own=own) is own
    with pytest.raises(offramp.OfframpError, match="BertForMultipleChoice has no head"):
        task_of_model(config, "model")
