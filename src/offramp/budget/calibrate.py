"""Settings for a budget, found on held-out rows.

Methods that replay are recorded once; thresholds get a temperature and a search per off-ramp. The others run for real
at a few settings. Either way the result is the Pareto front, the loosest setting last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offramp import engines, methods
from offramp.budget.decoding import decoder_candidates
from offramp.budget.record import Recording, record, replay, state_at
from offramp.budget.table import fit_temperatures, table
from offramp.budget.thresholds import search
from offramp.methods import Method
from offramp.model.points import Point, Points, pareto
from offramp.model.runner import Outcome, by_row, full_macs, run_encoded, score
from offramp.parts.batch import Data
from offramp.parts.criteria import token_doubt
from offramp.parts.exits import DoubtPolicy
from offramp.parts.network import Network
from offramp.parts.space import Fixed, Integer, Threshold

CANDIDATES = 60  # global thresholds
RERUNS = 8  # settings tried by methods that cannot be replayed
FEW = 200  # rows that are too few to be halved
POINTS = 60  # per-exit settings kept
Settings = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is calibrated, on which rows."""

    network: Network
    method: Method
    data: Data

    def run(self, settings: Settings, recording: Recording | None) -> Outcome:
        """One setting: replayed if there is a recording, else for real."""
        made = methods.configure(self.method.settings, settings, self.method.name)
        policy = self.method.policy(self.network, made)
        if recording is not None:
            return replay(self.network, recording, policy)
        return run_encoded(self.network, engines.make("torch", self.network.encoder), policy, self.data.encoded)


def candidates(network: Network, method: Method, recording: Recording) -> list[Settings]:
    """Settings worth trying, tightest first, the loosest left out."""
    space = method.space
    if isinstance(space, Threshold | Integer) and space.grid:
        return [{space.name: value} for value in space.grid]
    if isinstance(space, Integer):
        most = len(network.ramps) if space.replay else network.depth - 1
        return [{space.name: value} for value in range(1, most + 1)]
    if not isinstance(space, Threshold):
        return []
    if not space.replay:
        spread = cuts(_answers(network, recording))[:: -(CANDIDATES // RERUNS)]
        return [{space.name: min(1.0, value)} for value in spread]
    doubts = _doubts(network, method, {}, recording)
    return [{space.name: min(value, method.settings.most)} for value in cuts(doubts.ravel())][::-1]


def _answers(network: Network, recording: Recording) -> NDArray[np.float64]:
    """The normalised entropy of every single answer at every off-ramp: words leave by their own."""
    packed = recording.packed
    spreads = [
        network.task.distributions(recording.logits[layer], packed.lengths, packed.tokens.get("scored"))[0]
        for layer in network.ramps
    ]
    return np.asarray(torch.cat([token_doubt(spread) for spread in spreads]).double().numpy())


def _doubts(network: Network, method: Method, settings: Settings, recording: Recording) -> NDArray[np.float64]:
    """The doubt of every row at every off-ramp."""  # [ramps, rows]
    policy = method.policy(network, methods.configure(method.settings, settings, method.name))
    assert isinstance(policy, DoubtPolicy), f"{method.name} has thresholds that replay, so its policy measures doubt"
    with torch.inference_mode():
        seen = [policy.doubt(layer, state_at(network, recording, layer)) for layer in sorted(network.ramps)]
    return np.asarray(torch.stack(seen).double().numpy())


def cuts(values: NDArray[np.float64]) -> list[float]:
    """Thresholds that part these values evenly, each in the middle of a wide gap, and one above them all.

    No value stands on a threshold, so that rounding (another batch, another engine) moves no row to the other side.
    """
    known = np.unique(values)
    gaps = np.diff(known)
    widest = [part[gaps[part].argmax()] for part in np.array_split(np.arange(len(gaps)), CANDIDATES) if len(part)]
    return [float(cut) for cut in [*((known[i] + known[i + 1]) / 2 for i in widest), known[-1] * 1.001 + 1e-6]]


def _half(subject: Subject) -> Subject:
    """Every second row (of many): thresholds found on these and scored on all flatter themselves less."""
    data = subject.data
    if len(data.rows) < FEW:
        return subject
    rows = list(data.rows)[::2]
    kept = [replace(e, example=e.example // 2) for e in data.encoded if e.example % 2 == 0]
    return replace(subject, data=Data(rows, kept))


def per_exit(subject: Subject, limit: int = POINTS) -> list[Settings]:
    """Settings with a threshold and a temperature for each off-ramp, spread evenly over the front in cost."""
    network, method = subject.network, subject.method
    recording = record(network, subject.data)
    heat = fit_temperatures(network, recording, subject.data)
    doubts = _doubts(network, method, {"temperatures": heat}, recording)
    known = table(network, recording, subject.data, doubts)
    most = np.minimum(doubts.max() * 1.001 + 1e-6, method.settings.most)
    start = np.minimum(np.array([[cut] * len(doubts) for cut in cuts(doubts.ravel())]), most)
    levels = np.stack([np.resize(cuts(own), CANDIDATES + 1) for own in doubts])  # between values, never on one
    front = search(known, start, np.minimum(levels, most))
    index = np.unique(np.linspace(0, len(front.cost) - 1, limit).round().astype(int))
    return [{"thresholds": tuple(front.thresholds[i].tolist()), "temperatures": heat} for i in index]


def calibrate(network: Network, method: Method, data: Data, name: str, fingerprint: str) -> Points:
    """The Pareto front of settings on these rows."""
    network.eval()
    task, subject = network.task, Subject(network, method, data)
    about = {"name": name, "rows": len(data.rows), "fingerprint": fingerprint}
    if network.decoder is not None:
        point = _pointer(subject, None)
        tried = [point(one) for one in ([] if isinstance(method.space, Fixed) else decoder_candidates(network, data))]
        front = pareto(tried, point({}), task.higher_is_better)
        return Points(task.metric, task.higher_is_better, about, front, scale=task.scale)
    if task.scores_by_loss:  # recording a vocabulary at every exit is out of proportion: one real, loosest run
        policy = method.policy(network, method.settings())
        metrics, outcome = score(network, engines.make("torch", network.encoder), policy, data)
        share = float(outcome.macs.sum() / full_macs(network, data.encoded, outcome).sum())
        only = Point(asdict(method.settings()), share, metrics[task.metric], float(outcome.exit_layer.mean()))
        return Points(task.metric, task.higher_is_better, about, (only,))
    space = method.space
    recording = record(network, data)
    point = _pointer(subject, recording if method.replays else None)
    settings = candidates(network, method, recording)
    if isinstance(space, Threshold) and method.replays:
        settings += per_exit(_half(subject))
    tried = [point(one) for one in settings]
    return Points(task.metric, task.higher_is_better, about, pareto(tried, point({}), task.higher_is_better))


def _pointer(subject: Subject, recording: Recording | None) -> Callable[[Settings], Point]:
    task, data = subject.network.task, subject.data

    def point(settings: Settings) -> Point:
        outcome = subject.run(settings, recording)
        full = float(full_macs(subject.network, data.encoded, outcome).sum())
        metrics = task.metrics(data.rows, task.predictions(data.rows, data.encoded, outcome.logits))
        layers, _, macs = by_row(outcome, data.encoded, len(data.rows))
        made = asdict(methods.configure(subject.method.settings, settings, subject.method.name))
        return Point(made, float(macs.sum()) / full, metrics[task.metric], float(layers.mean()))

    return point
