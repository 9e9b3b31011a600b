"""The answer to a question as a span of a context (SQuAD 1.1 and 2.0); long contexts are read in windows.

Targets are token places within a window; place 0 means "not in this window". Whether "" may be the answer is read from
the training rows: if none is unanswerable, the best span always wins, as in SQuAD 1.1.
"""

from __future__ import annotations

import random
import re
import string
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from offramp.data.readers import require_columns
from offramp.data.tokenization import Encoded, encode_windows
from offramp.tasks import Reduction, Row, Rows, Task, _loss, _texts

if TYPE_CHECKING:
    from typing_extensions import Self

    from offramp.data.tokenization import Tokenizer

LONGEST_ANSWER = 30  # tokens
SPANS_KEPT = 20  # per window, and per row
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class QuestionAnsweringTask(Task):
    """`unanswerable`: whether "" may be the answer; `stride`: tokens that two windows of one context share."""

    unanswerable: bool = False
    stride: int = 128

    name: ClassVar[str] = "question_answering"
    kind: ClassVar[Literal["row", "token"]] = "token"
    auto_class: ClassVar[str] = "AutoModelForQuestionAnswering"
    pipeline: ClassVar[str] = "question-answering"
    target: ClassVar[str] = "answers"
    answer: ClassVar[str] = "answer"
    metric: ClassVar[str] = "span_f1"
    outputs: ClassVar[int] = 2

    @classmethod
    def columns_for(cls, rows: Rows) -> tuple[str, ...]:
        return ("question", "context")

    @classmethod
    def from_rows(cls, rows: Rows, source: str) -> Self:
        task = cls()
        task.check_rows(rows, source)
        return cls(unanswerable=any(not row["answers"]["text"] for row in rows))

    def check_rows(self, rows: Rows, source: str) -> None:
        self.check_inputs(rows, source)
        require_columns(rows, ["answers"], source)
        for number, row in enumerate(rows, 1):
            _check_answers(row, source, number)

    def check_inputs(self, rows: Rows, source: str) -> None:
        _texts.check_texts(rows, self.columns_for(rows), source)

    @classmethod
    def from_model(cls, config: Mapping[str, Any], texts: Sequence[str]) -> Self | None:
        """Return the task of any model with a head for spans; whether "" may be an answer, its files do not tell."""
        return cls() if cls.has_head(config) else None

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

    def encode_windows(self, tokenizer: Tokenizer, rows: Rows, max_length: int) -> list[Encoded]:
        """Return what `encode` does: contexts are always read in windows."""
        return self.encode(tokenizer, rows, max_length)

    def inputs_and_targets(
        self, encoded: Encoded, row: Row, rng: random.Random | None
    ) -> tuple[list[int], tuple[int, int]]:
        """Return the ids and the place of the first accepted answer, if the window holds all of it."""
        answers = row["answers"]
        if not answers["text"]:
            return encoded.ids, (0, 0)
        begin = answers["answer_start"][0]
        return encoded.ids, _answer_tokens(encoded, begin, begin + len(answers["text"][0]))

    def stack_targets(self, targets: Sequence[tuple[int, int]]) -> Tensor:
        return torch.tensor(targets, dtype=torch.int64).reshape(-1, 2)  # [rows, 2]

    def loss(self, logits: Tensor, targets: Tensor, lengths: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the mean cross-entropy of start and end, each chosen among the tokens of its own row."""
        scores = _loss.pad_rows(logits.float(), lengths).log_softmax(dim=1)  # [rows, longest, 2]
        chosen = scores.gather(1, targets.unsqueeze(1)).squeeze(1)  # [rows, 2]
        return _loss.reduce_rows(-chosen.mean(dim=1), reduction)

    def distributions(
        self, logits: Tensor, lengths: Tensor, scored: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return two choices a row, the start and the end, each among all its tokens; −∞ beyond the row's own."""
        padded = _loss.pad_rows(logits.float(), lengths).transpose(1, 2)  # [rows, 2, longest]
        return padded.flatten(0, 1), torch.arange(len(lengths), device=lengths.device).repeat_interleave(2)

    def example_error(self, logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """Return 1 for rows whose start or end is wrong."""
        best = _loss.pad_rows(logits.float(), lengths).argmax(dim=1)  # [rows, 2]
        return (best != targets).any(dim=1).float()

    def predictions(self, rows: Rows, encoded: Sequence[Encoded], logits: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Return the best span over all windows of a row; `score` is its probability among the best twenty (and "")."""
        windows: list[list[tuple[Encoded, np.ndarray]]] = [[] for _ in rows]
        for item, scores in zip(encoded, logits, strict=True):
            windows[item.example].append((item, scores.astype(np.float64)))
        return [self._answer(row["context"], own) for row, own in zip(rows, windows, strict=True)]

    def pipeline_answer(
        self,
        row: Row,
        prediction: Row,
        encoded: Sequence[Encoded],
        logits: Sequence[np.ndarray],
        parameters: Mapping[str, Any],
    ) -> dict[str, Any] | list[dict[str, Any]]:
        answer = {name: prediction[name] for name in ("answer", "score", "start", "end")}
        return [answer] if (parameters.get("top_k") or 1) > 1 else answer

    def disagreement(self, predictions: Sequence[Row], full: Sequence[Row]) -> list[float]:
        pairs = zip(predictions, full, strict=True)
        return [1.0 - squad_score(a["answer"], [b["answer"]] if b["answer"] else [])[1] for a, b in pairs]

    def labelled(self, row: Row, prediction: Row) -> Row:
        answer = {"text": [prediction["answer"]], "answer_start": [prediction["start"]]}
        return {**row, "answers": answer if prediction["answer"] else {"text": [], "answer_start": []}}

    def metrics(self, rows: Rows, predictions: Sequence[Row]) -> dict[str, float]:
        scores = [
            squad_score(prediction["answer"], row["answers"]["text"])
            for row, prediction in zip(rows, predictions, strict=True)
        ]
        exact, f1 = (sum(column) / len(scores) for column in zip(*scores, strict=True))
        return {"exact_match": exact, "span_f1": f1}

    def row_scores(self, rows: Rows, predictions: Sequence[Row]) -> list[float]:
        both = zip(rows, predictions, strict=True)
        return [squad_score(prediction["answer"], row["answers"]["text"])[1] for row, prediction in both]

    def majority_predictions(self, rows: Rows) -> list[dict[str, Any]] | None:
        return [{"answer": ""}] * len(rows) if self.unanswerable else None

    def _answer(self, context: str, windows: Sequence[tuple[Encoded, np.ndarray]]) -> dict[str, Any]:
        """Return the answer of one row.

        A window that does not hold the answer gives "" a high score, so that the lowest score of "" over all windows
        counts.
        """
        found = [span for encoded, logits in windows for span in best_spans(encoded, logits)]
        if self.unanswerable:
            found.append(Span(min(float(logits[0].sum()) for _, logits in windows), 0, 0))
        best = sorted(found, key=lambda span: -span.score)[:SPANS_KEPT]
        if not best:
            return {"answer": "", "score": 0.0, "start": 0, "end": 0}
        exponentials = np.exp(np.array([span.score for span in best]) - best[0].score)
        raw = context[best[0].start : best[0].end]
        start = best[0].start + len(raw) - len(raw.lstrip())  # byte-level tokens may begin with their space
        answer = raw.strip()
        return {"answer": answer, "score": float(1 / exponentials.sum()), "start": start, "end": start + len(answer)}


def _answer_tokens(encoded: Encoded, begin: int, end: int) -> tuple[int, int]:
    """Return the first and last token of characters begin…end, or (0, 0) if the window does not hold them all."""
    inside = [place for place, word in enumerate(encoded.words) if word >= 0]
    offsets = encoded.offsets[inside[0] : inside[-1] + 1] if inside else []
    if not offsets or begin < offsets[0][0] or end > offsets[-1][1]:
        return 0, 0
    first = bisect_right(offsets, begin, key=lambda pair: pair[1])  # the first token that ends after `begin`
    last = bisect_left(offsets, end, key=lambda pair: pair[0]) - 1  # the last token that begins before `end`
    return (inside[0] + first, inside[0] + last) if first <= last else (0, 0)


def _check_answers(row: Row, source: str, number: int) -> None:
    """Raise an error if an answer is not in the context at its start; no answers at all mean unanswerable."""
    form = 'write {"text": ["…"], "answer_start": [12]}, with empty lists if there is no answer'
    answers = row["answers"]
    if not isinstance(answers, Mapping) or not {"text", "answer_start"} <= answers.keys():
        raise _texts.row_error(source, number, "'answers' has no 'text' and 'answer_start'", form)
    for name in ("text", "answer_start"):
        if isinstance(answers[name], str) or not isinstance(answers[name], Sequence):
            given = f"{name!r} of 'answers' is {answers[name]!r:.60}, no list"
            raise _texts.row_error(source, number, given, form)
    if len(answers["text"]) != len(answers["answer_start"]):
        raise _texts.row_error(source, number, "as many answers as starts are needed", form)
    for text, start in zip(answers["text"], answers["answer_start"], strict=True):
        if not isinstance(text, str) or not text.strip() or not isinstance(start, int):
            raise _texts.row_error(source, number, f"the answer {text!r} at {start!r}", form)
        found = row["context"][max(start, 0) : start + len(text)]
        if start < 0 or found != text:
            given = f"the answer {text!r} is not in the context at {start}, which has {found!r} there"
            raise _texts.row_error(source, number, given, "correct answer_start (it counts characters from 0)")


class Span(NamedTuple):
    """Characters start…end of the context; `score` is the sum of the start and end logits."""

    score: float
    start: int
    end: int


def best_spans(encoded: Encoded, logits: np.ndarray) -> list[Span]:
    """Return the best spans of a window's context by logits [tokens, 2]: every start with every end is compared."""
    inside = np.flatnonzero(np.array(encoded.words) >= 0)
    if not len(inside):
        return []
    ends = np.append(logits[inside, 1], np.full(LONGEST_ANSWER - 1, -np.inf))
    sums = logits[inside, 0][:, None] + sliding_window_view(ends, LONGEST_ANSWER)  # [starts, LONGEST_ANSWER]
    count = min(SPANS_KEPT, len(inside))  # there is at least one span for every start
    flat = sums.ravel()
    found = []
    for place in np.argpartition(-flat, count - 1)[:count]:
        first, further = divmod(int(place), LONGEST_ANSWER)
        start, end = encoded.offsets[inside[first]][0], encoded.offsets[inside[first + further]][1]
        found.append(Span(float(flat[place]), start, end))
    return found


def squad_score(answer: str, accepted: Sequence[str]) -> tuple[float, float]:
    """Return the best exact match and the best F1 over the accepted answers; none accepted means unanswerable.

    Both are as the official SQuAD 2.0 script computes them, which agrees with that of 1.1 on 1.1.
    """
    references = [reference for reference in map(normalise_answer, accepted) if reference] or [""]
    given = normalise_answer(answer)
    return float(given in references), max(_word_f1(given.split(), reference.split()) for reference in references)


def normalise_answer(answer: str) -> str:
    """Return an answer in lower case, without punctuation, articles and superfluous spaces."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def _word_f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference))
