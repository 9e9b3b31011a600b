"""One tag per word. The first token of a word carries its tag; the other tokens have no label.

Words without a token of their own (truncated, or of characters that the tokenizer drops) are tagged "O".

Entities are counted as CoNLL's script and seqeval's default mode do: B- begins an entity, I- continues one of the same
type and otherwise begins one (so that a missing B- is not counted twice); E- and S- of IOBES are understood. An
entity counts only with its exact words and its exact type.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from offramp.data.readers import require_columns
from offramp.data.tokenization import Encoded, encode_words
from offramp.errors import OfframpError
from offramp.tasks import IGNORED_TARGET, Reduction, Row, Rows, Task, _loss
from offramp.tasks._texts import check_unicode, label_order, model_labels, row_error

if TYPE_CHECKING:
    from typing_extensions import Self

    from offramp.data.tokenization import Tokenizer

OUTSIDE = "O"
WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")  # of a raw sentence: words, and other characters one by one
Entity = tuple[str, int, int]  # type, first word, last word


@dataclass(frozen=True)
class TaggingTask(Task):
    """Tags in the order of the logits."""

    tags: tuple[str, ...]

    name: ClassVar[str] = "tagging"
    kind: ClassVar[Literal["row", "token"]] = "token"
    auto_class: ClassVar[str] = "AutoModelForTokenClassification"
    pipeline: ClassVar[str] = "token-classification"
    target: ClassVar[str] = "tags"
    answer: ClassVar[str] = "tags"
    words: ClassVar[str] = "tokens"
    provides: ClassVar[frozenset[str]] = frozenset({"distribution", "example_error", "words"})

    @property
    def metric(self) -> str:
        """Entity F1 if the tags mark entities (B-PER), otherwise accuracy over words (parts of speech)."""
        return "entity_f1" if any(marks_entity(tag) for tag in self.tags) else "accuracy"

    @classmethod
    def columns_for(cls, rows: Rows) -> tuple[str, ...]:
        return ("tokens",)

    @classmethod
    def from_rows(cls, rows: Rows, source: str) -> Self:
        _check_words(rows, source)
        _check_tags(rows, source)
        tags = {tag for row in rows for tag in row["tags"]}
        if len(tags) < 2:
            given = f"{len(rows)} rows with " + (f"one tag only: {', '.join(tags)}" if tags else "no tag")
            raise OfframpError(f"tags to tell apart in {source}", given, "give rows with at least two tags")
        return cls(tuple(sorted(tags, key=lambda tag: (tag != OUTSIDE, tag))))

    def check_rows(self, rows: Rows, source: str) -> None:
        _check_words(rows, source)
        _check_tags(rows, source)
        for number, row in enumerate(rows, 1):
            for tag in row["tags"]:
                if tag not in self._index:
                    given = f"the tag {tag!r}, which the training rows lack; they have {', '.join(self.tags)}"
                    raise row_error(
                        source, number, given, "correct the tag, remove the row, or train on rows that have it"
                    )

    def check_inputs(self, rows: Rows, source: str) -> None:
        """Check words, or raw sentences in the column `text`."""
        for number, row in enumerate(rows, 1):
            if isinstance(raw := _raw_text(row), str):
                if not raw.strip():
                    raise row_error(source, number, "the sentence is empty", "remove the row or fill it in")
                check_unicode(raw, "text", source, number)
        _check_words([{"tokens": words_of_row(row)} if _raw_text(row) is not None else row for row in rows], source)

    @property
    def outputs(self) -> int:
        return len(self.tags)

    def config(self) -> dict[str, Any]:
        return {"num_labels": self.outputs, "id2label": dict(enumerate(self.tags)), "label2id": dict(self._index)}

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "tags": list(self.tags)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(tuple(content["tags"]))

    @classmethod
    def from_model(cls, config: Mapping[str, Any], texts: Sequence[str]) -> Self | None:
        return cls(tuple(model_labels(config))) if cls.has_head(config) else None

    def with_model_labels(self, names: Sequence[str]) -> Self | None:
        order = label_order(self.tags, names)
        return None if order is None else replace(self, tags=tuple(self.tags[place] for place in order))

    def words_of(self, row: Row) -> Sequence[str]:
        return words_of_row(row)

    def encode(self, tokenizer: Tokenizer, rows: Rows, max_length: int) -> list[Encoded]:
        return encode_words(tokenizer, [words_of_row(row) for row in rows], max_length)

    def inputs_and_targets(self, encoded: Encoded, row: Row, rng: random.Random | None) -> tuple[list[int], list[int]]:
        targets = [IGNORED_TARGET] * len(encoded.ids)
        for place, word in _first_tokens(encoded):
            targets[place] = self._index[row["tags"][word]]
        return encoded.ids, targets

    def stack_targets(self, targets: Sequence[list[int]]) -> Tensor:
        return _loss.concatenate_targets(targets)

    def loss(self, logits: Tensor, targets: Tensor, lengths: Tensor, reduction: Reduction = "mean") -> Tensor:
        return _loss.token_loss(logits, targets, lengths, reduction)

    def distributions(
        self, logits: Tensor, lengths: Tensor, scored: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return _loss.token_distributions(logits, lengths, scored)

    def example_error(self, logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """Return 1 for rows in which any word has a wrong tag."""
        wrong = ((logits.argmax(-1) != targets) & (targets != IGNORED_TARGET)).float()  # [tokens]
        return wrong.new_zeros(len(lengths)).scatter_reduce(0, _loss.row_of_token(lengths), wrong, "amax")

    def predictions(self, rows: Rows, encoded: Sequence[Encoded], logits: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        answers = []
        for row, item, scores in zip(rows, encoded, logits, strict=True):
            best = scores.argmax(axis=1).tolist()  # [tokens]
            tags = [OUTSIDE] * len(words_of_row(row))
            for place, word in _first_tokens(item):
                tags[word] = self.tags[best[place]]
            answers.append({"tags": tags})
        return answers

    def add_details(
        self,
        predictions: Sequence[dict[str, Any]],
        rows: Rows,
        encoded: Sequence[Encoded],
        logits: Sequence[np.ndarray],
    ) -> None:
        """Add the entities, with characters start…end of the sentence; of a raw sentence also its words.

        Words that were given as a list are joined by spaces. The score of an entity is the mean probability of its
        words' tags.
        """
        for prediction, row, item, scores in zip(predictions, rows, encoded, logits, strict=True):
            raw, words = _raw_text(row), words_of_row(row)
            if raw is not None:
                prediction["tokens"] = list(words)
            if self.metric == "entity_f1":
                text, spans = sentence_of_row(row)
                prediction["entities"] = _scored_entities(prediction["tags"], text, spans, item, scores)

    def pipeline_answer(
        self,
        row: Row,
        prediction: Row,
        encoded: Sequence[Encoded],
        logits: Sequence[np.ndarray],
        parameters: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Return tagged words, or (unless the strategy is none) entities joined from words with B- and I- tags."""
        text, spans = sentence_of_row(row)
        scores = _word_scores(encoded[0], logits[0], len(spans))
        words = list(zip(prediction["tags"], scores, spans, strict=True))
        given = parameters.get("ignore_labels")
        ignored = [OUTSIDE] if given is None else given
        if parameters.get("aggregation_strategy") == "none":
            return [
                {"entity": tag, "score": score, "index": i, "word": text[a:b], "start": a, "end": b}
                for i, (tag, score, (a, b)) in enumerate(words, 1)
                if tag not in ignored
            ]
        groups: list[tuple[str, list[float], int, int]] = []
        before = OUTSIDE
        for tag, score, (start, end) in words:
            kind = tag[2:] if marks_entity(tag) else tag
            joined = groups and tag[:2] in ("I-", "E-") and marks_entity(before) and before[2:] == kind
            if joined:
                groups[-1] = (kind, [*groups[-1][1], score], groups[-1][2], end)
            elif tag not in ignored and kind not in ignored:
                groups.append((kind, [score], start, end))
            before = tag
        return [
            {"entity_group": kind, "score": sum(own) / len(own), "word": text[a:b], "start": a, "end": b}
            for kind, own, a, b in groups
        ]

    def disagreement(self, predictions: Sequence[Row], full: Sequence[Row]) -> list[float]:
        pairs = ((a["tags"], b["tags"]) for a, b in zip(predictions, full, strict=True))
        return [sum(x != y for x, y in zip(a, b, strict=True)) / max(1, len(b)) for a, b in pairs]

    def metrics(self, rows: Rows, predictions: Sequence[Row]) -> dict[str, float]:
        """Return accuracy over words, and entity F1 if the tags mark entities."""
        true = [row["tags"] for row in rows]
        predicted = [prediction["tags"] for prediction in predictions]
        pairs = [pair for both in zip(true, predicted, strict=True) for pair in zip(*both, strict=True)]
        scores = {"accuracy": sum(tag == guess for tag, guess in pairs) / max(1, len(pairs))}
        return scores if self.metric == "accuracy" else {"entity_f1": entity_f1(true, predicted), **scores}

    def majority_predictions(self, rows: Rows) -> list[dict[str, Any]] | None:
        counts = Counter(tag for row in rows for tag in row["tags"]).most_common(1)
        return [{"tags": [counts[0][0]] * len(row["tags"])} for row in rows] if counts else None

    @cached_property
    def _index(self) -> dict[str, int]:
        return {tag: index for index, tag in enumerate(self.tags)}


