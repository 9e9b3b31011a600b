"""What can be changed at run time, and how depths are estimated and the model is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offramp.errors import OfframpError
from offramp.methods.faster_dat.mutual_information import LEAST_INFORMATION
from offramp.methods.faster_dat.reconstruction import PENALTIES
from offramp.methods.faster_dat.word_depths import TableScope

OFTEN = 5  # occurrences from which the information of a word is trusted


@dataclass(frozen=True)
class FasterDATSettings:
    """Limits of the planned depths."""

    cap: int = 0  # the largest depth; 0: as planned
    penalty: float = -1.0  # reconstruction: another λ than in training; −1: that of training

    def __post_init__(self) -> None:
        if self.cap < 0:
            raise OfframpError("a largest depth", f"cap={self.cap}", "use 1, 2, …; 0 leaves depths as planned")
        if self.penalty != -1.0 and not 0.0 <= self.penalty <= PENALTIES[-1]:
            raise OfframpError("a penalty λ for depth", f"penalty={self.penalty}", f"use 0 to {PENALTIES[-1]:g}")


@dataclass(frozen=True)
class FasterDATOptions:
    """How depths are estimated and the model is built; fixed once trained."""

    estimation: Literal["mi", "reconstruction"] = "mi"
    layers: int = 0  # the largest depth N; 0: all layers of the model
    # mi: words that go deep have much information about the label, or (rare, as published) little
    deep: Literal["rare", "telling"] = "telling"
    smoothing: float = 0.1  # mi: added to every count
    least: float = LEAST_INFORMATION  # bins=width: words with less information count as having this much
    penalty: float = 0.1  # reconstruction: λ
    spacing: int = 8  # reconstruction: words from one mask to the next; 0: one mask per pass
    occurrences: int = 20  # reconstruction: occurrences of each word that are used, spread over the rows; 0: all
    rows: int = 5000  # reconstruction: training rows that the table is computed from; 0: all
    transductive: bool = False  # reconstruction: a pass for every word of the text to be answered, no table
    bins: Literal["running", "width"] = "running"  # mi: depths hold equal shares of the running text; or equal widths
    least_count: int = 0  # words that occur less often are not in the table; 0: 5 for mi, 1 for reconstruction
    unseen: int = 0  # depth of words not in the table; −1: their median; 0: the largest for mi, else the median
    pool: Literal["meanmax", "own"] = "meanmax"  # what the head reads; own: the model's own head
    mixed: bool = True  # fine-tune with all words at full depth first
    distil: bool = True  # mixed: planned depths learn the logits of all words at full depth beside the labels
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        for name, valid, fix in (
            ("layers", self.layers >= 0, "1, 2, …, or 0 for all layers"),
            ("smoothing", self.smoothing > 0.0, "a number above 0, e.g. 0.1"),
            ("least", 0.0 < self.least < 1.0, "a number above 0 and below 1, e.g. 1e-7"),
            ("penalty", 0.0 <= self.penalty <= PENALTIES[-1], f"0 to {PENALTIES[-1]:g}, e.g. 0.1"),
            ("spacing", self.spacing == 0 or self.spacing >= 2, "2 or more words, or 0 for one mask per pass"),
            ("occurrences", self.occurrences >= 0, "a number of occurrences, or 0 for all"),
            ("rows", self.rows >= 0, "a number of rows, or 0 for all"),
            ("least_count", self.least_count >= 0, "a number of occurrences, or 0"),
            ("unseen", self.unseen >= -1, "a depth, −1 for the median, or 0"),
            ("transductive", not self.transductive or self.estimation == "reconstruction",
             "false; or add estimation=reconstruction"),
        ):  # fmt: skip
            if not valid:
                raise OfframpError("options of faster_dat", f"{name}={getattr(self, name)}", f"use {fix}")

    def table_scope(self, layers: int) -> TableScope:
        """Return which words the table holds, in a model of so many layers, and the depth of the others.

        A word that was seen a few times has its information by accident, so the depths of rare words are not trusted;
        what a masked model reconstructs is measured even of a single occurrence.
        """
        by_information = self.estimation == "mi"
        least = self.least_count or (OFTEN if by_information else 1)
        unseen = self.unseen or (layers if by_information else -1)
        return TableScope(layers, least, max(0, unseen))
