"""Depth-Adaptive Transformer: which trainings to run (`plan`), and what the exits of the trained runs are worth.

    python benchmarks/papers/depth_adaptive.py plan --data FOLDER --out runs/nmt        # prints the training commands
    python benchmarks/papers/depth_adaptive.py exits --data dev.jsonl --json exits.json RUN…
    python benchmarks/papers/depth_adaptive.py tradeoff --data test.jsonl --json tradeoff.json --png tradeoff.png RUN…
    python benchmarks/papers/depth_adaptive.py curve --dev dev.jsonl --data test.jsonl --json curve.json RUN
    python benchmarks/papers/depth_adaptive.py oracles --data dev.jsonl --json oracles.json RUN
    python benchmarks/papers/depth_adaptive.py speed --data test.jsonl --limit 200 --json speed.json RUN…
    python benchmarks/papers/depth_adaptive.py show --data test.jsonl --limit 5 RUN

`exits` is the paper's table of BLEU per exit, `tradeoff` its Figure 3, `oracles` its Figure 4, `speed` counts the words
a second of the decoder alone, `show` prints translations with the exit of every piece (the qualitative figures).
`curve` measures exits and trade-off of every snapshot of a run that was trained with `--snapshots 4`, with thresholds
found on the rows of --dev for each; snapshots that stand in the JSON file are not measured again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from offramp import __version__, methods
from offramp.calibration.calibrate import find_operating_points
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.data.readers import read_rows
from offramp.decoding.beam_search import generate
from offramp.decoding.decoder import decoder_of, generation_rules, pad_packed, step_decoder
from offramp.decoding.loop import Decoding
from offramp.decoding.teacher_forcing import encode_source, teacher_force
from offramp.decoding.training import score_exits
from offramp.decoding.translate import length_limit
from offramp.errors import OfframpError
from offramp.evaluation.result_cells import data_and_split, hardware
from offramp.evaluation.timing import interleaved
from offramp.inference.batching import score_policy
from offramp.inference.operating_points import OperatingPoints
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from offramp.nn.batches import Data, build_batch, pack_rows
from offramp.nn.exit_oracles import best_exit, row_sums, smooth_over_neighbours
from offramp.nn.outputs import RunOutput
from offramp.training.checkpoint import SNAPSHOTS, read_weights
from offramp.training.forward import forward_all_layers
from offramp.utils.command_line import command_line
from offramp.utils.files import atomic_replace, read_json, write_json

PROGRAM = "python benchmarks/papers/depth_adaptive.py"
Row = Mapping[str, Any]
COLOURS = ("#2f6db3", "#d1495b", "#3a9d5d", "#8e6bbf", "#e09f3e", "#444444")
SHAPE = {
    "model_type": "marian",
    "d_model": 256,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "max_position_embeddings": 128,
    "vocab_size": 4000,
    "scale_embedding": True,
    "dropout": 0.2,
    "activation_function": "relu",
    "init_std": 0.03,
}
PENALTIES, SIGMAS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), (0.0, 1.0, 5.0, 20.0)


class UniformExitPolicy(Policy):
    """Every word leaves after a block drawn uniformly at random."""

    free = True

    def __init__(self, depth: int, seed: int = 0) -> None:
        self.depth, self.generator = depth, torch.Generator().manual_seed(seed)

    def token_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        return torch.randint(1, self.depth + 1, (len(states),), generator=self.generator) if block == 1 else None


def prepare_data(predictor: Predictor, rows: Sequence[Row], source: str) -> Data:
    """Check and encode labelled rows for a translation model."""
    if predictor.network.decoder is None:
        raise OfframpError("a translation model", f"a run for {predictor.task.name}", "give one of translation")
    predictor.task.check_rows(rows, source)
    return Data(rows, predictor.prepare(rows, source))


def _bleu(predictor: Predictor, data: Data, policy: Policy, batch_size: int = 64) -> tuple[float, RunOutput]:
    metrics, outcome = score_policy(predictor.network, predictor.engine, policy, data, batch_size)
    return round(metrics["bleu"], 3), outcome


def bleu_by_exit(predictor: Predictor, data: Data) -> dict[str, Any]:
    """Return BLEU when all words leave after the same block, for each block, and when each word draws its block.

    A model without exits is scored at full depth only.
    """
    depth, method = predictor.network.depth, predictor.model.method
    if method.name != "depth_adaptive":
        return {"blocks": depth, "bleu": {str(depth): _bleu(predictor, data, Policy())[0]}}
    fixed = {n: method.policy(predictor.network, method.settings(depth=n)) for n in range(1, depth + 1)}
    found = {str(n): _bleu(predictor, data, policy)[0] for n, policy in fixed.items()}
    return {"blocks": depth, "uniform": _bleu(predictor, data, UniformExitPolicy(depth))[0], "bleu": found}


def trade_off(predictor: Predictor, data: Data, found: OperatingPoints | None = None) -> list[dict[str, Any]]:
    """Return average exit, BLEU and share of MACs of every operating point (the run's, unless given) on these rows."""
    operating = found or predictor.points
    if operating is None:
        raise OfframpError("a trade-off", "a model without operating points", "run `offramp calibrate` on it first")
    method, points = predictor.model.method, []
    for point in operating.points:
        settings = methods.configure(method.settings, point.settings, method.name)
        bleu, outcome = _bleu(predictor, data, method.policy(predictor.network, settings))
        points.append({"average_exit": _average_exit(outcome), "bleu": bleu, "mac_share": _share(outcome),
                      "settings": point.settings, "calibrated": asdict(point)})  # fmt: skip
    return points


def measure_snapshots(run: Path, dev: Sequence[Row], test: Sequence[Row], kept: Path | None) -> dict[str, Any]:
    """Return exits and trade-off of every snapshot of a run, the thresholds found on dev rows; resumes from `kept`."""
    snapshots = sorted((run / SNAPSHOTS).glob("*.safetensors"))
    if not snapshots:
        raise OfframpError("the snapshots of a run", f"{run}, which has none", "train it with --snapshots 4")
    predictor = Predictor.load(str(run), engine="torch")
    network, method = predictor.network, predictor.model.method
    dev_data, test_data = (prepare_data(predictor, rows, "rows") for rows in (dev, test))
    results: dict[str, Any] = read_json(kept)["snapshots"] if kept is not None and kept.is_file() else {}
    for path in (path for path in snapshots if path.stem not in results):
        read_weights(path, network)
        points = find_operating_points(network, method, dev_data, "dev", "0")
        results[path.stem] = {**bleu_by_exit(predictor, test_data), "points": trade_off(predictor, test_data, points)}
        print(f"{path.stem}: {json.dumps(results[path.stem])[:400]}", flush=True)
        if kept is not None:
            write_json(kept, {"snapshots": results})
    return results


def _average_exit(outcome: RunOutput) -> float:
    """Return the mean exit over words, as in the paper (the mean of a result cell is over sentences)."""
    exits = [block for output in outcome.logits for block in output[:, 1].tolist()]
    return round(sum(exits) / len(exits), 4)


def _share(outcome: RunOutput) -> float:
    return round(float(outcome.macs.sum() / outcome.full_macs.sum()), 4) if outcome.full_macs is not None else 1.0


@torch.inference_mode()
def oracle_depths(
    predictor: Predictor, data: Data, penalties: Sequence[float], sigmas: Sequence[float]
) -> list[dict[str, Any]]:
    """Return the average exit that an oracle chooses, for words and for sentences, by λ and σ."""
    network, parts, counts = predictor.network, [], []
    for start in range(0, len(data.encoded), 64):
        size = range(start, min(start + 64, len(data.encoded)))
        rows = build_batch(network.task, data, size, seed=None).to(network.device)
        forced = teacher_force(network, rows, encode_source(network, rows))
        exits = score_exits(network, forced, 0.0, range(1, network.depth + 1))
        parts.append((exits.correct.float(), -exits.nll))
        counts.append(forced.lengths)
    lengths = torch.cat(counts)
    found = []
    for kind, values in zip(("correctness", "likelihood"), zip(*parts, strict=True), strict=True):
        value = torch.cat(list(values), dim=1)
        for penalty in penalties:
            for sigma in sigmas:
                mean = (best_exit(smooth_over_neighbours(value, lengths, sigma), penalty) + 1).double().mean()
                found.append({"oracle": kind, "of": "words", "penalty": penalty, "sigma": sigma, "exit": float(mean)})
            mean = (best_exit(row_sums(value, lengths), penalty) + 1).double().mean()
            found.append({"oracle": kind, "of": "sentences", "penalty": penalty, "sigma": None, "exit": float(mean)})
    return found


def decoder_speed(
    predictor: Predictor, data: Data, settings: Mapping[str, Any], sizes: Sequence[int], rounds: int = 5
) -> dict[str, Any]:
    """Return words a second of the decoder alone, greedy, of every setting in turn on the same batches."""
    network, method = predictor.network, predictor.model.method
    policies = {name: method.policy(network, one) for name, one in settings.items()}
    order, found = sorted(range(len(data.encoded)), key=lambda i: len(data.encoded[i].ids)), []
    first = 1.0  # words a second of the first setting, at each size
    for size in sizes:
        groups = [order[start : start + size] for start in range(0, len(order), size)]
        calls = [_encode(predictor, [data.encoded[i] for i in group]) for group in groups]
        counts = {name: [_decode(predictor, policy, call) for call in calls] for name, policy in policies.items()}

        def work(name: str, call: tuple[Packed, Tensor]) -> None:
            _decode(predictor, policies[name], call)

        seconds = interleaved(work, list(policies), calls, rounds)
        for name, own in counts.items():
            words, blocks = (sum(part[i] for part in own) for i in (0, 1))
            rate = words / seconds[name]
            first = rate if name == next(iter(policies)) else first
            about = {"setting": name, "batch_size": size, "words": words, "average_exit": round(blocks / words, 3)}
            times = {"seconds": round(seconds[name], 4), "words_per_second": round(rate, 1)}
            found.append({**about, **times, "speed_up": round(rate / first, 3)})
    return {"hardware": hardware(), "sentences": len(data.encoded), "rows": found}


@torch.inference_mode()
def _encode(predictor: Predictor, encoded: Sequence[Any]) -> tuple[Packed, Tensor]:
    packed = pack_rows(predictor.task, encoded).to(predictor.network.device)
    return packed, pad_packed(packed, forward_all_layers(predictor.network.encoder, packed).states[-1])[0]


@torch.inference_mode()
def _decode(predictor: Predictor, policy: Policy, call: tuple[Packed, Tensor]) -> tuple[int, int]:
    """Return the number of words decoded, and of blocks they went through."""
    (packed, source), network = call, predictor.network
    decoding = Decoding(step_decoder(network), policy, source, packed.lengths)
    most = [length_limit(tokens, decoder_of(network).positions) for tokens in packed.lengths.tolist()]
    hypotheses = generate(decoding, generation_rules(network), most)
    return sum(len(one.exits) for one in hypotheses), sum(sum(one.exits) for one in hypotheses)


def exits_over_words(predictor: Predictor, texts: Sequence[str], settings: Any) -> str:
    """Return translations as text, with the exit of every piece above it."""
    rows = [{"src": text} for text in texts]
    encoded = predictor.prepare(rows)
    lines = []
    predictions = predictor.finish(rows, encoded, predictor.run(encoded, settings))
    for text, prediction in zip(texts, predictions, strict=True):
        decoded = [str(predictor.model.tokenizer.convert_tokens_to_string([piece])) for piece in prediction["pieces"]]
        pieces = [piece.strip() or piece for piece in decoded]
        widths = [max(len(piece), 1) for piece in pieces]
        above = " ".join(str(block).ljust(width) for block, width in zip(prediction["exits"], widths, strict=True))
        below = " ".join(piece.ljust(width) for piece, width in zip(pieces, widths, strict=True))
        lines += [f"  {text}", f"  {above}  (mean {prediction['exit_layer']})", f"  {below}", ""]
    return "\n".join(lines)


def draw_trade_off(curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw BLEU against average exit, one line per run."""
    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for (name, points), colour in zip(curves.items(), COLOURS * 3, strict=False):
        ordered = sorted(points, key=lambda point: point["average_exit"])
        x, y = ([point[key] for point in ordered] for key in ("average_exit", "bleu"))
        axes.plot(x, y, "o-", color=colour, markersize=4, linewidth=1.3, label=name)
    axes.set_xlabel("average exit of a word")
    axes.set_ylabel("BLEU")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    canvas = FigureCanvasAgg(figure)
    with atomic_replace(path) as fresh, fresh.open("wb") as file:
        canvas.print_png(file)


def print_plan(options: argparse.Namespace) -> None:
    """Write model configurations and print training commands, those that others start from first."""
    out, data = Path(options.out), Path(options.data)
    out.mkdir(parents=True, exist_ok=True)
    shape = {**SHAPE, "d_model": options.width, "vocab_size": options.vocabulary}
    for blocks in range(1, 7):
        write_json(out / f"marian-{blocks}.json", {**shape, "decoder_layers": blocks})
    rows = f"--train {data}/train.jsonl.gz --dev {data}/dev.jsonl.gz"
    common = f"offramp train --task translation {rows} --batch-size {options.batch_size} --precision bf16"
    first = f"{common} --lr 1e-3 --epochs {options.epochs} --snapshots 4"
    six_blocks = f"{first} --model {out}/marian-6.json --method depth_adaptive"
    print(f"{six_blocks} --set form=threshold --out {out}/aligned")
    then = f"{common} --lr 1e-3 --later-lr 3e-4 --epochs {options.then} --model {out}/marian-6.json"
    then += f" --method depth_adaptive --init {out}/aligned"
    for name, sets in {
        "geometric": "form=geometric alpha=0.1",
        "multinomial": "form=multinomial alpha=0.1",
        "sequence": "form=sequence alpha=0.1 penalty=0.5",
        "geometric-correctness": "form=geometric oracle=correctness alpha=0.1",
        "geometric-correctness-sigma1": "form=geometric oracle=correctness sigma=1 alpha=0.1",
        "geometric-lambda0.01": "form=geometric alpha=0.1 penalty=0.01",
    }.items():
        print(f"{then} {' '.join(f'--set {one}' for one in sets.split())} --out {out}/{name}")
    for blocks in range(1, 7):
        print(f"{first} --model {out}/marian-{blocks}.json --method full --out {out}/baseline-{blocks}")
    for samples in (1, 3, 6):
        sets = f"--set form=threshold --set training=mixed --set samples={samples}"
        print(f"{six_blocks} {sets} --out {out}/mixed-{samples}")


def measure_runs(options: argparse.Namespace, work: Callable[[Predictor, Data], Any]) -> dict[str, Any]:
    """Measure every run on the rows; record where it was measured and how the run was trained."""
    rows = read_rows(options.data, limit=options.limit)
    results: dict[str, Any] = {}
    for run in options.runs:
        predictor = Predictor.load(run)
        results[Path(run).name] = work(predictor, prepare_data(predictor, rows, options.data))
        print(f"{Path(run).name}: {json.dumps(results[Path(run).name])[:400]}", flush=True)
    data, split = data_and_split(options.data)
    trained = {Path(run).name: _trained(run) for run in options.runs}
    about = {"command": command_line(PROGRAM), "data": data, "split": split, "rows": len(rows)}
    return {
        **about,
        "hardware": hardware(),
        "version": __version__,
        "date": datetime.date.today().isoformat(),
        "trained": trained,
        "runs": results,
    }


def _trained(run: str) -> dict[str, Any]:
    recipe = read_recipe(run)
    kept = {key: recipe.get(key) for key in ("method", "options", "schedule", "seconds")}
    return {**kept, "epochs": recipe.get("log", [])}


def settings_to_time(predictor: Predictor, losses: tuple[float, ...] = (0.005, 0.01, 0.02)) -> dict[str, Any]:
    """Return the settings of the full model, and of the cheapest points within half, one and two BLEU points of it."""
    chosen = {"full": predictor.settings(1.0)}
    for loss in losses:
        one = predictor.settings(max_loss=loss)
        if one not in chosen.values():
            chosen[f"within {100 * loss:g}"] = one
    return chosen


def build_parser() -> argparse.ArgumentParser:
    """Return the options of all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["plan", "exits", "tradeoff", "curve", "oracles", "speed", "show"])
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--data", required=True, help="rows; for plan the folder with train.jsonl.gz and dev.jsonl.gz")
    parser.add_argument("--dev", help="curve: rows to find thresholds on")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--json")
    parser.add_argument("--png")
    parser.add_argument("--out", default="runs/nmt")
    parser.add_argument("--epochs", type=int, default=18, help="plan: of the first stage")
    parser.add_argument("--batch-size", type=int, default=64, help="plan: pairs of mean length in a batch")
    parser.add_argument("--width", type=int, default=SHAPE["d_model"], help="plan: the model's width")
    parser.add_argument("--vocabulary", type=int, default=SHAPE["vocab_size"], help="plan: pieces to learn")
    parser.add_argument("--then", type=int, default=3, help="epochs of the second stage")
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def write_curve(options: argparse.Namespace) -> None:
    """Measure the snapshots of one run, write them and draw a line for each."""
    if options.dev is None or len(options.runs) != 1:
        raise OfframpError("the curve of a run", "no --dev, or not one run", "give --dev FILE and one run")
    test, kept = read_rows(options.data, limit=options.limit), Path(options.json) if options.json else None
    found = measure_snapshots(Path(options.runs[0]), read_rows(options.dev), test, kept)
    if kept is not None:
        data, split = data_and_split(options.data)
        what = "Translation: BLEU by exit and against the average exit, after every part of training"
        about = {"what": what, "command": command_line(PROGRAM), "data": data, "split": split, "rows": len(test)}
        trained = {**_trained(options.runs[0]), "hardware": hardware(), "version": __version__}
        write_json(kept, {**about, **trained, "date": datetime.date.today().isoformat(), "snapshots": found})
    if options.png:
        names = {name: f"after epoch {int(name.rsplit('-', 1)[1])}" for name in found}
        draw_trade_off({names[name]: one["points"] for name, one in found.items()}, Path(options.png))


def run_part(options: argparse.Namespace) -> None:
    """Run one part and write what it found."""
    if options.part == "plan":
        print_plan(options)
        return
    if options.part == "show":
        texts = [row["src"] for row in read_rows(options.data, limit=options.limit)]
        for run in options.runs:
            predictor = Predictor.load(run)
            print(f"{run}\n{exits_over_words(predictor, texts, predictor.settings())}")
        return
    if options.part == "curve":
        write_curve(options)
        return
    work: dict[str, Callable[[Predictor, Data], Any]] = {
        "exits": bleu_by_exit,
        "tradeoff": trade_off,
        "oracles": lambda p, data: oracle_depths(p, data, PENALTIES, SIGMAS),
        "speed": lambda p, data: decoder_speed(p, data, settings_to_time(p), (1, 16, 64), options.rounds),
    }
    found = measure_runs(options, work[options.part])
    if options.json:
        write_json(Path(options.json), found)
    if options.png and options.part == "tradeoff":
        draw_trade_off(found["runs"], Path(options.png))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the parts."""
    try:
        run_part(build_parser().parse_intermixed_args(arguments))  # runs may stand before or after options
    except OfframpError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