def sentence_of_row(row: Row) -> tuple[str, list[tuple[int, int]]]:
    """Return the sentence of a row, and the first and last character of each of its words.

    This is where a raw sentence is split, whoever asks. Words that were given as a list are joined by spaces.
    """
    raw = _raw_text(row)
    if raw is not None:
        return raw, [found.span() for found in WORD.finditer(raw)]
    spans, start = [], 0
    for word in row["tokens"]:
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return " ".join(row["tokens"]), spans


def words_of_row(row: Row) -> Sequence[str]:
    """Return the words of a row: its tokens, or those of its raw sentence."""
    if _raw_text(row) is None:
        words: Sequence[str] = row["tokens"]
        return words
    text, spans = sentence_of_row(row)
    return [text[start:end] for start, end in spans]


def _raw_text(row: Row) -> str | None:
    """Return the sentence of a row that is not split into words; None if it is."""
    given = row.get("tokens")
    if given is None:
        given = row.get("text")
    return given if isinstance(given, str) else None


def _scored_entities(
    tags: Sequence[str], text: str, spans: Sequence[tuple[int, int]], encoded: Encoded, logits: np.ndarray
) -> list[dict[str, Any]]:
    """Return the entities of one sentence as users read them."""
    raw = logits.astype(np.float64)
    best = 1.0 / np.exp(raw - raw.max(axis=1, keepdims=True)).sum(axis=1)  # [tokens], probability of the best tag
    certainty = {word: float(best[place]) for place, word in _first_tokens(encoded)}
    found = []
    for kind, first, last in entities(tags):
        start, end = spans[first][0], spans[last][1]
        scores = [certainty[word] for word in range(first, last + 1) if word in certainty]
        score = sum(scores) / max(1, len(scores))
        found.append({"type": kind, "text": text[start:end], "start": start, "end": end, "score": score})
    return found


