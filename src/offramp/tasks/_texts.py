"""What tasks over one text or a pair of texts share: which columns, whether they are filled, encoding, row errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offramp.data.readers import require_columns
from offramp.data.tokenization import Encoded, encode_texts
from offramp.errors import OfframpError

if TYPE_CHECKING:
    from offramp.data.tokenization import Tokenizer

Rows = Sequence[Mapping[str, Any]]
SINGLE, PAIR = ("text",), ("text_a", "text_b")


def columns(rows: Rows) -> tuple[str, ...]:
    """A pair if the first row has either half of one and no single text."""
    pair = bool(rows) and "text" not in rows[0] and any(column in rows[0] for column in PAIR)
    return PAIR if pair else SINGLE


def check(rows: Rows, names: Sequence[str], source: str) -> None:
    """These columns hold text with something in it, in every row."""
    require_columns(rows, names, source)
    for number, row in enumerate(rows, 1):
        for name in names:
            text = row[name]
            if not isinstance(text, str):
                given = f"{name!r} is a {type(text).__name__}, not a text"
                raise wrong(source, number, given, "write it as a string, or choose another column: --column")
            if not text.strip():
                raise wrong(source, number, f"{name!r} is empty", "remove the row or fill it in")


def encode(tokenizer: Tokenizer, rows: Rows, names: Sequence[str], max_length: int) -> list[Encoded]:
    """Single texts or pairs, one `Encoded` a row."""
    first = [row[names[0]] for row in rows]
    second = [row[names[1]] for row in rows] if len(names) > 1 else None
    return encode_texts(tokenizer, first, second, max_length)


def wrong(source: str, number: int, given: str, fix: str) -> OfframpError:
    """The error for one row of a source."""
    return OfframpError(f"use the rows of {source}", f"row {number}: {given}", fix)
