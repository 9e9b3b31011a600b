"""Old names of parts of `tests.factories`, until no test imports them."""

from __future__ import annotations

from tests.factories import LETTERS, PIECES, SPECIAL, WORDS
from tests.factories import bytelevel_tokenizer as bytelevel
from tests.factories import wordpiece_tokenizer as wordpiece

__all__ = ["LETTERS", "PIECES", "SPECIAL", "WORDS", "bytelevel", "wordpiece"]
