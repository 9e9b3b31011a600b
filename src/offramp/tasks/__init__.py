"""Tasks, one file each: what a target is, what the loss is, what a prediction is, how it is scored.

A task is found by its file: `names()` lists the folder (files that begin with an underscore are shared helpers), and
`get(name)` returns the one subclass of `Task` that the file defines. To add a task, write `tasks/<name>.py` with a
frozen dataclass that implements the class below, and nothing else: training, serving and the others know a task by what
it declares, never by its name. Importing this package does not import torch; importing a task does.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
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
WindowPool = Literal["mean", "max"]
IGNORED_TARGET = -100  # the target of tokens without a label
LOOKED_AT = 100  # rows by which a task is guessed
FALLBACK = "classification"  # the task of rows and of models that look like no other
RENAMED = {"span": "question_answering"}  # former task name → today's; run folders are mapped by inference/format1.py


class Task(ABC):
    """What the trainer and the predictor know of a task; implementations are frozen dataclasses."""

    name: ClassVar[str]
    kind: ClassVar[Literal["row", "token", "sequence"]]  # logits [rows, C], packed [tokens, C]; or text is generated
    auto_class: ClassVar[str]  # the class of transformers whose head is the last exit
    pipeline: ClassVar[str]  # what the hub calls such models
    target: ClassVar[str] = "label"  # the column that rows to predict on may lack; "" if there is none
    answer: ClassVar[str] = "label"  # the field of a prediction that holds its answer
    words: ClassVar[str] = ""  # the column of words, of a task that also takes a raw sentence and splits it itself
    truncates: ClassVar[bool] = True  # rows that are too long are cut or read in windows; False: they are refused
    over_vocabulary: ClassVar[bool] = False  # `outputs` is 0: logits are tokens, of a head that pretrained models have
    serves_pipeline: ClassVar[bool] = True  # there is an answer in the form of the transformers pipeline
    vocabulary: int = 0  # pieces of the tokenizer, of tasks that need them
    higher_is_better: ClassVar[bool] = True  # of `metric`
    scale: ClassVar[float] = 1.0  # the best value of `metric`: points and losses are counted in hundredths of it
    scores_by_loss: ClassVar[bool] = False  # evaluate with metrics_from_losses instead of metrics
    disagreement_is_binary: ClassVar[bool] = False  # disagreements are 0 or 1, never in between
    provides: ClassVar[frozenset[str]] = frozenset({"distribution", "example_error"})  # what methods may need

    @classmethod
    @abstractmethod
    def columns_for(cls, rows: Rows) -> tuple[str, ...]:
        """Return the text columns that are read from rows like these."""

    @classmethod
    def recognises(cls, row: Row) -> bool:
        """Return whether a labelled row looks like one of this task: by default by the columns it needs."""
        return bool(cls.target) and all(column in row for column in (*cls.columns_for([row]), cls.target))

    @property
    def input_columns(self) -> tuple[str, ...]:
        """The columns a row to predict on must have, in the order in which a caller may give them without names."""
        return self.columns_for([])

    @classmethod
    @abstractmethod
    def from_rows(cls, rows: Rows, source: str) -> Self:
        """Check training rows and return the task that they define (labels, tags, one text or two)."""

    @abstractmethod
    def check_rows(self, rows: Rows, source: str) -> None:
        """Raise an error that names the row if another labelled split does not fit this task."""

    @abstractmethod
    def check_inputs(self, rows: Rows, source: str) -> None:
        """Raise an error that names the row if rows to predict on do not fit this task; labels are not needed."""

    @property
    @abstractmethod
    def metric(self) -> str:
        """The key of `metrics` that chooses the best checkpoint."""

    def with_metric(self, name: str) -> Task:
        """Return the task with another of its metrics to choose epochs and operating points by."""
        if name != self.metric:
            raise OfframpError(f"a metric of the task {self.name!r}", repr(name), f"use {self.metric}")
        return self

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Logits per row or token; 0 means as many as the vocabulary of the model."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return arguments for `AutoConfig.from_pretrained`, so that plain transformers has the labels too."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the whole task for `offramp.json`; `get(d["name"]).from_json(d)` is the inverse."""

    @classmethod
    @abstractmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the task that `to_json` described."""

    @classmethod
    def has_head(cls, config: Mapping[str, Any]) -> bool:
        """Return whether a model has the head of this task, by the class that its config.json names."""
        return str((config.get("architectures") or [""])[0]).endswith(cls.auto_class.removeprefix("AutoModel"))

    @classmethod
    def from_model(cls, config: Mapping[str, Any], texts: Sequence[str]) -> Self | None:
        """Return the task of a fine-tuned Hugging Face model by its config.json; None if that is another task's.

        `texts` are the columns to read. By default no foreign model is taken for one of this task; runs of Offramp name
        their task themselves.
        """
        return None

    def with_tokenizer(self, tokenizer: Tokenizer) -> Task:
        """Return the task with what it must know of the tokenizer; most tasks need nothing."""
        return self

    def with_model_labels(self, names: Sequence[str]) -> Task | None:
        """Return the task with its labels in the order of a model's outputs; None if the model has other labels."""
        return self if len(names) == self.outputs else None

    def with_known_label(self, row: Row) -> Row:
        """Return a labelled row with the task's own name of its label; numbers may stand for the model's order."""
        return row

    def words_of(self, row: Row) -> Sequence[str]:
        """Return the words of a row, those of a raw sentence as the task splits it; for tasks with `words`."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def encode(self, tokenizer: Tokenizer, rows: Rows, max_length: int) -> list[Encoded]:
        """Return token ids: one `Encoded` a row in order, or several with the same `example` (windows)."""

    def encode_windows(self, tokenizer: Tokenizer, rows: Rows, max_length: int) -> list[Encoded]:
        """Return token ids of rows in windows, so that nothing is cut; `pool_windows` joins what they give."""
        given, fix = f"the task {self.name!r}, which cuts them", "use --long truncate, or split the inputs yourself"
        raise OfframpError("windows of long inputs", given, fix)

    def pool_windows(self, windows: np.ndarray, pool: WindowPool) -> np.ndarray:
        """Return the logits [C] of a row from those of its windows [windows, C]."""
        raise NotImplementedError(self.name)

    def check_encoded(self, encoded: Sequence[Encoded], max_length: int, source: str) -> None:  # noqa: B027  # optional
        """Raise an error for rows that turn out unusable only as token ids; most tasks truncate them instead."""

    @abstractmethod
    def inputs_and_targets(self, encoded: Encoded, row: Row, rng: random.Random | None) -> tuple[list[int], Any]:
        """Return the ids that enter the model in training, and the target; without `rng` always the same ones."""

    @abstractmethod
    def stack_targets(self, targets: Sequence[Any]) -> torch.Tensor:
        """Return the targets of a batch as one tensor; per-token targets are concatenated, as packed tokens are."""

    @abstractmethod
    def loss(
        self, logits: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, reduction: Reduction = "mean"
    ) -> torch.Tensor:
        """Return the mean over labelled items, or ("rows") one loss per row; in float32 under autocast too."""

    def distributions(
        self, logits: torch.Tensor, lengths: torch.Tensor, scored: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the choices that make a row's answer as logits [n, C], and the row of each ([n]; None: one per row).

        `scored` [tokens] marks the tokens that carry an answer (the first of each word); by default all of them.
        """
        return logits, None

    def example_error(self, logits: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return how wrong each row's answer is, 0…1: what a learned exit unit is trained to predict."""
        raise NotImplementedError(self.name)

    def answer_scores(self, logits: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the score of the right answer of each row: by default its log-likelihood; a task with one logit for
        the answer returns that."""  # [rows]
        return -self.loss(logits, targets, lengths, "rows")

    def target_classes(self, targets: torch.Tensor) -> torch.Tensor:
        """Return stacked targets as classes, one each (negative: none), or as a matrix [rows, labels] of 0 and 1."""
        return targets

    def disagreement(self, predictions: Sequence[Row], full: Sequence[Row]) -> list[float]:
        """Return how far each prediction is from the full model's, 0…1: the loss that a risk guarantee bounds."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def predictions(self, rows: Rows, encoded: Sequence[Encoded], logits: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Return one prediction per row, in order; `logits[i]` is [C] or [tokens, C] and belongs to `encoded[i]`."""

    def add_details(  # noqa: B027  # optional
        self,
        predictions: Sequence[dict[str, Any]],
        rows: Rows,
        encoded: Sequence[Encoded],
        logits: Sequence[np.ndarray],
    ) -> None:
        """Add to predictions what only users read, so that scoring thousands of settings need not compute it."""

    @property
    def scored_labels(self) -> tuple[Any, ...]:
        """The labels that have a logit each and a score in every prediction (its field `scores`), in that order."""
        return ()

    def label_scores(self, prediction: Row) -> dict[Any, float] | None:
        """Return each label of a row with its score, None where it has none (for servers of classifiers)."""
        return dict(prediction["scores"]) if self.scored_labels else None

    def pipeline_answer(
        self,
        row: Row,
        prediction: Row,
        encoded: Sequence[Encoded],
        logits: Sequence[np.ndarray],
        parameters: Mapping[str, Any],
    ) -> dict[str, Any] | list[dict[str, Any]] | None:
        """Return what the pipeline of transformers answers for a row with these `parameters`.

        None means the scores of its labels, and where it has none, the prediction as it is.
        """
        return None

    @abstractmethod
    def metrics(self, rows: Rows, predictions: Sequence[Row]) -> dict[str, float]:
        """Return the scores of predictions against labelled rows."""

    def row_scores(self, rows: Rows, predictions: Sequence[Row]) -> list[float] | None:
        """Return the score of every row, 0…1, where `metric` is their mean; None where it is not."""
        return None

    def majority_predictions(self, rows: Rows) -> list[dict[str, Any]] | None:
        """Return the predictions of a model that always gives the most frequent answer; None where there is none."""
        return None

    def labelled(self, row: Row, prediction: Row) -> Row:
        """Return a row with a prediction as its label: what a model's own answers teach and are compared with."""
        return {**row, self.target: prediction[self.target]}

    def metrics_from_losses(self, losses: Sequence[float]) -> dict[str, float]:
        """Return the scores of tasks that are measured by their loss per row."""
        return {"loss": sum(losses) / max(1, len(losses))}


def names() -> list[str]:
    """Return the names of all tasks: the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def name_for(row: Row) -> str:
    """Return the task that a labelled row looks like; classification where it looks like none."""
    return next((task.name for task in _most_particular_first() if task.recognises(row)), FALLBACK)


def name_for_rows(rows: Iterable[Row]) -> str:
    """Return the task that the first labelled rows look like: classification where none of them looks like another."""
    found = map(name_for, itertools.islice(rows, LOOKED_AT))
    return next((name for name in found if name != FALLBACK), FALLBACK)


def for_model(config: Mapping[str, Any], texts: Sequence[str] = ("text",)) -> Task | None:
    """Return the task of a fine-tuned Hugging Face model by its config.json; None where no task knows it."""
    found = (task.from_model(config, texts) for task in _most_particular_first())
    return next((task for task in found if task is not None), None)


def has_new_head(config: Mapping[str, Any]) -> bool:
    """Return whether a model has a head that pretrained models lack: it is fine-tuned for a task already."""
    return any(task.has_head(config) for task in map(get, names()) if not task.over_vocabulary)


def _most_particular_first() -> list[type[Task]]:
    """Return all tasks in the order in which they are tried on rows and models of an unknown task.

    Those that answer a row by one label come late, of these the ones whose label has a column of its own first;
    the last one is the fallback, which takes what others leave.
    """
    known = map(get, names())
    return sorted(known, key=lambda task: (task.kind == "row", task.target == Task.target, task.name == FALLBACK))


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
