"""What tasks over one text or a pair of texts share: their columns, checks of them, encoding, errors of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from offramp.data.readers import require_columns
from offramp.data.tokenization import Encoded, encode_text_windows, encode_texts
from offramp.errors import OfframpError
from offramp.tasks import Task

if TYPE_CHECKING:
    from typing_extensions import Self

    from offramp.data.tokenization import Tokenizer

Rows = Sequence[Mapping[str, Any]]
SINGLE, PAIR = ("text",), ("text_a", "text_b")


class TextTask(Task):
    """A task with one answer per text or pair of texts; a subclass has the field `texts`, the columns that are read."""

    texts: tuple[str, ...]

    kind: ClassVar[Literal["row", "token"]] = "row"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    pipeline: ClassVar[str] = "text-classification"

    @classmethod
    def columns_for(cls, rows: Rows) -> tuple[str, ...]:
        return text_columns(rows)

    @property
    def input_columns(self) -> tuple[str, ...]:
        return self.texts

    def check_inputs(self, rows: Rows, source: str) -> None:
        check_texts(rows, self.texts, source)

    def encode(self, tokenizer: Tokenizer, rows: Rows, max_length: int) -> list[Encoded]:
        return encode_columns(tokenizer, rows, self.texts, max_length)

    def encode_windows(self, tokenizer: Tokenizer, rows: Rows, max_length: int) -> list[Encoded]:
        return encode_column_windows(tokenizer, rows, self.texts, max_length)


class LabelTask(TextTask):
    """A task whose answers are of a fixed list; a subclass has the field `labels`, in the order of the logits."""

    labels: tuple[Any, ...]

    provides: ClassVar[frozenset[str]] = frozenset({"distribution", "example_error", "one answer a row"})

    @property
    def outputs(self) -> int:
        return len(self.labels)

    @property
    def scored_labels(self) -> tuple[Any, ...]:
        return self.labels

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "labels": list(self.labels), "texts": list(self.texts)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(**{name: tuple(content[name]) for name in ("labels", "texts")})

    def with_model_labels(self, names: Sequence[str]) -> Self | None:
        order = label_order(self.labels, names)
        if order is None:
            return None
        return replace(self, labels=tuple(self.labels[place] for place in order))  # type: ignore[type-var]  # a dataclass


def label_config(labels: Sequence[str], problem_type: str) -> dict[str, Any]:
    """Return what a Hugging Face configuration keeps of labels in the order of the logits."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
        "problem_type": problem_type,
    }


def model_labels(config: Mapping[str, Any]) -> list[str]:
    """Return the labels of a Hugging Face model in the order of its outputs."""
    named = config.get("id2label")
    if isinstance(named, Mapping) and named:
        return [str(label) for _, label in sorted(named.items(), key=lambda item: int(item[0]))]
    return [f"LABEL_{index}" for index in range(int(config.get("num_labels") or 2))]


def text_columns(rows: Rows) -> tuple[str, ...]:
    """Return the columns of a pair if the first row has either of them and no single text, else the single text."""
    pair = bool(rows) and "text" not in rows[0] and any(column in rows[0] for column in PAIR)
    return PAIR if pair else SINGLE


def check_texts(rows: Rows, columns: Sequence[str], source: str) -> None:
    """Raise an error if one of these columns is not a non-empty text in every row."""
    require_columns(rows, columns, source)
    for number, row in enumerate(rows, 1):
        for column in columns:
            text = row[column]
            if not isinstance(text, str):
                given = f"{column!r} is a {type(text).__name__}, not a text"
                raise row_error(source, number, given, "write it as a string, or choose another column: --column")
            if not text.strip():
                raise row_error(source, number, f"{column!r} is empty", "remove the row or fill it in")
            check_unicode(text, column, source, number)


def check_unicode(text: str, column: str, source: str, number: int) -> None:
    """Raise an error if a text holds half of a surrogate pair, as bytes that are no UTF-8 do: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        given = f"{column!r} is no valid text: {text[error.start]!a} at place {error.start + 1}"
        raise row_error(source, number, given, "remove that character, or read the bytes as UTF-8") from error


def encode_columns(tokenizer: Tokenizer, rows: Rows, columns: Sequence[str], max_length: int) -> list[Encoded]:
    """Return single texts or pairs as token ids, one `Encoded` a row."""
    first = [row[columns[0]] for row in rows]
    second = [row[columns[1]] for row in rows] if len(columns) > 1 else None
    return encode_texts(tokenizer, first, second, max_length)


def encode_column_windows(tokenizer: Tokenizer, rows: Rows, columns: Sequence[str], max_length: int) -> list[Encoded]:
    """Return single texts as token ids, long ones in windows."""
    if len(columns) > 1:
        fix = "use --long truncate, or split the inputs yourself"
        raise OfframpError("windows of long inputs", f"pairs of texts: {' and '.join(columns)}", fix)
    return encode_text_windows(tokenizer, [row[columns[0]] for row in rows], max_length)


def label_order(labels: Sequence[Any], names: Sequence[str]) -> list[int] | None:
    """Return which label belongs to each output of a model, whose outputs have these names; None if they differ.

    Labels are compared as texts, then without regard to case. Labels 0, 1, 2 … are the numbers of the outputs.
    """
    texts = [str(label) for label in labels]
    for form in (str, str.casefold):
        places = {form(text): place for place, text in enumerate(texts)}
        if len(places) == len(names) == len(labels) and places.keys() == {form(name) for name in names}:
            return [places[form(name)] for name in names]
    numbers = {str(int(label)) if isinstance(label, bool) else str(label): at for at, label in enumerate(labels)}
    wanted = [str(number) for number in range(len(names))]
    return [numbers[number] for number in wanted] if numbers.keys() == set(wanted) else None


def row_error(source: str, number: int, given: str, fix: str) -> OfframpError:
    """Return the error for one row of a source."""
    return OfframpError(f"use the rows of {source}", f"row {number}: {given}", fix)