def _word_scores(encoded: Encoded, logits: np.ndarray, words: int) -> list[float]:
    """Return the probability of each word's tag, that of its first token; 0 for words without a token."""
    raw = logits.astype(np.float64)
    exponentials = np.exp(raw - raw.max(axis=1, keepdims=True))
    best = (exponentials.max(axis=1) / exponentials.sum(axis=1)).tolist()
    scores = [0.0] * words
    for place, word in _first_tokens(encoded):
        scores[word] = best[place]
    return scores


def _first_tokens(encoded: Encoded) -> Iterator[tuple[int, int]]:
    """Yield the place of each word's first token, and the word."""
    before = -1
    for place, word in enumerate(encoded.words):
        if word not in (-1, before):
            yield place, word
        before = word


def _check_words(rows: Rows, source: str) -> None:
    require_columns(rows, ["tokens"], source)
    for number, row in enumerate(rows, 1):
        words = row["tokens"]
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            raise row_error(source, number, "'tokens' is not a list of words", 'write it as ["EU", "rejects", …]')
        if not any(word.strip() for word in words):
            raise row_error(source, number, "'tokens' is empty", "remove the row or fill it in")
        check_unicode(" ".join(words), "tokens", source, number)


def _check_tags(rows: Rows, source: str) -> None:
    require_columns(rows, ["tags"], source)
    for number, row in enumerate(rows, 1):
        words, tags = row["tokens"], row["tags"]
        if not isinstance(tags, list | tuple) or not all(isinstance(tag, str) for tag in tags):
            raise row_error(source, number, "'tags' is not a list of tag names", 'write it as ["B-ORG", "O", …]')
        if len(words) != len(tags):
            raise row_error(source, number, f"{len(words)} tokens but {len(tags)} tags", "give every token one tag")


def marks_entity(tag: str) -> bool:
    """Return whether a tag is part of an entity."""
    return tag[:2] in ("B-", "I-", "E-", "S-")


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of one sentence, in order."""
    found: list[Entity] = []
    before = "O"
    for place, tag in enumerate(tags):
        if marks_entity(tag):
            continues = tag[0] in "IE" and before[:2] in ("B-", "I-") and before[2:] == tag[2:]
            start = found.pop()[1] if continues else place
            found.append((tag[2:], start, place))
        before = tag
    return found


def entity_f1(true: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> float:
    """Return F1 over all entities of all sentences (micro average); 0 when there are none at all."""
    correct = total = 0
    for true_tags, predicted_tags in zip(true, predicted, strict=True):
        expected, found = set(entities(true_tags)), set(entities(predicted_tags))
        correct += len(expected & found)
        total += len(expected) + len(found)
    return 2 * correct / total if total else 0.0
