"""How often the compiled engine decides otherwise than torch, in every precision, and how far its scores are off.

    python benchmarks/engine_agreement.py --run RUN --data FILE --budget 0.5 --out results/engine/agreement-RUN.json

The reference is the torch engine in fp32. Labels and exit layers are compared row by row, at the loosest setting and at
the budget's.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np

from offramp import __version__
from offramp.engines import Precision
from offramp.model.files import write_json
from offramp.model.predictor import Predictor
from offramp.model.runner import Outcome
from offramp.study.evaluate import hardware, model_name
from offramp.text.read import read


def compare(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    """Shares of answers and exits that differ, and the largest difference of logits where a row left at one layer."""
    pairs = list(zip(ours.logits, theirs.logits, strict=True))
    same_exit = ours.exit_layer == theirs.exit_layer
    off = [float(np.abs(a - b).max()) for (a, b), same in zip(pairs, same_exit, strict=True) if same]
    return {
        "rows": len(pairs),
        "other_answers": float(np.mean([np.any(a.argmax(-1) != b.argmax(-1)) for a, b in pairs])),
        "other_exits": float(1.0 - same_exit.mean()),
        "largest_logit_difference": max(off, default=0.0),
        "median_logit_difference": float(np.median(off)) if off else 0.0,
    }


def main() -> None:
    """Compare and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    reference = Predictor.load(args.run, "torch")
    rows = read(args.data, limit=args.rows)
    encoded = reference.prepare(rows)
    asked = {"loosest": reference.model.method.settings()}
    if reference.points is not None:
        asked[f"budget {args.budget:g}"] = reference.settings(args.budget)
    found: dict[str, dict[str, Any]] = {}
    for precision in get_args(Precision):
        engine = Predictor.load(args.run, "openvino", precision)
        found[precision] = {
            name: compare(engine.run(encoded, settings), reference.run(encoded, settings))
            for name, settings in asked.items()
        }
        print(precision, found[precision])
    result = {
        "what": "share of rows whose answer or exit differs from the torch engine in fp32",
        "model": model_name(reference.model.base_model),
        "method": reference.model.method.name,
        "data": "/".join(Path(args.data).parts[-2:]),
        "precision": found,
        "hardware": hardware(),
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }
    write_json(Path(args.out), result)


if __name__ == "__main__":
    main()
