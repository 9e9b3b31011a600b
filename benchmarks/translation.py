"""Experiments on translation: which commands to run (`plan`), and what to measure of the runs.

python benchmarks/translation.py plan --data FOLDER --out runs/nmt        # prints the training commands
python benchmarks/translation.py exits --data dev.jsonl --json exits.json RUN…
python benchmarks/translation.py tradeoff --data test.jsonl --json tradeoff.json --png tradeoff.png RUN…
python benchmarks/translation.py oracles --data dev.jsonl --json oracles.json RUN
python benchmarks/translation.py speed --data test.jsonl --limit 200 --json speed.json RUN…
python benchmarks/translation.py show --data test.jsonl --limit 5 RUN
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from offramp import __version__
from offramp.data.readers import read
from offramp.evaluation import translation as study
from offramp.evaluation.result_cells import hardware, place
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from offramp.utils.files import write_json

SHAPE = {
    "model_type": "marian",
    "d_model": 256,
    "encoder_layers": 3,
    "decoder_layers": 6,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "max_position_embeddings": 128,
    "vocab_size": 4000,
    "scale_embedding": True,
    "dropout": 0.1,
    "activation_function": "relu",
    "init_std": 0.03,
}
PENALTIES, SIGMAS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), (0.0, 1.0, 5.0, 20.0)


def plan(options: argparse.Namespace) -> None:
    """Configurations are written; commands are printed, the ones that others start from first."""
    out, data = Path(options.out), Path(options.data)
    out.mkdir(parents=True, exist_ok=True)
    shape = {**SHAPE, "d_model": options.width, "vocab_size": options.vocabulary}
    for blocks in range(1, 7):
        write_json(out / f"marian-{blocks}.json", {**shape, "decoder_layers": blocks})
    rows = f"--train {data}/train.jsonl.gz --dev {data}/dev.jsonl.gz"
    common = f"offramp train --task translation {rows} --batch-size 128"
    first = f"{common} --lr 1e-3 --epochs {options.epochs}"
    whole = f"{first} --model {out}/marian-6.json --method depth_adaptive"
    print(f"{whole} --set form=threshold --out {out}/aligned")
    then = f"{common} --lr 3e-4 --epochs {options.then} --model {out}/marian-6.json --method depth_adaptive"
    then += f" --init {out}/aligned"
    for name, sets in {
        "geometric": "form=geometric alpha=0.1 penalty=0.1",
        "multinomial": "form=multinomial alpha=0.1 penalty=0.1",
        "sequence": "form=sequence alpha=0.1 penalty=0.5",
        "geometric-likelihood": "form=geometric oracle=likelihood alpha=0.1 penalty=0.1",
        "geometric-sigma1": "form=geometric alpha=0.1 penalty=0.1 sigma=1",
        "geometric-lambda0.01": "form=geometric alpha=0.1 penalty=0.01",
    }.items():
        print(f"{then} {' '.join(f'--set {one}' for one in sets.split())} --out {out}/{name}")
    for blocks in range(1, 7):
        print(f"{first} --model {out}/marian-{blocks}.json --method full --out {out}/baseline-{blocks}")
    for samples in (1, 3, 6):
        sets = f"--set form=threshold --set training=mixed --set samples={samples}"
        print(f"{whole} {sets} --out {out}/mixed-{samples}")


def measured(options: argparse.Namespace, what: Any) -> dict[str, Any]:
    """What each run shows on the rows, beside where it was measured and how the run was trained."""
    rows = read(options.data, limit=options.limit)
    made: dict[str, Any] = {}
    for run in options.runs:
        predictor = Predictor.load(run)
        made[Path(run).name] = what(predictor, study.prepared(predictor, rows, options.data))
        print(f"{Path(run).name}: {json.dumps(made[Path(run).name])[:400]}", flush=True)
    data, split = place(options.data)
    trained = {Path(run).name: _trained(run) for run in options.runs}
    about = {"data": data, "split": split, "rows": len(rows), "hardware": hardware(), "version": __version__}
    return {**about, "date": datetime.date.today().isoformat(), "trained": trained, "runs": made}


def _trained(run: str) -> dict[str, Any]:
    recipe = read_recipe(run)
    kept = {key: recipe.get(key) for key in ("method", "options", "schedule", "seconds")}
    return {**kept, "epochs": recipe.get("log", [])}


def settings_to_time(predictor: Predictor, losses: tuple[float, ...] = (0.005, 0.01, 0.02)) -> dict[str, Any]:
    """The full model, and the cheapest points within half a BLEU point, one and two of it."""
    chosen = {"full": predictor.settings(1.0)}
    for loss in losses:
        one = predictor.settings(max_loss=loss)
        if one not in chosen.values():
            chosen[f"within {100 * loss:g}"] = one
    return chosen


def main() -> None:
    """One of the experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plan", "exits", "tradeoff", "oracles", "speed", "show"])
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--data", required=True, help="rows; for plan the folder with train.jsonl.gz and dev.jsonl.gz")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--json")
    parser.add_argument("--png")
    parser.add_argument("--out", default="runs/nmt")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--width", type=int, default=SHAPE["d_model"], help="plan: the model's width")
    parser.add_argument("--vocabulary", type=int, default=SHAPE["vocab_size"], help="plan: pieces to learn")
    parser.add_argument("--then", type=int, default=4, help="epochs of the second stage")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.what == "plan":
        plan(options)
        return
    if options.what == "show":
        texts = [row["src"] for row in read(options.data, limit=options.limit)]
        for run in options.runs:
            predictor = Predictor.load(run)
            print(f"{run}\n{study.exits_over_words(predictor, texts, predictor.settings())}")
        return
    work = {
        "exits": study.by_exit,
        "tradeoff": study.trade_off,
        "oracles": lambda p, data: study.oracle_depths(p, data, PENALTIES, SIGMAS),
        "speed": lambda p, data: study.speed(p, data, settings_to_time(p), (1, 16), options.rounds),
    }[options.what]
    found = measured(options, work)
    if options.json:
        write_json(Path(options.json), found)
    if options.png and options.what == "tradeoff":
        study.draw(found["runs"], Path(options.png))


if __name__ == "__main__":
    main()
