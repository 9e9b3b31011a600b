"""A linear model of the time that one row takes on this machine: measured once and kept beside the run.

The time of a single row is explained by the events of its trace: a constant for each half-layer, more for each token
and, in attention, for each pair of tokens; a constant and a token price for each head, exit unit and predictor; a
constant for the call itself, and for reading its text. Rows of many lengths are sent through the real loop to several
depths, some losing tokens on the way, and non-negative coefficients are fitted to the relative error of the measured
milliseconds. The model knows nothing of how an engine computes a layer, so it serves every engine.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor

from offramp import __version__, engines
from offramp.core.attention import AttentionScores
from offramp.core.columns import POSITION
from offramp.core.cost import Event
from offramp.core.loop import State, run
from offramp.core.packed import Packed
from offramp.core.policy import Needs, Policy
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.inference import format1
from offramp.inference.batching import run_packed
from offramp.inference.predictor import Predictor
from offramp.nn.batches import pack_rows
from offramp.utils import schema
from offramp.utils.files import read_json, write_json
from offramp.utils.hardware import hardware

Array = NDArray[np.float64]
Row = Mapping[str, Any]
Clock = Callable[[], float]
FILE = "latency.json"
LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512)
ROUNDS = 7
KINDS = ("attend", "feed", "head", "exit_unit", "predictor")  # of events with a constant and a token price
FEATURES = (
    "text",
    "text.token",
    "call",
    "embed.token",
    *(f"{kind}{part}" for kind in KINDS for part in ("", ".token")),
    "attend.pair",
)


@dataclass(frozen=True)
class TimeModel:
    """Milliseconds per unit of each feature, and where they were measured."""

    ms: dict[str, float]
    error: float  # mean relative error of the fit on the measured samples
    samples: int
    place: dict[str, Any]  # hardware, engine and versions: the model is valid only there

    def predict(self, features: Array) -> Array:
        """Return the milliseconds of rows with these features."""
        return np.asarray(features @ np.array([self.ms[name] for name in FEATURES]))


def trace_features(trace: Sequence[Event], rows: int, text_tokens: Sequence[int] | None = None) -> Array:
    """Return the features of each row [rows, FEATURES]; with `text_tokens`, reading its text is included."""
    counts = {name: np.zeros(rows) for name in FEATURES}
    counts["call"] += 1.0
    if text_tokens is not None:
        counts["text"] += 1.0
        counts["text.token"] += np.asarray(text_tokens, dtype=np.float64)
    for event in trace:
        index, tokens = event.rows.cpu().numpy(), event.tokens.cpu().numpy().astype(np.float64)
        if event.kind == "embed":
            np.add.at(counts["embed.token"], index, tokens)
            continue
        np.add.at(counts[event.kind], index, (tokens > 0).astype(np.float64))
        np.add.at(counts[f"{event.kind}.token"], index, tokens)
        if event.kind == "attend":
            np.add.at(counts["attend.pair"], index, tokens * event.keys.cpu().numpy())
    return np.stack([counts[name] for name in FEATURES], axis=1)


def fit_time_model(features: Array, ms: Array) -> tuple[dict[str, float], float]:
    """Return coefficients that explain measured milliseconds, and the mean relative error that is left."""
    coefficients, _ = nnls(features / ms[:, None], np.ones(len(ms)), maxiter=1000)
    errors = np.abs(features @ coefficients / ms - 1.0)
    return {name: float(value) for name, value in zip(FEATURES, coefficients, strict=True)}, float(errors.mean())


@dataclass(frozen=True)
class Probe(Policy):
    """Every row leaves at a given exit; tokens may be dropped after the first attention."""

    exits: frozenset[int]  # exits that are evaluated
    depth: int
    keep: int | None = None  # tokens

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        return s.packed.tokens[POSITION] < self.keep if self.keep is not None and layer == 1 else None

    def needs(self, layer: int) -> Needs:
        drops = self.keep is not None and layer == 1
        return Needs(after_attention=drops, should_exit=layer in self.exits or layer == self.depth)

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        if layer in self.exits:
            s.logits()
        return torch.ones(s.packed.count, dtype=torch.bool) if layer == self.depth else None


def _probes(predictor: Predictor, tokens: int) -> list[Policy]:
    """Return policies of different depths and lengths, and the method's own for what it computes besides layers."""
    network, method = predictor.network, predictor.model.method
    exits, depth = sorted(network.exit_heads), network.depth
    early = sorted({exits[0], exits[len(exits) // 2], exits[-1]}) if exits else []
    probes: list[Policy] = [Probe(frozenset(some), at) for at in [*early, depth] for some in ((), exits)]
    probes += [Probe(frozenset(), depth, keep) for keep in {1, -(-tokens // 2)}]
    points = predictor.points.points if predictor.points else ()
    settings = [method.settings(), *(predictor.settings(given=point.settings) for point in points[:1])]
    return [*probes, *(method.policy(network, one) for one in settings)]


def measure_time_model(predictor: Predictor, texts: Sequence[Row], clock: Clock = time.perf_counter) -> TimeModel:
    """Measure this model on this machine; `texts` are rows to read, a few of each length."""
    jobs = [(packed, policy) for packed in _probe_rows(predictor) for policy in _probes(predictor, packed.total)]
    features = [trace_features(run_trace(predictor, policy, packed), 1)[0] for packed, policy in jobs]  # also warms up
    times = np.zeros((len(jobs), ROUNDS))
    for number, (index, (packed, policy)) in itertools.product(range(ROUNDS), enumerate(jobs)):
        started = clock()
        run_packed(predictor.network, predictor.engine, policy, packed)
        times[index, number] = 1000 * (clock() - started)
    text_features, text_times = _measure_texts(predictor, texts, clock)
    ms = np.array([*np.median(times, axis=1), *text_times])
    coefficients, error = fit_time_model(np.stack([*features, *text_features]), ms)
    return TimeModel(coefficients, round(error, 4), len(ms), measurement_place(predictor))


def run_trace(predictor: Predictor, policy: Policy, packed: Packed) -> Sequence[Event]:
    """Return the events of the loop for a batch under a policy."""
    network, engine = predictor.network, predictor.engine
    with torch.inference_mode():
        return run(engine, engine.compile_heads(network), policy, packed.to(network.device)).trace


def _probe_rows(predictor: Predictor) -> list[Packed]:
    """Return single rows of many lengths, up to the longest that the model takes."""
    model, tokenizer = predictor.model, predictor.model.tokenizer
    lengths = [n for n in LENGTHS if n < model.max_length] + [min(model.max_length, LENGTHS[-1])]
    ids = [int(tokenizer.cls_token_id or 0), *(i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids)]
    rows = [[ids[place % len(ids)] for place in range(n)] for n in dict.fromkeys(lengths)]
    return [pack_rows(predictor.task, [Encoded(row, [0] * len(row), 0, list(range(len(row))), [], 0)]) for row in rows]


def _measure_texts(predictor: Predictor, texts: Sequence[Row], clock: Clock) -> tuple[list[Array], list[float]]:
    """Measure text to token ids and logits to a prediction: the time of a call besides the model."""
    features, ms = [], []
    for text in texts:
        encoded, times = predictor.prepare([text]), []
        output = predictor.run(encoded, predictor.model.method.settings(), 1)
        for _ in range(ROUNDS):
            started = clock()
            predictor.finish([text], predictor.prepare([text]), output)
            times.append(1000 * (clock() - started))
        row = np.zeros(len(FEATURES))
        row[FEATURES.index("text")] = 1.0
        row[FEATURES.index("text.token")] = sum(len(e.ids) for e in encoded)
        features.append(row)
        ms.append(statistics.median(times))
    return features, ms


def measurement_place(predictor: Predictor) -> dict[str, Any]:
    """Return where a time model is valid: this machine, this engine, these versions."""
    how = {"engine": predictor.engine_name, "precision": predictor.how.precision, "threads": predictor.how.threads}
    return {"hardware": hardware(), **how, **engines.versions(predictor.engine_name), "offramp": __version__}


def _read_time_models(folder: Path) -> list[TimeModel]:
    """Return the stored time models; they can be measured again, so that damaged ones count as absent."""
    try:
        stored = read_json(folder / FILE) if (folder / FILE).is_file() else []
    except OfframpError:
        return []
    found = []
    for one in stored if isinstance(stored, list) else []:
        if isinstance(one, dict) and isinstance(one.get("ms"), dict):
            with suppress(schema.SchemaError):
                found.append(schema.from_json(TimeModel, format1.time_model(one)))
    return found


def stored_time_model(predictor: Predictor, folder: Path) -> TimeModel | None:
    """Return the time model that was measured here before, if there is one."""
    place = measurement_place(predictor)
    return next((one for one in _read_time_models(folder) if one.place == place and set(one.ms) == set(FEATURES)), None)


def store_time_model(folder: Path, model: TimeModel) -> None:
    """Write a time model beside the run; those of other machines and engines stay."""
    others = [one for one in _read_time_models(folder) if one.place != model.place]
    write_json(folder / FILE, [asdict(one) for one in (*others, model)])


def time_model_of(predictor: Predictor, folder: Path, texts: Sequence[Row]) -> TimeModel:
    """Return the stored time model, else measure one."""
    return stored_time_model(predictor, folder) or remeasured_time_model(predictor, folder, texts)


def remeasured_time_model(predictor: Predictor, folder: Path, texts: Sequence[Row]) -> TimeModel:
    """Measure a time model and store it in the place of an older one."""
    model = measure_time_model(predictor, texts)
    store_time_model(folder, model)
    return model
