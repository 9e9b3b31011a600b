"""How far bf16 and int8 of the C++ engine are from its fp32: other answers, other exits and the score, on real rows.

    python benchmarks/precision_agreement.py RUN --data test.jsonl --rows 2000 --budgets 1.0,max-loss=0.01 --out FILE

Settings are those of the run's operating points, the same for every precision. Nothing is timed, so the machine need
not be idle.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offramp import __version__, engines
from offramp.data.readers import read_rows
from offramp.evaluation.contenders import settings_for_budget
from offramp.evaluation.result_cells import data_and_split, model_name
from offramp.inference.predictor import Predictor
from offramp.utils.command_line import command_line
from offramp.utils.files import write_json
from offramp.utils.hardware import hardware

PRECISIONS: tuple[engines.Precision, ...] = ("fp32", "bf16", "int8")


def compare_precisions(
    run: str,
    data: str,
    rows: int,
    budgets: Sequence[str],
    threads: int | None,
    precisions: Sequence[engines.Precision] = PRECISIONS,
) -> list[dict[str, Any]]:
    """Return one entry for each budget and precision; the first precision is what the others are compared with."""
    given = read_rows(data, limit=rows)
    entries = []
    loaded = {name: Predictor.load(run, "native", name, threads) for name in precisions}
    for budget in budgets:
        exact: tuple[list[dict[str, Any]], Any] | None = None
        for precision, model in loaded.items():
            encoded = model.prepare(given, data)
            output = model.run(encoded, settings_for_budget(model, budget))
            predictions = model.task.predictions(given, encoded, output.logits)
            exact = exact or (predictions, output.exit_layer)
            others = model.task.disagreement(predictions, exact[0])
            entries.append(
                {
                    "budget": budget,
                    "precision": precision,
                    "metrics": {
                        name: round(value, 6) for name, value in model.task.metrics(given, predictions).items()
                    },
                    "mac_share": round(float(output.macs.sum() / model.full_macs(encoded)), 6),
                    "other_answers": round(float(np.mean(others)), 6),
                    "other_exits": round(float(np.mean(output.exit_layer != exact[1])), 6),
                }
            )
    return entries


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse options, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--budgets", default="1.0,max-loss=0.01")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args(arguments)
    found = compare_precisions(options.run, options.data, options.rows, options.budgets.split(","), options.threads)
    for entry in found:
        print(entry)
    if options.out:
        model = Predictor.load(options.run, "torch")
        content = {
            "what": "bf16 and int8 of the C++ engine beside its fp32: scores, other answers and other exits",
            "data": "/".join(data_and_split(options.data)),
            "model": model_name(model.model.base_model),
            "method": model.model.method.name,
            "row_count": len(read_rows(options.data, limit=options.rows)),
            "seed": None,
            "hardware": hardware(),
            "versions": engines.versions("native"),
            "version": __version__,
            "date": datetime.date.today().isoformat(),
            "command": command_line().replace("offramp", "python benchmarks/precision_agreement.py", 1),
            "rows": found,
        }
        write_json(Path(options.out), content)


if __name__ == "__main__":
    main()
