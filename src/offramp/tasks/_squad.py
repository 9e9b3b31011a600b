"""Exact match and F1 of an answer, as the official SQuAD 2.0 script computes them (it agrees with 1.1's on 1.1)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(answer: str) -> str:
    """Lower case, without punctuation, articles and superfluous spaces."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def score(said: str, accepted: Sequence[str]) -> tuple[float, float]:
    """The best exact match and the best F1 over the accepted answers; none accepted means unanswerable."""
    references = [answer for answer in map(normalise, accepted) if answer] or [""]
    given = normalise(said)
    return float(given in references), max(_f1(given.split(), reference.split()) for reference in references)


def _f1(said: list[str], reference: list[str]) -> float:
    if not said or not reference:
        return float(said == reference)
    common = (Counter(said) & Counter(reference)).total()
    return 2 * common / (len(said) + len(reference))
