"""`--method auto`: the method and options that did best on data like this, chosen from the task and the training rows.

The choice is a rule over what is known before training: what answers the task gives, one text or two, how long rows
are, and whether they have labels. docs/auto.md gives the measurements behind each line. `auto` is no method of its own:
a run folder names the method that was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offramp.tasks import Row, Task

AUTO = "auto"
LONG_ROW = 100  # words, on average, from which bags of words are fitted before training instead of learned with it
ROWS_READ = 1000  # whose words are counted


@dataclass(frozen=True)
class ChosenMethod:
    """What `auto` became: a method, its options, and why."""

    method: str
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)


def choose_method(
    task: Task, rows: Sequence[Row], max_length: int | None = None, labelled: bool = True
) -> ChosenMethod:
    """Return the method for training rows of a task; `max_length` is where rows are cut, in tokens."""
    if (by_answers := _method_for_answers(task)) is not None:
        return by_answers
    words = mean_words(task, rows)
    words = words if max_length is None else min(words, max_length)
    options: dict[str, Any] = {"bag_of_words_depth": 3}
    if not labelled:
        return ChosenMethod("fastbert", "rows without labels: exits learn the model's own answers", options)
    if words >= LONG_ROW:
        options["bag_of_words_training"] = "fitted"
    if len(task.input_columns) > 1:
        reason = "pairs of texts: early exits know little, and small heads on a frozen model lose least"
        return ChosenMethod("deebert", reason, options)
    return ChosenMethod("fastbert", f"single texts of {words:.0f} words: distilled exits", options)


def _method_for_answers(task: Task) -> ChosenMethod | None:
    """Return the method that the form of a task's answers decides, whatever the rows; None where a row has one choice
    among labels."""
    if task.kind == "sequence":
        return ChosenMethod("depth_adaptive", "words of a translation choose their depth")
    if task.over_vocabulary:
        return ChosenMethod("full", "every token needs all layers to predict a vocabulary")
    if "words" in task.provides:
        return ChosenMethod("token_exit", "every word has its own answer and halts by itself")
    if "distribution" not in task.provides:
        if "example_error" not in task.provides:
            return ChosenMethod("full", "answers do not tell how sure they are")
        return ChosenMethod("berxit", "answers are numbers, so a learned unit decides when a row exits")
    if task.kind == "token":
        return ChosenMethod("deebert", "answers are spans: exits on a frozen model keep the full one as it is")
    if "several distributions a row" in task.provides:
        return ChosenMethod("deebert", "several labels a row")
    return None


def mean_words(task: Task, rows: Sequence[Row]) -> float:
    """Return how many words a row has on average, in all its texts."""
    texts = [row[column] for row in rows[:ROWS_READ] for column in task.input_columns]
    counts = [len(text.split() if isinstance(text, str) else text) for text in texts]
    return sum(counts) / max(1, min(len(rows), ROWS_READ))
