"""Tasks, one file each: what a target is, what the loss is, what a prediction is, how it is scored.

A task is discovered by its file: `names()` lists the folder (files that begin with an underscore are shared parts),
`get(name)` gives the class `Task` of that file. To add one, write `tasks/<name>.py` with a frozen dataclass `Task`
that implements the class below. Importing this package does not import torch; importing a task does.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import Self

    from offramp.data.tokenization import Tokenizer

Row = Mapping[str, Any]
Rows = Sequence[Row]
Reduction = Literal["mean", "rows"]


class Task(ABC):
    """What the trainer and the predictor know of a task; implementations are frozen dataclasses."""

    name: ClassVar[str]
    kind: ClassVar[Literal["row", "token", "sequence"]]  # logits [rows, C], packed [tokens, C]; or words are said
    auto_class: ClassVar[str]  # the class of transformers whose head is the last exit
    pipeline: ClassVar[str]  # what the hub calls such models
    target: ClassVar[str] = "label"  # the column that rows to predict on may lack; "" if there is none
    vocabulary: int = 0  # pieces of the tokenizer, of tasks that must know
    higher_is_better: ClassVar[bool] = True  # of `metric`
    scale: ClassVar[float] = 1.0  # the best value of `metric`: points and losses are counted in hundredths of it
    scores_by_loss: ClassVar[bool] = False  # evaluate with metrics_from_losses instead of metrics
    disagreement_is_binary: ClassVar[bool] = False  # departures are 0 or 1, never in between
    provides: ClassVar[frozenset[str]] = frozenset({"distribution", "example_error"})  # what methods may ask

    @classmethod
    @abstractmethod
    def columns(cls, rows: Rows) -> tuple[str, ...]:
        """The text columns that these rows would be read by."""

    @property
    def input_columns(self) -> tuple[str, ...]:
        """The columns a row to predict on must have, in the order a caller may give them without names."""
        return self.columns([])

    @classmethod
    @abstractmethod
    def from_rows(cls, rows: Rows, source: str) -> Self:
        """The task as training rows define it (labels, tags, one text or two), after checking them."""

    @abstractmethod
    def check(self, rows: Rows, source: str) -> None:
        """Another labelled split fits this task, or an error says which row does not."""

    @abstractmethod
    def check_inputs(self, rows: Rows, source: str) -> None:
        """Rows to predict on fit this task; labels are not needed."""

    @property
    @abstractmethod
    def metric(self) -> str:
        """The key of `metrics` that chooses the best checkpoint."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Logits per row or token; 0 means as many as the vocabulary of the model."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Arguments for `AutoConfig.from_pretrained`, so that plain transformers knows the labels too."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """All of the task for `offramp.json`; `get(d["name"]).from_json(d)` gives it back."""

    @classmethod
    @abstractmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""

    def with_tokenizer(self, tokenizer: Tokenizer) -> Task:
        """The task with what it must know of the tokenizer: most need nothing."""
        return self

    @abstractmethod
    def encode(self, tokenizer: Tokenizer, rows: Rows, max_length: int) -> list[Encoded]:
        """Token ids; one `Encoded` a row in order, or several with the same `example` (windows)."""

    def check_encoded(self, encoded: Sequence[Encoded], max_length: int, source: str) -> None:  # noqa: B027  # most do not
        """Refuse rows that turn out unusable only as token ids; most tasks cut them instead."""

    @abstractmethod
    def inputs_and_targets(self, encoded: Encoded, row: Row, rng: random.Random | None) -> tuple[list[int], Any]:
        """Ids as they enter the model in training and the target; without `rng` always the same ones."""

    @abstractmethod
    def stack_targets(self, targets: Sequence[Any]) -> torch.Tensor:
        """Targets of a batch as one tensor; per-token targets are concatenated, as packed tokens are."""

    @abstractmethod
    def loss(
        self, logits: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, reduction: Reduction = "mean"
    ) -> torch.Tensor:
        """The mean over labelled items, or ("rows") one loss per row; in float32 under autocast too."""

    def distributions(
        self, logits: torch.Tensor, lengths: torch.Tensor, scored: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The choices that make a row's answer, as logits [n, C], and whose row each is ([n]; None: one per row).

        `scored` [tokens] marks the tokens where answers stand (the first of each word); by default all of them.
        """
        return logits, None

    def example_error(self, logits: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """How wrong each row's answer is, 0…1: what a learned exit unit is taught."""
        raise NotImplementedError(self.name)

    def disagreement(self, predictions: Sequence[Row], full: Sequence[Row]) -> list[float]:
        """How far each prediction is from the full model's, 0…1: the loss that a risk guarantee bounds."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def predictions(self, rows: Rows, encoded: Sequence[Encoded], logits: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """One prediction per row, in order; `logits[i]` is [C] or [tokens, C] and belongs to `encoded[i]`."""

    @abstractmethod
    def metrics(self, rows: Rows, predictions: Sequence[Row]) -> dict[str, float]:
        """Scores of predictions against labelled rows."""

    def metrics_from_losses(self, losses: Sequence[float]) -> dict[str, float]:
        """Scores of tasks that are measured by their loss per row."""
        return {"loss": sum(losses) / max(1, len(losses))}


RENAMED = {"span": "question_answering"}  # former task name → today's; run folders are mapped by inference/format1.py


def names() -> list[str]:
    """Return the names of all tasks: the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def get(name: str) -> type[Task]:
    """Return the task of that name, or raise an error that lists the known ones."""
    if name in RENAMED:
        raise OfframpError("a task", f"{name!r}, a former name", f"use {RENAMED[name]}")
    if name not in names():
        raise OfframpError("a task", f"{name!r}", f"use one of: {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    classes = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__]
    (task,) = [kind for kind in classes if issubclass(kind, Task)]
    return task
