"""A baseline without a Transformer, measured beside every comparison: TF-IDF and logistic regression."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from typing import Any

from offramp import __version__
from offramp.errors import OfframpError
from offramp.evaluation.result_cells import data_and_split, hardware
from offramp.tasks import get

Row = Mapping[str, Any]


class _WordFeatures:
    """TF-IDF of the words of each text column, side by side."""

    def __init__(self, columns: Sequence[str]) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.by_column = {
            column: TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2) for column in columns
        }

    def fit(self, rows: Sequence[Row]) -> Any:
        """Learn the vocabularies, and return the features of the same rows."""
        for column, words in self.by_column.items():
            words.fit([row[column] for row in rows])
        return self.of(rows)

    def of(self, rows: Sequence[Row]) -> Any:
        """Return the features of rows as one sparse matrix."""  # [rows, words of all columns]
        from scipy.sparse import hstack

        return hstack([words.transform([row[column] for row in rows]) for column, words in self.by_column.items()])


def tfidf(train: Sequence[Row], test: Sequence[Row], sources: tuple[str, str], command: str) -> dict[str, Any]:
    """Return a result cell of word 1–2-gram TF-IDF with logistic regression; `sources` are the files of the rows.

    Of pairs the features of both texts stand side by side, each text with a vocabulary of its own: the baseline knows
    which words either text has, and nothing of how the texts fit together.
    """
    from sklearn.linear_model import LogisticRegression

    task = get("classification").from_rows(train, sources[0])
    task.check_rows(test, sources[1])
    data, split = data_and_split(sources[1])
    words, model = _WordFeatures(task.input_columns), LogisticRegression(C=10.0, max_iter=1000)
    try:
        model.fit(words.fit(train), [str(row["label"]) for row in train])
    except ValueError as error:  # no word occurs twice
        raise OfframpError("words to learn from", f"{len(train)} rows: {error}", "give more rows") from error
    started = time.perf_counter()
    labels = model.predict(words.of(test))
    seconds = time.perf_counter() - started
    metrics = task.metrics(test, [{"label": label} for label in labels])
    return {
        "method": "tfidf",
        "settings": {"ngrams": [1, 2], "C": 10.0},
        "model": "tfidf+logistic regression",
        "data": data,
        "split": split,
        "rows": len(test),
        "seed": None,
        "metrics": {name: round(value, 6) for name, value in metrics.items()},
        "macs": {"mean": 0, "share_of_full": 0.0},
        "mean_exit_layer": 0.0,
        "exit_histogram": {},
        "mean_tokens_kept": 0.0,
        "seconds": round(seconds, 4),
        "milliseconds_a_row": round(1000 * seconds / len(test), 4),
        "engine": "scikit-learn",
        "precision": "fp64",
        "batch_size": len(test),
        "hardware": hardware(),
        "command": command,
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }
