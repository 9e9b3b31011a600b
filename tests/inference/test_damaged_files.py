"""Edited or damaged offramp.json and points.json: whatever is in them, the answer is one error, never a traceback."""

from __future__ import annotations

import copy
import json
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offramp.errors import OfframpError
from offramp.inference.operating_points import load_points
from offramp.inference.predictor import Predictor, check_settings
from offramp.inference.run_folder import load_run, read_description

VALUES: list[Any] = [None, True, -1, 0, 10**400, 0.5, "", "x", [], [1], ["a", "a"], {}, {"a": 1}, "NaN", [[[]]]]
DELETE = object()


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value, of long lists only those of the first and the last."""
    yield path
    items = list(
        content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    )
    for key, value in items if isinstance(content, dict) else [*items[:1], *items[1:][-1:]]:
        yield from places(value, (*path, key))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return None if value is DELETE else value
    result = copy.deepcopy(content)
    target = result
    for key in path[:-1]:
        target = target[key]
    if value is DELETE:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return result


def mutations(content: Any, count: int) -> list[Any]:
    every = [(path, value) for path in places(content) for value in (*VALUES, DELETE)]
    return [changed(content, *one) for one in random.Random(0).sample(every, min(count, len(every)))]


def test_damaged_points_give_one_error(run: Path) -> None:
    model, refused = load_run(run), 0
    content = json.loads((run / "points.json").read_text())
    content["default"] = {"kind": "loss", "value": 0.01}
    content["warnings"] = ["a"]
    for mutated in mutations(content, 600):
        (run / "points.json").write_text(json.dumps(mutated))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                points = load_points(run)
                check_settings(model, points)
                points.choose()
                points.choose(0.5)
            except OfframpError:
                refused += 1
    assert refused > 200


def test_damaged_descriptions_give_one_error(run: Path) -> None:
    refused, content = 0, json.loads((run / "offramp.json").read_text())
    for mutated in mutations(content, 150):
        (run / "offramp.json").write_text(json.dumps(mutated))
        try:
            model = Predictor.load(run, engine="torch")
            model.predict(["a film"], 1.0)
        except OfframpError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("max_length",), 100_000, "100000"),
        (("max_length",), 0, "max_length"),
        (("task", "labels"), ["good", "bad"], "config.json"),
        (("task", "labels"), ["bad", "good", "other"], "config.json"),
        (("task", "labels"), "bg", "task.labels"),
        (("options",), [], "options"),
        (("method",), None, "method"),
    ],
)
def test_a_wrong_description_is_named(run: Path, path: tuple[str, ...], value: Any, named: str) -> None:
    content = json.loads((run / "offramp.json").read_text())
    (run / "offramp.json").write_text(json.dumps(changed(content, path, value)))
    with pytest.raises(OfframpError) as error:
        load_run(run)
    assert named in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"', "\x00", '{"format": 2}', "[" * 10_000])
@pytest.mark.parametrize("name", ["offramp.json", "points.json"])
def test_a_file_that_is_no_description_gives_one_error(run: Path, name: str, text: str) -> None:
    (run / name).write_text(text)
    with pytest.raises(OfframpError):
        Predictor.load(run, engine="torch")


def test_settings_of_points_are_checked_when_the_run_is_opened(run: Path) -> None:
    content = json.loads((run / "points.json").read_text())
    content["points"][0]["settings"]["threshold"] = "high"
    (run / "points.json").write_text(json.dumps(content))
    with pytest.raises(OfframpError, match="threshold"):
        Predictor.load(run, engine="torch")
    assert read_description(run)["method"] == "branchynet"
