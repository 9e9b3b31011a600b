"""Run folders written by version 0.1.0 open unchanged and give the same answers, exits and costs.

`fixtures/format1/<name>/` holds a run folder, rows, and what that version predicted for them;
`fixtures/make_format1.py` wrote them. `initial_weights.json` holds what a training with a given seed began with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import offramp

HOME = Path(__file__).parent / "fixtures" / "format1"
CASES = sorted(path.parent.name for path in HOME.glob("*/expected.json"))
ADDED_FIELDS = {"entities", "truncated"}  # of answers, since the stored ones were written
FLOATS = ("scores", "score", "value")  # compared to a tolerance; everything else exactly
NO_EXITS = {  # they drop tokens, or parts of the model
    "adapler",
    "full_regression",
    "head_pruning",
    "layerdrop",
    "length_adaptive",
    "power_bert",
    "tr_bert",
    "truncate",
}
FORMER_DEFAULTS: dict[str, dict[str, Any]] = {  # of version 0.1.0, changed since
    "alberta": {"prefix": 1, "start": 8.0, "penalty": 0.0, "cut": False, "explore": 0.0, "head": "own"},
    "depth_adaptive": {"tied": True},
    "length_adaptive": {"restore": "state"},
}
INITIAL = json.loads((HOME / "initial_weights.json").read_text(encoding="utf-8"))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def stored(name: str) -> list[dict[str, Any]]:
    """Calls of `predict` and their answers: `{"predict": {"budget": 0.5}, "answers": […]}`."""
    calls: list[dict[str, Any]] = json.loads((HOME / name / "expected.json").read_text(encoding="utf-8"))
    return calls


def check_answer(answer: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    assert answer.keys() - ADDED_FIELDS == expected.keys(), where
    for name, value in expected.items():
        if name in FLOATS:
            assert answer[name] == pytest.approx(value, abs=1e-4), f"{where}: {name}"
        elif name == "macs":
            assert answer[name] == pytest.approx(value, rel=1e-9), f"{where}: {name}"
        else:
            assert answer[name] == value, f"{where}: {name}"


def test_every_folder_is_there_and_every_one_lets_rows_differ() -> None:
    assert len(CASES) == 27, "a folder is missing, or was added without being counted here"
    exits = {name: {a["exit_layer"] for call in stored(name) for a in call["answers"]} for name in CASES}
    alone = {name for name, layers in exits.items() if len(layers) < 2}
    assert alone == NO_EXITS, "rows leave at several layers in every folder but those that only drop tokens or parts"


@pytest.mark.filterwarnings("ignore::UserWarning")  # a budget below the cheapest point, times of another machine
@pytest.mark.parametrize("batch_size", [32, 5])
@pytest.mark.parametrize("name", CASES)
def test_an_old_run_folder_gives_the_stored_answers(name: str, batch_size: int) -> None:
    model, rows = loaded(name), read_rows(HOME / name / "rows.jsonl")
    for call in stored(name):
        answers = model.predict(rows, batch_size=batch_size, **call["predict"])
        assert len(answers) == len(call["answers"]) == len(rows)
        answers = json.loads(json.dumps(answers))  # as the stored ones: labels that are numbers become text as keys
        for number, (answer, expected) in enumerate(zip(answers, call["answers"], strict=True)):
            check_answer(answer, expected, f"{name}, predict(rows, {call['predict']}), row {number}")


@cache
def loaded(name: str) -> Any:
    return offramp.load(HOME / name / "run", engine="torch")


@dataclass(frozen=True)
class Initial:
    """What a training begins with, in the order in which it was built."""

    model: Sequence[torch.Tensor]  # the Hugging Face model's
    added: Sequence[torch.Tensor]  # the method's own


def initial_weights(method: str, task: str, options: Mapping[str, Any], seed: int) -> Initial:
    """Build what `offramp train` would train, and train nothing. The only place here that knows inner names."""
    from offramp import methods, tasks
    from offramp.commands import train
    from offramp.inference import format1
    from offramp.training.schedule import Schedule

    base, rows = HOME / "base", str(HOME / "base" / f"{task}.jsonl")
    source = str(base / ("tiny.json" if task == "translation" else "tiny-bert"))
    name = tasks.RENAMED.get(task, task)
    request = train.TrainRequest(source, rows, "out", name, method, dev=rows, schedule=Schedule(seed=seed))
    former = {**FORMER_DEFAULTS.get(method, {}), **options}
    known, named = methods.get(method), {format1.OPTIONS.get(name, name): value for name, value in former.items()}
    training_rows = train.read_training_rows(request)
    built = train.build_model(request, known, methods.configure(known.options, named, method), training_rows)
    return Initial(list(built.network.hf.state_dict().values()), list(built.network.added.state_dict().values()))


def check_weights(tensors: Sequence[torch.Tensor], expected: Sequence[Sequence[Any]]) -> None:
    """By order: modules may be renamed, but not built in another order."""
    assert [list(tensor.shape) for tensor in tensors] == [shape for _, shape, _, _ in expected]
    for tensor, (name, _, total, magnitude) in zip(tensors, expected, strict=True):
        found = (float(tensor.double().sum()), float(tensor.double().abs().sum()))
        assert found == pytest.approx((total, magnitude), abs=1e-6 * (1.0 + magnitude)), name


@pytest.mark.parametrize("case", INITIAL["cases"], ids=lambda case: f"{case['method']}-{case['task']}")
def test_a_seed_gives_the_stored_initial_weights(case: dict[str, Any]) -> None:
    found = initial_weights(case["method"], case["task"], case["options"], INITIAL["seed"])
    check_weights(found.model, INITIAL["models"][case["task"]])
    check_weights(found.added, case["added"])
