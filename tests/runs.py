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

import transformers

from tests import tiny, tiny_tokenizers

Rows = list[dict[str, Any]]
WORDS = "the a film is very who saw it what and or man woman call".split()
PRELOAD = ["offramp.cli", "offramp.study.console", "offramp.training.job", "transformers.models.bert.modeling_bert",
           "offramp.methods.deebert", "offramp.tasks.classification", "sklearn.metrics", "tests.runs"]  # fmt: skip


def model_folder(path: Path, backbone: str = "bert") -> Path:
    """A tiny pretrained model on disk: what a user gives as --model."""
    tokenizer = tiny_tokenizers.wordpiece()
    net = tiny.model(backbone, tiny.AUTO["masked_lm"], vocab_size=len(tokenizer), max_position_embeddings=64)
    transformers.logging.disable_progress_bar()
    net.save_pretrained(path)
    tokenizer.save_pretrained(path)
    transformers.logging.enable_progress_bar()
    return path


def rows(task: str, count: int, seed: int = 0) -> Rows:
    """Rows that can be learned: what is asked stands in the text. `pairs` is classification of two texts."""
    draw = random.Random(f"{task} {seed}")
    return [_row(task, draw, number) for number in range(count)]


def _row(task: str, draw: random.Random, number: int) -> dict[str, Any]:
    words = draw.choices(WORDS, k=draw.randint(2, 14))
    good = number % 2 == 0
    marked = [*words, "good" if good else "bad"]
    draw.shuffle(marked)
    text = " ".join(marked)
    if task == "classification":
        return {"text": text, "label": "good" if good else "bad"}
    if task == "pairs":
        return {"text_a": " ".join(words), "text_b": text, "label": int(good)}
    if task == "regression":
        return {"text": text, "label": len(words) / 10 + good}
    if task == "tagging":
        named = ["EU" if word in ("good", "bad") else word for word in marked]
        return {"tokens": named, "tags": ["B-ORG" if word == "EU" else "O" for word in named]}
    if task == "span":
        context = f"{text} lives in paris ."
        return {"question": "who is in it ?", "context": context, "answers": {"text": ["paris"], "answer_start": [context.index("paris")]}}  # noqa: E501
    return {"text": text}


TASKS = {"classification": "classification", "pairs": "classification", "regression": "regression",
         "tagging": "tagging", "span": "span", "masked_lm": "masked_lm"}  # kind of rows → task  # fmt: skip


def jsonl(path: Path, content: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return str(path)


def files(folder: Path) -> set[str]:
    """Everything in a folder and below, by relative path."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def start(arguments: Sequence[str], log: Path, first: Callable[[], None] | None = None) -> BaseProcess:
    """`offramp ARGUMENTS` in a process of its own, output into `log`; `first` may sabotage it from within."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    process = server.Process(target=_command, args=(list(arguments), str(log), first))
    process.start()
    return process


def finish(process: BaseProcess, seconds: float = 60.0) -> int | None:
    """Wait for a command; its exit code, negative for a signal."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the command was still running after {seconds} s")
    return process.exitcode


def _command(arguments: list[str], log: str, first: Callable[[], None] | None) -> None:
    from offramp import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server its children are forked from ignores it
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["offramp", *arguments]
    if first:
        first()
    cli.main(arguments)
