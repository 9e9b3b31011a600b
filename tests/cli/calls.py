"""Pieces of command tests: the result of a command, rows in the current folder, a short training command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests import factories


class CommandResult(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


Call = Callable[..., CommandResult]  # the fixture `call`: runs `offramp WORDS`


def write_rows(name: str, content: list[dict[str, Any]]) -> str:
    """Write rows to a file in the current folder."""
    return factories.write_jsonl(Path(name), content)


def train_words(base: str, **options: Any) -> list[str]:
    """Return a short `offramp train` command; underscores become dashes, True a bare flag."""
    if not Path("train.jsonl").exists():
        write_rows("train.jsonl", factories.labelled_rows("classification", 16))
    short = {"model": base, "train": "train.jsonl", "out": "run", "method": "full", "epochs": 1, "batch_size": 8}
    given = {**short, **options}
    words = [(f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])) for name, value in given.items()]
    return ["train", *(word for pair in words for word in pair)]
