"""The TF-IDF baseline returns a result cell like every method."""

from __future__ import annotations

import pytest

from offramp.errors import OfframpError
from offramp.evaluation.baselines import tfidf

GOOD, BAD = ["good film", "a good and fine film", "good good"], ["bad film", "a bad and poor film", "bad bad"]
ROWS = [{"text": text, "label": 1} for text in GOOD * 3] + [{"text": text, "label": 0} for text in BAD * 3]


def test_tfidf_learns_from_words() -> None:
    test = [{"text": "good", "label": 1}, {"text": "bad", "label": 0}]
    cell = tfidf(ROWS, test, ("films/train.csv", "films/test.csv"), "a command")
    assert (cell["data"], cell["split"]) == ("films", "test")
    assert cell["metrics"]["accuracy"] == 1.0 and cell["method"] == "tfidf" and cell["rows"] == 2
    assert cell["macs"] == {"mean": 0, "share_of_full": 0.0} and cell["milliseconds_a_row"] >= 0


@pytest.mark.parametrize(("deciding", "other"), [("text_a", "text_b"), ("text_b", "text_a")])
def test_tfidf_learns_from_both_texts_of_pairs(deciding: str, other: str) -> None:
    pairs = [{deciding: row["text"], other: "a film of either kind", "label": row["label"]} for row in ROWS]
    test = [{deciding: "good", other: "bad", "label": 1}, {deciding: "bad", other: "good", "label": 0}]
    assert tfidf(pairs, test, ("a", "b"), "a command")["metrics"]["accuracy"] == 1.0


def test_tfidf_refuses_words_that_never_repeat() -> None:
    rows = [{"text": word, "label": i % 2} for i, word in enumerate(["alpha", "beta", "gamma", "delta"])]
    with pytest.raises(OfframpError, match="give more rows"):
        tfidf(rows, rows, ("a", "b"), "a command")
