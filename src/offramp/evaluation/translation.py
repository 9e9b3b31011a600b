"""What a translation model's exits are worth: BLEU per exit, the trade-off, the oracle's depth, words a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from offramp import methods
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.decoding.beam_search import speak
from offramp.decoding.loop import Decoding
from offramp.decoding.teacher_forcing import Lesson, decoder_of, rules, side_by_side, speaker
from offramp.decoding.training import marks
from offramp.decoding.translate import limit
from offramp.errors import OfframpError
from offramp.evaluation.result_cells import hardware
from offramp.evaluation.timing import interleaved
from offramp.inference.batching import score_policy
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data, build_batch, pack_rows
from offramp.nn.exit_oracles import best_exit, row_sums, smooth_over_neighbours
from offramp.nn.outputs import RunOutput
from offramp.training.forward import forward_all_layers
from offramp.utils.files import replacing

Row = Mapping[str, Any]
COLOURS = ("#2f6db3", "#d1495b", "#3a9d5d", "#8e6bbf", "#e09f3e", "#444444")


class Uniform(Policy):
    """Every word leaves after a block drawn by lot."""

    free = True

    def __init__(self, depth: int, seed: int = 0) -> None:
        self.depth, self.make = depth, torch.Generator().manual_seed(seed)

    def word_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        return torch.randint(1, self.depth + 1, (len(states),), generator=self.make) if block == 1 else None


def prepared(predictor: Predictor, rows: Sequence[Row], source: str) -> Data:
    """Labelled rows of a translation model."""
    if predictor.network.decoder is None:
        raise OfframpError("a translation model", f"a run for {predictor.task.name}", "give one of translation")
    predictor.task.check(rows, source)
    return Data(rows, predictor.prepare(rows, source))


def _scored(predictor: Predictor, data: Data, policy: Policy, batch_size: int = 64) -> tuple[float, RunOutput]:
    metrics, outcome = score_policy(predictor.network, predictor.engine, policy, data, batch_size)
    return round(metrics["bleu"], 3), outcome


def by_exit(predictor: Predictor, data: Data) -> dict[str, Any]:
    """BLEU when all words leave after the same block, for each block, and when each draws its own (the paper's table);
    a model without exits of its own only at full depth."""
    depth, method = predictor.network.depth, predictor.model.method
    if method.name != "depth_adaptive":
        return {"blocks": depth, "bleu": {str(depth): _scored(predictor, data, Policy())[0]}}
    fixed = {n: method.policy(predictor.network, method.settings(depth=n)) for n in range(1, depth + 1)}
    found = {str(n): _scored(predictor, data, policy)[0] for n, policy in fixed.items()}
    return {"blocks": depth, "uniform": _scored(predictor, data, Uniform(depth))[0], "bleu": found}


def trade_off(predictor: Predictor, data: Data) -> list[dict[str, Any]]:
    """Average exit, BLEU and share of MACs of every operating point on these rows."""
    if predictor.points is None:
        raise OfframpError("a trade-off", "a model without operating points", "run `offramp calibrate` on it first")
    method, spots = predictor.model.method, []
    for point in predictor.points.points:
        settings = methods.configure(method.settings, point.settings, method.name)
        bleu, outcome = _scored(predictor, data, method.policy(predictor.network, settings))
        spots.append({"average_exit": _average_exit(outcome), "bleu": bleu, "mac_share": _share(outcome),
                      "settings": point.settings, "calibrated": asdict(point)})  # fmt: skip
    return spots


def _average_exit(outcome: RunOutput) -> float:
    """Over words, as in the paper (a result cell's mean is over sentences)."""
    exits = [block for answer in outcome.logits for block in answer[:, 1].tolist()]
    return round(sum(exits) / len(exits), 4)


def _share(outcome: RunOutput) -> float:
    return round(float(outcome.macs.sum() / outcome.full_macs.sum()), 4) if outcome.full_macs is not None else 1.0


@torch.inference_mode()
def oracle_depths(
    predictor: Predictor, data: Data, penalties: Sequence[float], sigmas: Sequence[float]
) -> list[dict[str, Any]]:
    """The average exit an oracle chooses, by λ and σ (the paper's Figure 4): words by each value, and sentences."""
    network, parts, counts = predictor.network, [], []
    for start in range(0, len(data.encoded), 64):
        size = range(start, min(start + 64, len(data.encoded)))
        lesson = Lesson(network, build_batch(network.task, data, size, seed=None).to(network.device))
        taught = lesson.taught(lesson.source())
        made = marks(network, taught, 0.0, range(1, network.depth + 1))
        parts.append((made.right.float(), -made.misses))
        counts.append(taught.lengths)
    lengths = torch.cat(counts)
    found = []
    for kind, values in zip(("correctness", "likelihood"), zip(*parts, strict=True), strict=True):
        worth = torch.cat(list(values), dim=1)
        for penalty in penalties:
            for sigma in sigmas:
                mean = (best_exit(smooth_over_neighbours(worth, lengths, sigma), penalty) + 1).double().mean()
                found.append({"oracle": kind, "of": "words", "penalty": penalty, "sigma": sigma, "exit": float(mean)})
            mean = (best_exit(row_sums(worth, lengths), penalty) + 1).double().mean()
            found.append({"oracle": kind, "of": "sentences", "penalty": penalty, "sigma": None, "exit": float(mean)})
    return found


def speed(predictor: Predictor, data: Data, settings: Mapping[str, Any], sizes: Sequence[int], rounds: int = 5) -> Any:
    """Words a second of the decoder alone, greedy, of every setting in turn on the same batches, by batch size."""
    network, method = predictor.network, predictor.model.method
    policies = {name: method.policy(network, one) for name, one in settings.items()}
    order, found = sorted(range(len(data.encoded)), key=lambda i: len(data.encoded[i].ids)), []
    first = 1.0  # words a second of the first setting, at each size
    for size in sizes:
        groups = [order[start : start + size] for start in range(0, len(order), size)]
        calls = [_read(predictor, [data.encoded[i] for i in group]) for group in groups]
        counted = {name: [_say(predictor, policy, call) for call in calls] for name, policy in policies.items()}

        def work(name: str, call: tuple[Packed, Tensor]) -> None:
            _say(predictor, policies[name], call)

        seconds = interleaved(work, list(policies), calls, rounds)
        for name, made in counted.items():
            words, blocks = (sum(part[i] for part in made) for i in (0, 1))
            pace = words / seconds[name]
            first = pace if name == next(iter(policies)) else first
            about = {"setting": name, "batch_size": size, "words": words, "average_exit": round(blocks / words, 3)}
            times = {"seconds": round(seconds[name], 4), "words_per_second": round(pace, 1)}
            found.append({**about, **times, "speed_up": round(pace / first, 3)})
    return {"hardware": hardware(), "sentences": len(data.encoded), "rows": found}


@torch.inference_mode()
def _read(predictor: Predictor, encoded: Sequence[Any]) -> tuple[Packed, Tensor]:
    packed = pack_rows(predictor.task, encoded).to(predictor.network.device)
    return packed, side_by_side(packed, forward_all_layers(predictor.network.encoder, packed).states[-1])[0]


@torch.inference_mode()
def _say(predictor: Predictor, policy: Policy, call: tuple[Packed, Tensor]) -> tuple[int, int]:
    """Words said, and blocks they went through."""
    (packed, source), network = call, predictor.network
    decoding = Decoding(speaker(network), policy, source, packed.lengths)
    most = [limit(tokens, decoder_of(network).positions) for tokens in packed.lengths.tolist()]
    said = speak(decoding, rules(network), most)
    return sum(len(one.exits) for one in said), sum(sum(one.exits) for one in said)


def exits_over_words(predictor: Predictor, texts: Sequence[str], settings: Any) -> str:
    """Translations with the exit of every piece above it (the paper's qualitative figures)."""
    rows = [{"src": text} for text in texts]
    encoded = predictor.prepare(rows)
    lines = []
    for text, said in zip(texts, predictor.finish(rows, encoded, predictor.run(encoded, settings)), strict=True):
        decoded = [str(predictor.model.tokenizer.convert_tokens_to_string([piece])) for piece in said["pieces"]]
        shown = [piece.strip() or piece for piece in decoded]
        wide = [max(len(piece), 1) for piece in shown]
        above = " ".join(str(block).ljust(width) for block, width in zip(said["exits"], wide, strict=True))
        below = " ".join(piece.ljust(width) for piece, width in zip(shown, wide, strict=True))
        lines += [f"  {text}", f"  {above}  (mean {said['exit_layer']})", f"  {below}", ""]
    return "\n".join(lines)


def draw(curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """BLEU against average exit, one line a run (the paper's Figure 3)."""
    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for (name, spots), colour in zip(curves.items(), COLOURS * 3, strict=False):
        ordered = sorted(spots, key=lambda spot: spot["average_exit"])
        x, y = ([spot[key] for spot in ordered] for key in ("average_exit", "bleu"))
        axes.plot(x, y, "o-", color=colour, markersize=4, linewidth=1.3, label=name)
    axes.set_xlabel("average exit of a word")
    axes.set_ylabel("BLEU")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    canvas = FigureCanvasAgg(figure)
    with replacing(path) as fresh, fresh.open("wb") as file:
        canvas.print_png(file)
