"""Fuzz what strangers can hand over: files of rows, the JSON files of a run folder, arguments, values in Python.

    HF_HUB_OFFLINE=1 python benchmarks/fuzz.py --seconds 600 --json results/house/fuzz.json

Hypothesis generates the cases; a target gets its share of the time. A case passes if it works or raises OfframpError
(arguments: if the command ends with a code and without a traceback). Everything else is a finding, listed once for each
kind of error and place in the code, with the smallest case that showed it. A file that exists is continued: cases and
seconds add up. The tiny model that is opened is trained here; commands run in a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import gzip
import io
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import offramp
from offramp import __version__, tasks
from offramp.cli import main as run_command
from offramp.data.readers import stream_rows
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.utils.command_line import command_line
from offramp.utils.files import read_json, write_json
from offramp.utils.hardware import hardware

PROGRAM = "python benchmarks/fuzz.py"
ROUND = 60  # cases of one call of Hypothesis
LONGEST = 300  # characters of a case that are kept
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
ENDINGS = (".jsonl", ".csv", ".tsv", ".json", ".parquet", ".jsonl.gz", ".csv.gz", ".txt")
WORDS = (
    "text",
    "label",
    "labels",
    "tokens",
    "tags",
    "question",
    "context",
    "answers",
    "src",
    "tgt",
    "data",
    "paragraphs",
)
COMMANDS = ("info", "predict", "eval", "calibrate", "explain", "report", "train", "compare", "attach")
FLAGS = ("--data", "--budget", "--max-loss", "--risk", "--latency", "--set", "--json", "--output", "--out", "--column",
         "--limit", "--batch-size", "--engine", "--precision", "--threads", "--format", "--keep", "--long", "--seed",
         "--task", "--method", "--model", "--train", "--dev", "--dev-split", "--epochs", "--lr", "--max-length",
         "--init", "--confidence", "--loss-confidence", "--percentile", "--text", "--force", "--strict", "--markdown",
         "--close-exit", "--cache", "--metric", "--exits", "--texts", "--max-disagreement",
         "--window-pool")  # fmt: skip
VALUES = ("run", "rows.jsonl", "broken.csv", "base", "missing", "new", "", ".", "-1", "0", "1", "0.5", "nan", "inf",
          "1e400", "1e-320", "9" * 400, "x", "a=b", "=", "threshold=0.3", "threshold=x", "5ms", "-", "--", "true",
          "\udcff", "é\n", "torch", "full", "branchynet", "classification", "tagging", "all", "text,label", "none",
          "json", "csv")  # fmt: skip
LIMITS = ("budget", "max_loss", "risk", "latency", "max_disagreement")
TARGETS = ("readers", "folder", "arguments", "values")
Run = Callable[[Any], None]  # one case


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
lines = st.lists(json_values.map(json.dumps) | st.text(max_size=40), max_size=6).map("\n".join)
cells = st.lists(st.lists(st.sampled_from(WORDS) | st.text(max_size=10), max_size=4).map(",".join), max_size=6).map(
    "\n".join
)
file_contents = st.binary(max_size=200) | (lines | cells).map(lambda text: text.encode("utf-8", "surrogatepass"))


def reader_cases() -> Any:
    """Return contents of files with an ending, and a task that is to read them."""
    return st.tuples(st.sampled_from(ENDINGS), file_contents, st.booleans(), st.sampled_from(sorted(tasks.names())))


def run_reader(case: Any) -> None:
    """Read a file and define a task by its rows."""
    ending, content, packed, task = case
    path = Path(f"case{ending}")
    path.write_bytes(gzip.compress(content) if packed and ending.endswith(".gz") else content)
    rows = list(stream_rows(str(path)))
    tasks.get(task).from_rows(rows, str(path))


@st.composite
def damaged_json(draw: st.DrawFn, originals: dict[str, Any]) -> tuple[str, bytes]:
    """Return the name of a JSON file of a run folder and a changed content."""
    name = draw(st.sampled_from(sorted(originals)))
    if draw(st.integers(0, 9)) == 0:
        text = json.dumps(originals[name]).encode()
        return name, text[: draw(st.integers(0, len(text)))] + draw(st.binary(max_size=8))
    content = copy.deepcopy(originals[name])
    for _ in range(draw(st.integers(1, 2))):
        place = content
        while isinstance(place, dict | list) and place:
            keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or draw(st.integers(0, 2)) == 0:
                if draw(st.integers(0, 4)) == 0:
                    del place[key]
                else:
                    place[key] = draw(json_values | st.sampled_from([inner, [inner], {"a": inner}, str(inner)]))
                break
            place = inner
    return name, json.dumps(content).encode()


def folder_target(run: Path) -> tuple[Any, Run]:
    """Return damaged files of a run folder, and opening it and predicting with it."""
    originals = {name: read_json(run / name) for name in ("offramp.json", "points.json", "config.json")}
    kept = {name: (run / name).read_bytes() for name in originals}

    def open_folder(case: Any) -> None:
        name, content = case
        (run / name).write_bytes(content)
        try:
            model = Predictor.load(run, "torch")
            model.predict(["a good film"], 0.5)
            model.predict(["a good film"], max_loss=0.01)
        finally:
            (run / name).write_bytes(kept[name])

    return damaged_json(originals), open_folder


def argument_cases() -> Any:
    """Return command lines of commands that start nothing that waits."""
    values = st.sampled_from(VALUES)
    option = st.tuples(st.sampled_from(FLAGS), values).map(list) | st.sampled_from(FLAGS).map(lambda flag: [flag])
    useful = st.sampled_from([["--data", "rows.jsonl"], ["--train", "rows.jsonl"], ["--text", "a"], ["--epochs", "1"]])
    tail = st.lists(option | useful | values.map(lambda value: [value]), max_size=5).map(
        lambda parts: list(itertools.chain(*parts))
    )
    return st.tuples(st.sampled_from(COMMANDS), st.sampled_from(["run", "rows.jsonl", "missing", ""]), tail).map(
        lambda parts: [parts[0], *([parts[1]] if parts[1] else []), *parts[2]]
    )


def run_arguments(case: Any) -> None:
    """Run a command; it must end with a code."""
    with open(os.devnull, encoding="utf-8") as nothing, contextlib.redirect_stdout(io.StringIO()):
        errors, before = io.StringIO(), sys.stdin
        sys.stdin = nothing
        try:
            with contextlib.redirect_stderr(errors):
                run_command(list(case))
        except SystemExit as end:
            if not isinstance(end.code, int | None):
                raise AssertionError(f"the command ended with {end.code!r}") from end
        finally:
            sys.stdin = before
        if "Traceback" in errors.getvalue():
            raise AssertionError(errors.getvalue()[-500:])


def value_cases() -> Any:
    """Return what `predict` is given in Python: rows of any kind, and limits of any type."""
    texts = st.text(st.characters(exclude_categories=()), max_size=40)
    rows = st.lists(texts | json_values, max_size=3) | json_values | texts
    limits = st.dictionaries(st.sampled_from(LIMITS), st.floats(0, 1) | json_values | st.just("5ms"), max_size=2)
    return st.tuples(rows, limits)


def values_target(run: Path) -> tuple[Any, Run]:
    """Return rows and limits of any kind, and predicting with them."""
    model = Predictor.load(run, "torch")

    def predict(case: Any) -> None:
        rows, limits = case
        json.dumps(model.predict(rows, **limits), allow_nan=False)

    return value_cases(), predict


def fuzz(cases: Any, run: Run, seconds: float, first_seed: int) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return how many cases ran within the time, and the findings by kind and place."""
    findings: dict[str, dict[str, Any]] = {}
    count, began, number = 0, time.monotonic(), first_seed
    while time.monotonic() - began < seconds:

        @hypothesis.seed(number)
        @settings(max_examples=ROUND, deadline=None, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(cases)
        def one_round(case: Any) -> None:
            nonlocal count
            if time.monotonic() - began >= seconds:
                return
            count += 1
            try:
                run(case)
            except OfframpError:
                pass
            except Exception as error:  # what is looked for
                _note(findings, error, case)

        one_round()
        number += 1
    return count, findings


def _note(findings: dict[str, dict[str, Any]], error: Exception, case: Any) -> None:
    """Keep the shortest case of each kind of error and place."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "offramp" in Path(frame.filename).parts and "benchmarks" not in frame.filename]
    last = own[-1] if own else frames[-1]
    place = "/".join(Path(last.filename).parts[-2:])
    key = f"{type(error).__name__} in {place}:{last.name}"
    shown = repr(case)[:LONGEST]
    known = findings.setdefault(key, {"times": 0, "message": str(error)[:LONGEST], "line": last.lineno, "case": shown})
    known["times"] += 1
    if len(shown) < len(known["case"]):
        known["case"] = shown


def prepare(folder: Path) -> None:
    """Write rows and train a tiny run in the current folder."""
    rows = [{"text": f"a {word} film", "label": word} for word in ("good", "bad") * 30]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    Path("broken.csv").write_text('text,label\n"a,b\n', encoding="utf-8")
    offramp.train(model="bert", from_scratch=True, shape=SHAPE, train="rows.jsonl", out=folder / "run",
                  method="branchynet", epochs=1, vocabulary=120)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Fuzz the targets in turn and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="in all")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--seed", type=int, default=0, help="the first seed of Hypothesis")
    parser.add_argument("--json", type=Path, help="the result; a file that exists is added to")
    options = parser.parse_args(arguments)
    names, target = options.targets.split(","), options.json.resolve() if options.json else None
    study: dict[str, Any] = read_json(target) if target is not None and target.is_file() else {"targets": {}}
    warnings.simplefilter("ignore")
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder) / "a" / "b"
        inside.mkdir(parents=True)
        os.chdir(inside)
        try:
            prepare(inside)
            known: dict[str, tuple[Any, Run]] = {
                "readers": (reader_cases(), run_reader),
                "folder": folder_target(inside / "run"),
                "arguments": (argument_cases(), run_arguments),
                "values": values_target(inside / "run"),
            }
            for name in names:
                cases, run = known[name]
                count, findings = fuzz(cases, run, options.seconds / len(names), options.seed)
                own = study["targets"].setdefault(name, {"cases": 0, "seconds": 0.0, "findings": {}})
                own["cases"] += count
                own["seconds"] += options.seconds / len(names)
                for key, finding in findings.items():
                    own["findings"].setdefault(key, finding)
                sys.stdout.write(f"{name}: {count} cases, {len(findings)} findings\n")
                for key, finding in findings.items():
                    sys.stdout.write(
                        f"  {key} ({finding['times']} times): {finding['message']}\n    {finding['case']}\n"
                    )
        finally:
            os.chdir(before)
    what = "Random files of rows, run-folder JSON, arguments and values: cases that raised anything but OfframpError."
    about = {"version": __version__, "hardware": hardware(), "date": datetime.date.today().isoformat()}
    study = {"what": what, **study, **about, "command": command_line(PROGRAM), "hypothesis": hypothesis.__version__}
    if target is not None:
        write_json(target, study)


if __name__ == "__main__":
    main()
