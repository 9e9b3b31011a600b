"""Old names of parts of `tests.factories` and `tests.processes`, until no test imports them."""

from __future__ import annotations

from typing import Any

from offramp.training.schedule import Schedule
from tests.factories import FILLERS as WORDS
from tests.factories import KINDS as TASKS
from tests.factories import SPLITS, model_folder
from tests.factories import labelled_rows as rows
from tests.factories import read_files as files
from tests.factories import run_folder as train
from tests.factories import write_jsonl as jsonl
from tests.processes import PRELOAD
from tests.processes import start_command as start
from tests.processes import wait_for_command as finish

Rows = list[dict[str, Any]]

__all__ = [
    "PRELOAD",
    "SPLITS",
    "TASKS",
    "WORDS",
    "Rows",
    "Schedule",
    "files",
    "finish",
    "jsonl",
    "model_folder",
    "rows",
    "start",
    "train",
]
