"""Settings for a budget, found on held-out rows.

One pass records what every exit would say. Each candidate setting is then replayed: the same loop and the same policy
run over the recorded logits with an engine that computes nothing, so answers, exits and costs are exactly those a real
run would have, at a fraction of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offramp import engines, methods
from offramp.core.attention import Layout, Scores
from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.methods import Method
from offramp.model.points import Point, Points, pareto
from offramp.model.runner import Outcome, by_row, full_macs, run_encoded, run_packed, score
from offramp.parts.batch import Data, packed_rows
from offramp.parts.criteria import row_entropy
from offramp.parts.network import Network
from offramp.parts.space import Fixed, Threshold

CANDIDATES = 60


@dataclass(frozen=True)
class Recording:
    """What every exit says about every row, in the order of the encoded rows."""

    logits: dict[int, Tensor]  # layer → [rows, outputs] or [tokens, outputs]
    packed: Packed  # all rows together, no states


class _Recorder(Policy):
    """Lets nobody leave and notes what each off-ramp says."""

    def __init__(self, exits: Sequence[int]) -> None:
        self.exits = frozenset(exits)
        self.seen: dict[int, list[Tensor]] = {layer: [] for layer in exits}

    def leave(self, layer: int, s: State) -> Tensor | None:
        if layer in self.exits:
            self.seen[layer].append(s.logits().float())
        return None


def record(network: Network, data: Data, batch_size: int = 32) -> Recording:
    """One full pass over the rows, every exit evaluated."""
    order = sorted(range(len(data.encoded)), key=lambda i: len(data.encoded[i].ids))
    ordered = [data.encoded[i] for i in order]
    recorder = _Recorder(sorted(network.ramps))
    engine = engines.make("torch", network.encoder)
    outcome = run_encoded(network, engine, recorder, ordered, batch_size)
    last = [torch.from_numpy(np.atleast_2d(part)) for part in outcome.logits]
    by_layer = {layer: torch.cat(parts) for layer, parts in recorder.seen.items()}
    by_layer[network.depth] = torch.cat(last)
    packed = packed_rows(network.task, ordered)
    back = torch.tensor(np.argsort(order))
    if network.per_token:
        sizes = packed.lengths.tolist()
        by_layer = {k: torch.cat([v.split(sizes)[i] for i in back]) for k, v in by_layer.items()}
    else:
        by_layer = {k: v[back] for k, v in by_layer.items()}
    return Recording(by_layer, packed_rows(network.task, data.encoded))


@dataclass(frozen=True)
class _Idle:
    """An engine that computes nothing: states have no width."""

    depth: int

    def embed(self, packed: Packed) -> Tensor:
        return torch.zeros(packed.total, 0)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, Scores | None]:
        return queries, None

    def feed(self, layer: int, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class _Recorded:
    """Heads that answer from the recording."""

    recording: Recording
    per_token: bool

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        index = packed.tokens["origin"] if self.per_token else packed.rows["origin"]
        return self.recording.logits[layer][index]


def replay(network: Network, recording: Recording, policy: Policy) -> Outcome:
    """What a real run of this policy would answer, leave at and cost."""
    heads = _Recorded(recording, network.per_token)
    return run_packed(network, _Idle(network.depth), policy, recording.packed, heads)


def candidates(network: Network, method: Method, recording: Recording) -> list[dict[str, Any]]:
    """Settings worth trying, loosest left out."""
    space = method.space
    if isinstance(space, Fixed) or not isinstance(space, Threshold):
        return []
    seen = [row_entropy(network.task, logits, recording.packed) for logits in recording.logits.values()]
    return [{space.name: value} for value in cuts(torch.cat(seen).double().numpy())]


def cuts(values: NDArray[np.float64]) -> list[float]:
    """Thresholds that part these values evenly, each in the middle of a wide gap, and one above them all.

    No value stands on a threshold, so that rounding (another batch, another engine) moves no row to the other side.
    """
    known = np.unique(values)
    gaps = np.diff(known)
    widest = [part[gaps[part].argmax()] for part in np.array_split(np.arange(len(gaps)), CANDIDATES) if len(part)]
    return [float(cut) for cut in [*((known[i] + known[i + 1]) / 2 for i in widest), known[-1] * 1.001 + 1e-6]]


def calibrate(network: Network, method: Method, data: Data, name: str, fingerprint: str) -> Points:
    """The Pareto front of settings on these rows."""
    network.eval()
    task = network.task
    about = {"name": name, "rows": len(data.rows), "fingerprint": fingerprint}
    if task.scores_by_loss:  # recording a vocabulary at every exit is out of proportion: one real run at full depth
        metrics, outcome = score(network, engines.make("torch", network.encoder), Policy(), data)
        only = Point(asdict(method.settings()), 1.0, metrics[task.metric], float(outcome.exit_layer.mean()))
        return Points(task.metric, task.higher_is_better, about, (only,))
    recording = record(network, data)
    full = float(full_macs(network, data.encoded).sum())

    def point(settings: dict[str, Any]) -> Point:
        made = methods.configure(method.settings, settings, method.name)
        outcome = replay(network, recording, method.policy(network, made))
        metrics = task.metrics(data.rows, task.predictions(data.rows, data.encoded, outcome.logits))
        layers, _, macs = by_row(outcome, data.encoded, len(data.rows))
        return Point(asdict(made), float(macs.sum()) / full, metrics[task.metric], float(layers.mean()))

    loosest = point({})
    tried = [point(settings) for settings in candidates(network, method, recording)]
    return Points(task.metric, task.higher_is_better, about, pareto(tried, loosest, task.higher_is_better))
