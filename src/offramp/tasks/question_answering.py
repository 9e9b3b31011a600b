"""The answer to a question as a stretch of a context (SQuAD 1.1 and 2.0); long contexts are read in windows.

Targets are token places within a window; place 0 means "not in this window". Whether "" may be answered is learned
from the training rows: if none is unanswerable, the best stretch always wins, as in SQuAD 1.1.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from offramp.data.readers import require_columns
from offramp.data.tokenization import Encoded, encode_windows
from offramp.tasks import Reduction, Row, Rows, Task, _loss, _squad, _texts
from offramp.tasks._stretch import Stretch, stretches

if TYPE_CHECKING:
    from typing_extensions import Self

    from offramp.data.tokenization import Tokenizer


@dataclass(frozen=True)
class QuestionAnsweringTask(Task):
    """unanswerable: whether "" may win; stride: tokens that two windows of one context share."""

    unanswerable: bool = False
    stride: int = 128

    name: ClassVar[str] = "question_answering"
    kind: ClassVar[Literal["row", "token"]] = "token"
    auto_class: ClassVar[str] = "AutoModelForQuestionAnswering"
    pipeline: ClassVar[str] = "question-answering"
    target: ClassVar[str] = "answers"
    metric: ClassVar[str] = "span_f1"
    outputs: ClassVar[int] = 2

    @classmethod
    def columns(cls, rows: Rows) -> tuple[str, ...]:
        return ("question", "context")

    @classmethod
    def from_rows(cls, rows: Rows, source: str) -> Self:
        task = cls()
        task.check(rows, source)
        return cls(unanswerable=any(not row["answers"]["text"] for row in rows))

    def check(self, rows: Rows, source: str) -> None:
        self.check_inputs(rows, source)
        require_columns(rows, ["answers"], source)
        for number, row in enumerate(rows, 1):
            _check_answers(row, source, number)

    def check_inputs(self, rows: Rows, source: str) -> None:
        _texts.check(rows, self.columns(rows), source)

    def config(self) -> dict[str, Any]:
        return {"num_labels": 2}

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "unanswerable": self.unanswerable, "stride": self.stride}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(bool(content["unanswerable"]), int(content["stride"]))

    def encode(self, tokenizer: Tokenizer, rows: Rows, max_length: int) -> list[Encoded]:
        questions, contexts = ([row[column] for row in rows] for column in ("question", "context"))
        return encode_windows(tokenizer, questions, contexts, max_length, self.stride)

    def inputs_and_targets(
        self, encoded: Encoded, row: Row, rng: random.Random | None
    ) -> tuple[list[int], tuple[int, int]]:
        """The first of the accepted answers, if the window holds all of it."""
        answers = row["answers"]
        if not answers["text"]:
            return encoded.ids, (0, 0)
        begin = answers["answer_start"][0]
        return encoded.ids, _places(encoded, begin, begin + len(answers["text"][0]))

    def stack_targets(self, targets: Sequence[tuple[int, int]]) -> Tensor:
        return torch.tensor(targets, dtype=torch.int64).reshape(-1, 2)  # [rows, 2]

    def loss(self, logits: Tensor, targets: Tensor, lengths: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Start and end are each chosen among the tokens of their own row."""
        scores = _loss.pad_rows(logits.float(), lengths).log_softmax(dim=1)  # [rows, longest, 2]
        chosen = scores.gather(1, targets.unsqueeze(1)).squeeze(1)  # [rows, 2]
        return _loss.reduce_rows(-chosen.mean(dim=1), reduction)

    def distributions(
        self, logits: Tensor, lengths: Tensor, scored: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Two choices a row, the start and the end, each among all its tokens; −∞ beyond the row's own."""
        padded = _loss.pad_rows(logits.float(), lengths).transpose(1, 2)  # [rows, 2, longest]
        return padded.flatten(0, 1), torch.arange(len(lengths), device=lengths.device).repeat_interleave(2)

    def example_error(self, logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """1 where the start or the end is wrong."""
        best = _loss.pad_rows(logits.float(), lengths).argmax(dim=1)  # [rows, 2]
        return (best != targets).any(dim=1).float()

    def predictions(self, rows: Rows, encoded: Sequence[Encoded], logits: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """The best stretch over all windows of a row; `score` is its share among the best twenty (and "")."""
        windows: list[list[tuple[Encoded, np.ndarray]]] = [[] for _ in rows]
        for item, scores in zip(encoded, logits, strict=True):
            windows[item.example].append((item, scores.astype(np.float64)))
        return [self._answer(row["context"], own) for row, own in zip(rows, windows, strict=True)]

    def disagreement(self, predictions: Sequence[Row], full: Sequence[Row]) -> list[float]:
        pairs = zip(predictions, full, strict=True)
        return [1.0 - _squad.score(a["answer"], [b["answer"]] if b["answer"] else [])[1] for a, b in pairs]

    def metrics(self, rows: Rows, predictions: Sequence[Row]) -> dict[str, float]:
        scores = [
            _squad.score(prediction["answer"], row["answers"]["text"])
            for row, prediction in zip(rows, predictions, strict=True)
        ]
        exact, f1 = (sum(column) / len(scores) for column in zip(*scores, strict=True))
        return {"exact_match": exact, "span_f1": f1}

    def _answer(self, context: str, windows: Sequence[tuple[Encoded, np.ndarray]]) -> dict[str, Any]:
        """One answer. Windows without it say so loudly, hence "" must beat every window: its lowest score counts."""
        found = [stretch for encoded, logits in windows for stretch in stretches(encoded, logits)]
        if self.unanswerable:
            found.append(Stretch(min(float(logits[0].sum()) for _, logits in windows), 0, 0))
        best = sorted(found, key=lambda stretch: -stretch.score)[:20]
        if not best:
            return {"answer": "", "score": 0.0, "start": 0, "end": 0}
        powers = np.exp(np.array([stretch.score for stretch in best]) - best[0].score)
        raw = context[best[0].start : best[0].end]
        start = best[0].start + len(raw) - len(raw.lstrip())  # byte-level tokens may begin with their space
        answer = raw.strip()
        return {"answer": answer, "score": float(1 / powers.sum()), "start": start, "end": start + len(answer)}


def _places(encoded: Encoded, begin: int, end: int) -> tuple[int, int]:
    """First and last token of characters begin…end, or (0, 0) if the window does not hold them all."""
    inside = [place for place, word in enumerate(encoded.words) if word >= 0]
    offsets = encoded.offsets[inside[0] : inside[-1] + 1] if inside else []
    if not offsets or begin < offsets[0][0] or end > offsets[-1][1]:
        return 0, 0
    first = bisect_right(offsets, begin, key=lambda pair: pair[1])  # the first token that ends after `begin`
    last = bisect_left(offsets, end, key=lambda pair: pair[0]) - 1  # the last token that begins before `end`
    return (inside[0] + first, inside[0] + last) if first <= last else (0, 0)


def _check_answers(row: Row, source: str, number: int) -> None:
    """Answers stand in the context where they say they do; none at all means unanswerable."""
    form = 'write {"text": ["…"], "answer_start": [12]}, with empty lists if there is no answer'
    answers = row["answers"]
    if not isinstance(answers, Mapping) or not {"text", "answer_start"} <= answers.keys():
        raise _texts.wrong(source, number, "'answers' has no 'text' and 'answer_start'", form)
    if len(answers["text"]) != len(answers["answer_start"]):
        raise _texts.wrong(source, number, "as many answers as starts are needed", form)
    for text, start in zip(answers["text"], answers["answer_start"], strict=True):
        if not isinstance(text, str) or not text.strip() or not isinstance(start, int):
            raise _texts.wrong(source, number, f"the answer {text!r} at {start!r}", form)
        there = row["context"][max(start, 0) : start + len(text)]
        if start < 0 or there != text:
            given = f"the answer {text!r} is not in the context at {start}, where it says {there!r}"
            raise _texts.wrong(source, number, given, "correct answer_start (it counts characters from 0)")
