"""What this machine takes for the parts of a model: measured once, fitted by a small model, kept beside the run.

A single row takes as long as what the loop logs for it: for each half-layer so much, so much more for each token, and
in attention for each pair of tokens; so much for each head; so much for the call itself, and for its text. Rows of
many lengths are sent through the real loop to several depths, some losing tokens on the way, and coefficients (never
negative) are fitted to their relative error. So whatever an engine does inside a layer, its price is what it takes.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor

from offramp import __version__, engines
from offramp.core.attention import Scores
from offramp.core.columns import POSITION
from offramp.core.cost import Event
from offramp.core.loop import State, run
from offramp.core.packed import Packed
from offramp.core.policy import Needs, Policy
from offramp.data.tokenization import Encoded
from offramp.inference.batching import run_packed
from offramp.inference.predictor import Predictor
from offramp.nn.batches import pack_rows
from offramp.utils.files import read_json, write_json
from offramp.utils.hardware import hardware

Array = NDArray[np.float64]
Row = Mapping[str, Any]
Clock = Callable[[], float]
FILE = "latency.json"
LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512)
ROUNDS = 7
KINDS = ("attend", "feed", "head", "exit_unit", "predictor")
NAMES = ("text", "text.token", "call", "embed.token", *(f"{kind}{part}" for kind in KINDS for part in ("", ".token")),
         "attend.pair")  # fmt: skip


@dataclass(frozen=True)
class TimeModel:
    """Milliseconds by what they are paid for, and where they were measured."""

    ms: dict[str, float]
    error: float  # mean relative error of the fit on what it was fitted to
    samples: int
    place: dict[str, Any]  # hardware, engine, versions: prices hold there only

    def predict(self, made: Array) -> Array:
        """Milliseconds of rows with these features."""
        return np.asarray(made @ np.array([self.ms[name] for name in NAMES]))


def trace_features(log: Sequence[Event], rows: int, tokens: Sequence[int] | None = None) -> Array:
    """What was done for each row, in the order of NAMES; with `tokens`, its text had to be read too."""
    made = {name: np.zeros(rows) for name in NAMES}
    made["call"] += 1.0
    if tokens is not None:
        made["text"] += 1.0
        made["text.token"] += np.asarray(tokens, dtype=np.float64)
    for event in log:
        who, spent = event.rows.cpu().numpy(), event.tokens.cpu().numpy().astype(np.float64)
        if event.kind == "embed":
            np.add.at(made["embed.token"], who, spent)
            continue
        np.add.at(made[event.kind], who, (spent > 0).astype(np.float64))
        np.add.at(made[f"{event.kind}.token"], who, spent)
        if event.kind == "attend":
            np.add.at(made["attend.pair"], who, spent * event.keys.cpu().numpy())
    return np.stack([made[name] for name in NAMES], axis=1)


def fit_time_model(seen: Array, ms: Array) -> tuple[dict[str, float], float]:
    """Prices that explain measured milliseconds, and the mean relative error that is left."""
    found, _ = nnls(seen / ms[:, None], np.ones(len(ms)), maxiter=1000)
    left = np.abs(seen @ found / ms - 1.0)
    return {name: float(value) for name, value in zip(NAMES, found, strict=True)}, float(left.mean())


@dataclass(frozen=True)
class Probe(Policy):
    """Everybody leaves at a given off-ramp; on the way, tokens may go after the first attention."""

    exits: frozenset[int]  # off-ramps that are asked
    depth: int
    keep: int | None = None

    def after_attention(self, layer: int, s: State, scores: Scores | None) -> Tensor | None:
        return s.packed.tokens[POSITION] < self.keep if self.keep is not None and layer == 1 else None

    def needs(self, layer: int) -> Needs:
        drops = self.keep is not None and layer == 1
        return Needs(after_attention=drops, should_exit=layer in self.exits or layer == self.depth)

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        if layer in self.exits:
            s.logits()
        return torch.ones(s.packed.count, dtype=torch.bool) if layer == self.depth else None


def _probes(model: Predictor, tokens: int) -> list[Policy]:
    """Depths and losses that tell the parts apart, and the method's own policy for what it computes besides."""
    network, method = model.network, model.model.method
    exit_heads, depth = sorted(network.exit_heads), network.depth
    early = sorted({exit_heads[0], exit_heads[len(exit_heads) // 2], exit_heads[-1]}) if exit_heads else []
    made: list[Policy] = [Probe(frozenset(exits), at) for at in [*early, depth] for exits in ((), exit_heads)]
    made += [Probe(frozenset(), depth, keep) for keep in {1, -(-tokens // 2)}]
    known = model.points.points if model.points else ()
    own = [method.settings(), *(model.settings(given=point.settings) for point in known[:1])]
    return [*made, *(method.policy(network, settings) for settings in own)]


def measure_time_model(model: Predictor, texts: Sequence[Row], clock: Clock = time.perf_counter) -> TimeModel:
    """Prices of this model on this machine; `texts` are rows to read, a few of each length."""
    jobs = [(packed, policy) for packed in _rows(model) for policy in _probes(model, packed.total)]
    seen = [trace_features(run_trace(model, policy, packed), 1)[0] for packed, policy in jobs]  # and everybody is warm
    tries = np.zeros((len(jobs), ROUNDS))
    for number, (index, (packed, policy)) in itertools.product(range(ROUNDS), enumerate(jobs)):
        started = clock()
        run_packed(model.network, model.engine, policy, packed)
        tries[index, number] = 1000 * (clock() - started)
    read, reading = _reading(model, texts, clock)
    ms = np.array([*np.median(tries, axis=1), *reading])
    found, error = fit_time_model(np.stack([*seen, *read]), ms)
    return TimeModel(found, round(error, 4), len(ms), measurement_place(model))


def run_trace(model: Predictor, policy: Policy, packed: Packed) -> list[Event]:
    """What the loop does with a batch under a policy."""
    with torch.inference_mode():
        return run(
            model.engine, model.engine.compile_heads(model.network), policy, packed.to(model.network.device)
        ).trace


def _rows(model: Predictor) -> list[Packed]:
    """Single rows of many lengths, up to the longest that the model takes."""
    lengths = [n for n in LENGTHS if n < model.model.max_length] + [min(model.model.max_length, LENGTHS[-1])]
    tokenizer = model.model.tokenizer
    ids = [int(tokenizer.cls_token_id or 0), *(i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids)]
    rows = [[ids[place % len(ids)] for place in range(n)] for n in dict.fromkeys(lengths)]
    return [pack_rows(model.task, [Encoded(row, [0] * len(row), 0, list(range(len(row))), [], 0)]) for row in rows]


def _reading(model: Predictor, texts: Sequence[Row], clock: Clock) -> tuple[list[Array], list[float]]:
    """Text to token ids, and logits to a prediction: what a call takes besides the model."""
    seen, ms = [], []
    for text in texts:
        encoded, tries = model.prepare([text]), []
        outcome = model.run(encoded, model.model.method.settings(), 1)
        for _ in range(ROUNDS):
            started = clock()
            model.finish([text], model.prepare([text]), outcome)
            tries.append(1000 * (clock() - started))
        row = np.zeros(len(NAMES))
        row[NAMES.index("text")], row[NAMES.index("text.token")] = 1.0, sum(len(e.ids) for e in encoded)
        seen.append(row)
        ms.append(statistics.median(tries))
    return seen, ms


def measurement_place(model: Predictor) -> dict[str, Any]:
    """Where prices hold: this machine, this engine, these versions."""
    how = {"engine": model.engine_name, "precision": model.how.precision, "threads": model.how.threads}
    return {"hardware": hardware(), **how, **engines.versions(model.engine_name), "offramp": __version__}


def stored_time_model(model: Predictor, folder: Path) -> TimeModel | None:
    """Prices that were measured here before."""
    if not (folder / FILE).is_file():
        return None
    there, where = read_json(folder / FILE), measurement_place(model)
    fitting = [one for one in there if one["place"] == where and set(one["ms"]) == set(NAMES)]
    return TimeModel(**fitting[0]) if fitting else None


def store_time_model(folder: Path, prices: TimeModel) -> None:
    """Remember prices beside the run; those of other machines and engines stay."""
    there = read_json(folder / FILE) if (folder / FILE).is_file() else []
    others = [one for one in there if one["place"] != prices.place]
    write_json(folder / FILE, [*others, asdict(prices)])


def time_model_of(model: Predictor, folder: Path, texts: Sequence[Row]) -> TimeModel:
    """Prices measured here before, else now."""
    return stored_time_model(model, folder) or remeasured_time_model(model, folder, texts)


def remeasured_time_model(model: Predictor, folder: Path, texts: Sequence[Row]) -> TimeModel:
    """Prices measured now, in the place of those that were."""
    found = measure_time_model(model, texts)
    store_time_model(folder, found)
    return found
