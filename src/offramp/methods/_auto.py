"""`--method auto`: the method and options that did best on data like this, chosen from the task and the training rows.

The choice is a rule over what is known before training: the task, one text or two, how long rows are, and whether they
have labels. docs/auto.md gives the measurements behind each line. `auto` is no method of its own: a run folder
names the method that was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offramp.tasks import Row, Task

AUTO = "auto"
LONG_ROW = 100  # words, on average, from which tokens are dropped as well as rows
ROWS_READ = 1000  # whose words are counted
BY_TASK = {  # task → method and why
    "regression": ("berxit", "answers are numbers, so a learned unit decides when a row exits"),
    "tagging": ("token_exit", "every word has its own answer and halts by itself"),
    "question_answering": ("deebert", "answers are spans: exits on a frozen model keep the full one as it is"),
    "masked_lm": ("full", "every token needs all layers to predict a vocabulary"),
    "translation": ("depth_adaptive", "words of a translation choose their depth"),
    "multi_label": ("deebert", "several labels a row"),
}


@dataclass(frozen=True)
class ChosenMethod:
    """What `auto` became: a method, its options, and why."""

    method: str
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)
    # stages after fine-tuning keep its learning rate: where tokens are dropped, the model learns to answer from few
    full_rate: bool = False


def choose_method(
    task: Task, rows: Sequence[Row], max_length: int | None = None, labelled: bool = True
) -> ChosenMethod:
    """Return the method for training rows of a task; `max_length` is where rows are cut, in tokens."""
    if task.name in BY_TASK:
        return ChosenMethod(*BY_TASK[task.name])
    words = mean_words(task, rows)
    words = words if max_length is None else min(words, max_length)
    if not labelled:
        return ChosenMethod("fastbert", "rows without labels: exits learn the model's own answers", _words_in_exits())
    if words >= LONG_ROW:
        options = {**_words_in_exits(), "bag_of_words_training": "fitted", "sandwiches": 1}
        reason = f"{words:.0f} words a row: tokens are dropped, and rows exit"
        return ChosenMethod("length_adaptive+deebert", reason, options, full_rate=True)
    if len(task.input_columns) > 1:
        reason = "pairs of texts: early exits know little, and small heads on a frozen model lose least"
        return ChosenMethod("deebert", reason, _words_in_exits())
    return ChosenMethod("fastbert", f"single texts of {words:.0f} words: distilled exits", _words_in_exits())


def mean_words(task: Task, rows: Sequence[Row]) -> float:
    """Return how many words a row has on average, in all its texts."""
    texts = [row[column] for row in rows[:ROWS_READ] for column in task.input_columns]
    counts = [len(text.split() if isinstance(text, str) else text) for text in texts]
    return sum(counts) / max(1, min(len(rows), ROWS_READ))


def _words_in_exits() -> dict[str, Any]:
    return {"bag_of_words_depth": 3}
