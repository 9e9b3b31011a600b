"""One tag per word. The first token of a word stands for it; the others carry no label and are not asked.

Words without a token of their own (cut off, or made of characters the tokenizer drops) are tagged "O".
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from offramp.data.readers import require_columns
from offramp.data.tokenization import Encoded, encode_words
from offramp.errors import OfframpError
from offramp.tasks import Reduction, Row, Rows, Task, _loss
from offramp.tasks._entities import entity_f1, is_marked
from offramp.tasks._texts import wrong

if TYPE_CHECKING:
    from typing_extensions import Self

    from offramp.data.tokenization import Tokenizer

OUTSIDE = "O"


@dataclass(frozen=True)
class TaggingTask(Task):
    """Tags in the order of the logits."""

    tags: tuple[str, ...]

    name: ClassVar[str] = "tagging"
    kind: ClassVar[Literal["row", "token"]] = "token"
    auto_class: ClassVar[str] = "AutoModelForTokenClassification"
    pipeline: ClassVar[str] = "token-classification"
    target: ClassVar[str] = "tags"
    provides: ClassVar[frozenset[str]] = frozenset({"distribution", "example_error", "words"})

    @property
    def metric(self) -> str:
        """Entities where the tags mark any (B-PER), otherwise words (parts of speech)."""
        return "entity_f1" if any(is_marked(tag) for tag in self.tags) else "accuracy"

    @classmethod
    def columns(cls, rows: Rows) -> tuple[str, ...]:
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

    def check(self, rows: Rows, source: str) -> None:
        _check_words(rows, source)
        _check_tags(rows, source)
        for number, row in enumerate(rows, 1):
            for tag in row["tags"]:
                if tag not in self._index:
                    given = f"the tag {tag!r}, which the training rows lack; they have {', '.join(self.tags)}"
                    raise wrong(source, number, given, "correct the tag, remove the row, or train on rows that have it")

    def check_inputs(self, rows: Rows, source: str) -> None:
        _check_words(rows, source)

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

    def encode(self, tokenizer: Tokenizer, rows: Rows, max_length: int) -> list[Encoded]:
        return encode_words(tokenizer, [row["tokens"] for row in rows], max_length)

    def inputs_and_targets(self, encoded: Encoded, row: Row, rng: random.Random | None) -> tuple[list[int], list[int]]:
        targets = [_loss.IGNORE] * len(encoded.ids)
        for place, word in _first_tokens(encoded):
            targets[place] = self._index[row["tags"][word]]
        return encoded.ids, targets

    def stack_targets(self, targets: Sequence[list[int]]) -> Tensor:
        return _loss.concatenate(targets)

    def loss(self, logits: Tensor, targets: Tensor, lengths: Tensor, reduction: Reduction = "mean") -> Tensor:
        return _loss.token_loss(logits, targets, lengths, reduction)

    def distributions(
        self, logits: Tensor, lengths: Tensor, scored: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return _loss.of_tokens(logits, lengths, scored)

    def example_error(self, logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """1 where any word of the row has a wrong tag."""
        wrong = ((logits.argmax(-1) != targets) & (targets != _loss.IGNORE)).float()  # [tokens]
        return wrong.new_zeros(len(lengths)).scatter_reduce(0, _loss.owners(lengths), wrong, "amax")

    def predictions(self, rows: Rows, encoded: Sequence[Encoded], logits: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        answers = []
        for row, item, scores in zip(rows, encoded, logits, strict=True):
            best = scores.argmax(axis=1).tolist()  # [tokens]
            tags = [OUTSIDE] * len(row["tokens"])
            for place, word in _first_tokens(item):
                tags[word] = self.tags[best[place]]
            answers.append({"tags": tags})
        return answers

    def disagreement(self, predictions: Sequence[Row], full: Sequence[Row]) -> list[float]:
        pairs = ((a["tags"], b["tags"]) for a, b in zip(predictions, full, strict=True))
        return [sum(x != y for x, y in zip(a, b, strict=True)) / max(1, len(b)) for a, b in pairs]

    def metrics(self, rows: Rows, predictions: Sequence[Row]) -> dict[str, float]:
        """Entity F1 only where the tags mark entities; accuracy is over words."""
        true = [row["tags"] for row in rows]
        said = [prediction["tags"] for prediction in predictions]
        pairs = [pair for ours, theirs in zip(true, said, strict=True) for pair in zip(ours, theirs, strict=True)]
        scores = {"accuracy": sum(ours == theirs for ours, theirs in pairs) / max(1, len(pairs))}
        return scores if self.metric == "accuracy" else {"entity_f1": entity_f1(true, said), **scores}

    @cached_property
    def _index(self) -> dict[str, int]:
        return {tag: index for index, tag in enumerate(self.tags)}


def _first_tokens(encoded: Encoded) -> Iterator[tuple[int, int]]:
    """The place of each word's first token, and the word."""
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
            raise wrong(source, number, "'tokens' is not a list of words", 'write it as ["EU", "rejects", …]')
        if not any(word.strip() for word in words):
            raise wrong(source, number, "'tokens' is empty", "remove the row or fill it in")


def _check_tags(rows: Rows, source: str) -> None:
    require_columns(rows, ["tags"], source)
    for number, row in enumerate(rows, 1):
        words, tags = row["tokens"], row["tags"]
        if not isinstance(tags, list | tuple) or not all(isinstance(tag, str) for tag in tags):
            raise wrong(source, number, "'tags' is not a list of tag names", 'write it as ["B-ORG", "O", …]')
        if len(words) != len(tags):
            raise wrong(source, number, f"{len(words)} tokens but {len(tags)} tags", "give every token one tag")
