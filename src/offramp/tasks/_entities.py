"""Entities in tags and their F1, as CoNLL's script and seqeval's default mode count them.

B- begins an entity, I- goes on with one of the same type and otherwise begins one (so taggers that forget B- are not
punished twice); E- and S- of IOBES are understood. An entity counts only with its exact words and its exact type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Entity = tuple[str, int, int]  # type, first word, last word


def is_marked(tag: str) -> bool:
    """Whether a tag is part of an entity."""
    return tag[:2] in ("B-", "I-", "E-", "S-")


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence, in order."""
    found: list[Entity] = []
    before = "O"
    for place, tag in enumerate(tags):
        if is_marked(tag):
            goes_on = tag[0] in "IE" and before[:2] in ("B-", "I-") and before[2:] == tag[2:]
            start = found.pop()[1] if goes_on else place
            found.append((tag[2:], start, place))
        before = tag
    return found


def entity_f1(true: Iterable[Sequence[str]], said: Iterable[Sequence[str]]) -> float:
    """F1 over all entities of all sentences (micro average); 0 when there are none at all."""
    right = total = 0
    for expected, given in zip(true, said, strict=True):
        ours, theirs = set(entities(expected)), set(entities(given))
        right += len(ours & theirs)
        total += len(ours) + len(theirs)
    return 2 * right / total if total else 0.0
