"""TF-IDF and logistic regression on the same rows: what is possible in milliseconds, without a Transformer.

    python benchmarks/baseline.py --train train.jsonl --data test.jsonl --json cell.json

`offramp compare` measures the same baseline beside its methods.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.evaluation.baselines import tfidf
from offramp.utils.command_line import command_line, key_values
from offramp.utils.files import write_json

PROGRAM = "python benchmarks/baseline.py"


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, score, write the result cell and print its metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="training rows")
    parser.add_argument("--data", required=True, help="labelled rows to score")
    parser.add_argument("--limit", type=int, help="use only the first N training rows")
    parser.add_argument("--column", action="append", metavar="NAME=COLUMN", help="rename a column: text=sentence")
    parser.add_argument("--json", help="write the result cell here")
    options = parser.parse_args(arguments)
    try:
        columns = key_values(options.column, "--column")
        train, test = (
            read_rows(options.train, columns=columns, limit=options.limit),
            read_rows(options.data, columns=columns),
        )
        cell = tfidf(train, test, (options.train, options.data), command_line(PROGRAM))
    except OfframpError as error:
        sys.exit(str(error))
    if options.json:
        write_json(Path(options.json), cell)
    scores = ", ".join(f"{name} {value:.4f}" for name, value in cell["metrics"].items())
    print(f"{cell['method']} on {cell['rows']} rows of {cell['data']}/{cell['split']}: {scores}")
    print(f"{cell['milliseconds_a_row']:.4f} ms a row")


if __name__ == "__main__":
    main()
