"""Tiny runs: a model folder with its tokenizer, labelled rows for every task, and commands that can be killed.

Everything is made on the spot. Commands run in processes forked from a server that has imported torch already, so that
a kill-and-resume test costs a fraction of a second a process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from offramp.commands.train import TrainRequest, run_training
from offramp.inference.run_folder import quiet
from offramp.training.schedule import Schedule
from tests import tiny, tiny_tokenizers

Rows = list[dict[str, Any]]
TASKS = {  # kind of rows → task
    "classification": "classification",
    "pairs": "classification",
    "regression": "regression",
    "tagging": "tagging",
    "question_answering": "question_answering",
    "masked_lm": "masked_lm",
}
SPLITS = (("train", 48, 0), ("dev", 24, 1))  # name, rows, seed
WORDS = ["the", "a", "film", "is", "very", "who", "saw", "it", "what", "and", "or", "man", "woman", "call"]
PRELOAD = [  # what a command imports
    "offramp.cli",
    "offramp.methods.deebert",
    "offramp.cli.console",
    "offramp.tasks.classification",
    "offramp.commands.train",
    "sklearn.metrics",
    "tests.runs",
    "transformers.models.bert.modeling_bert",
]


def model_folder(path: Path, backbone: str = "bert", **config: Any) -> Path:
    """A tiny pretrained model on disk: what a user gives as --model. Rows of up to 64 tokens."""
    tokenizer = tiny_tokenizers.wordpiece()
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, **config}
    with quiet():
        tiny.model(backbone, tiny.AUTO["masked_lm"], **shape).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def rows(kind: str, count: int, seed: int = 0) -> Rows:
    """Rows that can be learned: what is asked stands in the text."""
    draw = random.Random(f"{kind} {seed}")
    return [_row(kind, draw, number % 2 == 0) for number in range(count)]


def _row(kind: str, draw: random.Random, good: bool) -> dict[str, Any]:
    words = draw.choices(WORDS, k=draw.randint(2, 14))
    marked = [*words, "good" if good else "bad"]
    draw.shuffle(marked)
    text = " ".join(marked)
    if kind == "classification":
        return {"text": text, "label": "good" if good else "bad"}
    if kind == "pairs":
        return {"text_a": " ".join(words), "text_b": text, "label": int(good)}
    if kind == "regression":
        return {"text": text, "label": len(words) / 10 + good}
    if kind == "tagging":
        tags = ["B-ORG" if word in ("good", "bad") else "O" for word in marked]
        return {"tokens": marked, "tags": tags}
    if kind == "question_answering":
        context = f"{text} lives in paris ."
        answers = {"text": ["paris"], "answer_start": [context.index("paris")]}
        return {"question": "who is in it ?", "context": context, "answers": answers}
    return {"text": text}


def train(base: str, folder: Path, method: str, kind: str = "classification", **more: Any) -> Path:
    """A finished run `folder/run`, its rows in `folder/train.jsonl` and `folder/dev.jsonl`."""
    given = {name: jsonl(folder / f"{name}.jsonl", rows(kind, count, seed)) for name, count, seed in SPLITS}
    more = {"schedule": Schedule(epochs=4, batch_size=8, lr=0.01), **more}
    run_training(TrainRequest(model=base, out=str(folder / "run"), task=TASKS[kind], method=method, **given, **more))
    return folder / "run"


def jsonl(path: Path, content: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return str(path)


def files(folder: Path) -> dict[str, bytes]:
    """Every file in a folder and below, hidden ones too, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(arguments: Sequence[str], log: Path, first: Callable[[], None] | None = None) -> BaseProcess:
    """`offramp ARGUMENTS` in a process of its own, output into `log`; `first` may sabotage it from within."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    process = server.Process(target=_command, args=(list(arguments), str(log), first))
    process.start()
    return process


def finish(process: BaseProcess, seconds: float = 60.0) -> int:
    """Wait for a command; its exit code, negative for a signal."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the command was still running after {seconds} s")
    return process.exitcode


def _command(arguments: list[str], log: str, first: Callable[[], None] | None) -> None:
    from offramp import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server it was forked from ignores Ctrl-C
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["offramp", *arguments]
    if first:
        first()
    cli.main(arguments)
