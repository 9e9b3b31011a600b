"""Names of the columns that travel with packed rows and tokens: one constant each, with its type and its default.

A column is written with `packed.with_tokens(gate=…)` or `packed.with_rows(…)` and read with `packed.tokens[GATE]`. Its
writers and readers are found by searching for the constant. A method declares a column of its own in its own file.
"""

from __future__ import annotations

from typing import ClassVar

import torch


class Column(str):
    """The name of a column, with its type, the value of rows or tokens that lack it, and what it means.

    When batches are concatenated, a column that one of them lacks is filled with `default`; None means that every batch
    must have the column.
    """

    dtype: torch.dtype
    default: float | None
    meaning: str
    declared: ClassVar[dict[str, Column]] = {}

    def __new__(cls, name: str, dtype: torch.dtype, default: float | None, meaning: str) -> Column:
        """Declare a column."""
        column = super().__new__(cls, name)
        column.dtype, column.default, column.meaning = dtype, default, meaning
        cls.declared[name] = column
        return column

    @classmethod
    def value_of_dropped(cls, name: str) -> float:
        """Return what stands in a column that was added after tokens were dropped, for those: its default, else −1."""
        declared = cls.declared.get(name)
        return -1 if declared is None or declared.default is None else declared.default


# rows and tokens
ORIGIN = Column("origin", torch.int64, None, "index of the row or token in the batch as it was packed; unique")
# tokens
ID = Column("id", torch.int64, None, "vocabulary id")
TYPE = Column("type", torch.int64, None, "segment of a text pair, 0 or 1")
POSITION = Column("position", torch.int64, None, "position in the original row, also after other tokens were dropped")
WORD = Column("word", torch.int64, None, "index of the word in its row, -1 for special tokens")
SCORED = Column("scored", torch.bool, None, "whether the token is the first of a word that is answered for")
GATE = Column("gate", torch.float32, 1.0, "how much of a layer's change is applied; 0: idle, a key but not a query")
PRESENT = Column("present", torch.float32, 1.0, "soft presence in 0…1 while a method trains without dropping")
EXITED_AT = Column("exited_at", torch.int64, -1, "layer at which the token got its answer, -1: not yet")
EXIT_LOGITS = Column("exit_logits", torch.float32, 0.0, "logits of a token that has its answer")
DROPPED_AT = Column("dropped_at", torch.int64, None, "moment at which a recording saw the token dropped")
# rows
FOLD = Column("fold", torch.int64, None, "part of the training rows that the row belongs to, for cross-fitting")
THRESHOLDS = Column("thresholds", torch.float32, None, "the row's own threshold for every exit; 0 never exits")
TEMPERATURES = Column("temperatures", torch.float32, None, "what the row's logits are divided by, for every exit")
PATIENCE = Column("patience", torch.int64, None, "the row's own patience; 0 never exits")
