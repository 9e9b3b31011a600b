"""What is calibrated, on which rows; which settings are worth trying, and what one of them does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offramp import engines, methods
from offramp.calibration.exit_table import exit_table, fit_temperatures
from offramp.calibration.grids import cliff_lengths, constant_length_grid, kept_tokens
from offramp.calibration.replay import ExitRecording, record_exits, replay, replayed_state
from offramp.calibration.thresholds import search_thresholds
from offramp.core.columns import SCORED
from offramp.core.policy import PairPolicy, Policy
from offramp.inference.batching import RunOutput, full_macs, per_input_row, run_encoded
from offramp.inference.operating_points import OperatingPoint
from offramp.methods import Method, PairMethod
from offramp.nn.batches import Data
from offramp.nn.confidence import normalised_entropy
from offramp.nn.exit_policies import UncertaintyPolicy
from offramp.nn.network import Network
from offramp.nn.setting_space import IntegerSpace, LengthSpace, ThresholdSpace

CANDIDATES = 60  # global thresholds
RERUNS = 8  # settings tried by methods that cannot be replayed
EVEN, CLIFFS = 5, 4  # where they are lengths: beside the shortest, of each kind
POINTS = 60  # per-exit settings kept
GENERATIONS = 40  # of the search for them
Settings = dict[str, Any]
Predictions = list[dict[str, Any]]  # one prediction a row


@dataclass(frozen=True)
class CalibrationContext:
    """What is calibrated, on which rows."""

    network: Network
    method: Method
    data: Data
    length_policy: Policy = field(default_factory=Policy)  # drops tokens where the method is the depth half of a pair
    searched: Sequence[Settings] = ()  # settings that a search found, to be tried beside those of the method's space
    bfloat16: bool = False  # in bfloat16: near enough to rank settings that others will be scored by

    def record(self) -> ExitRecording:
        """What every exit says at the loosest setting."""
        loosest = self.method.policy(self.network, self.method.settings())
        policy = PairPolicy(self.length_policy, loosest) if self.method.replays else self.length_policy
        with self._precision():
            return record_exits(self.network, self.data, policy=policy)

    @cached_property
    def full_output(self) -> RunOutput:
        """What the loosest setting does, for real: everything is held against it, so it runs once."""
        return self._run({})

    def run(self, settings: Settings, recording: ExitRecording | None) -> RunOutput:
        """One setting: replayed if there is a recording, else for real."""
        return self.full_output if not settings and recording is None else self._run(settings, recording)

    def _run(self, settings: Settings, recording: ExitRecording | None = None) -> RunOutput:
        made = methods.configure(self.method.settings, settings, self.method.name)
        policy = self.method.policy(self.network, made)
        if recording is not None:
            return replay(self.network, recording, policy)
        engine = engines.make("torch", self.network.encoder)
        whole = (
            policy if self.network.decoder is not None else PairPolicy(self.length_policy, policy)
        )  # no pair decodes
        with self._precision():
            return run_encoded(self.network, engine, whole, self.data.encoded)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.network.device.type, torch.bfloat16, enabled=self.bfloat16)

    def subset(self, chosen: NDArray[np.bool_]) -> CalibrationContext:
        """The same on some of the rows."""
        return replace(self, data=self.data.subset(chosen.tolist()))

    def exits_at_lengths(self, settings: Settings) -> CalibrationContext:
        """The exits of a pair while its length method runs at these settings."""
        assert isinstance(self.method, PairMethod)
        length, depth = self.method.length, self.method.depth
        made = methods.configure(length.settings, settings, length.name)
        return replace(self, method=depth, length_policy=length.policy(self.network, made), searched=())

    def predictions(self, outcome: RunOutput) -> Predictions:
        """Answers to the rows."""
        return self.network.task.predictions(self.data.rows, self.data.encoded, outcome.logits)


def candidate_settings(network: Network, method: Method, recording: ExitRecording) -> list[Settings]:
    """Settings worth trying, tightest first, the loosest left out."""
    space = method.space
    if isinstance(space, ThresholdSpace | IntegerSpace) and space.grid:
        also = space.extra_settings(network) if isinstance(space, ThresholdSpace) and space.extra_settings else []
        return [*({space.name: value} for value in space.grid), *also]
    if isinstance(space, IntegerSpace):
        most = (
            space.largest(network) if space.largest else len(network.exit_heads) if space.replay else network.depth - 1
        )
        return [{space.name: value} for value in range(1, most + 1)]
    if isinstance(space, LengthSpace):
        lengths = recording.packed.lengths
        made = [*constant_length_grid(network, lengths, EVEN), *cliff_lengths(network, CLIFFS)]
        return [{space.name: shares} for shares in sorted(made, key=lambda one: kept_tokens(one, lengths))]
    if not isinstance(space, ThresholdSpace):
        return []
    if not space.replay:
        spread = threshold_cuts(_answers(network, recording))[:: -(CANDIDATES // RERUNS)]
        return [{space.name: min(1.0, value)} for value in spread]
    uncertainties = _doubts(network, method, {}, recording)
    largest: float = method.settings.largest_threshold
    return [{space.name: min(value, largest)} for value in threshold_cuts(uncertainties.ravel())][::-1]


def unique_settings(settings: Sequence[Settings]) -> list[Settings]:
    """Every setting once, in order."""
    return [one for number, one in enumerate(settings) if one not in settings[:number]]


def _answers(network: Network, recording: ExitRecording) -> NDArray[np.float64]:
    """The normalised entropy of every single answer at every off-ramp: words leave by their own."""
    packed = recording.packed
    spreads = [
        network.task.distributions(recording.logits[layer], packed.lengths, packed.tokens.get(SCORED))[0]
        for layer in network.exit_heads
    ]
    return np.asarray(torch.cat([normalised_entropy(spread) for spread in spreads]).double().numpy())


def _doubts(network: Network, method: Method, settings: Settings, recording: ExitRecording) -> NDArray[np.float64]:
    """The doubt of every row at every off-ramp."""  # [ramps, rows]
    policy = method.policy(network, methods.configure(method.settings, settings, method.name))
    assert isinstance(policy, UncertaintyPolicy), (
        f"{method.name} has thresholds that replay, so its policy measures doubt"
    )
    with torch.inference_mode():
        seen = [
            policy.uncertainty(layer, replayed_state(network, recording, layer)) for layer in sorted(network.exit_heads)
        ]
    return np.asarray(torch.stack(seen).double().numpy())


def threshold_cuts(values: NDArray[np.float64]) -> list[float]:
    """Thresholds that part these values evenly, each in the middle of a wide gap, and one above them all.

    No value stands on a threshold, so that rounding (another batch, another engine) moves no row to the other side.
    """
    known = np.unique(values)
    gaps = np.diff(known)
    widest = [part[gaps[part].argmax()] for part in np.array_split(np.arange(len(gaps)), CANDIDATES) if len(part)]
    return [float(cut) for cut in [*((known[i] + known[i + 1]) / 2 for i in widest), known[-1] * 1.001 + 1e-6]]


def search_exit_settings(
    subject: CalibrationContext, recording: ExitRecording, limit: int = POINTS, generations: int = GENERATIONS
) -> list[tuple[float, Settings]]:
    """Settings with a threshold and a temperature for each off-ramp, spread over the front, with their MAC share."""
    network, method = subject.network, subject.method
    heat = fit_temperatures(network, recording, subject.data)
    uncertainties = _doubts(network, method, {"temperatures": heat}, recording)
    known = exit_table(network, recording, subject.data, uncertainties)
    most = np.minimum(uncertainties.max() * 1.001 + 1e-6, method.settings.largest_threshold)
    start = np.minimum(np.array([[cut] * len(uncertainties) for cut in threshold_cuts(uncertainties.ravel())]), most)
    levels = np.stack(
        [np.resize(threshold_cuts(own), CANDIDATES + 1) for own in uncertainties]
    )  # between values, never on one
    front = search_thresholds(known, start, np.minimum(levels, most), generations)
    share, vectors = front.cost / known.reach[-1].mean(), front.thresholds
    index = np.unique(np.linspace(0, len(share) - 1, limit).round().astype(int))
    return [(float(share[i]), {"thresholds": tuple(vectors[i].tolist()), "temperatures": heat}) for i in index]


def point_evaluator(
    subject: CalibrationContext, recording: ExitRecording | None, answers: Predictions | None = None
) -> Callable[[Settings], OperatingPoint]:
    """What a setting does on the subject's rows: replayed if there is a recording, else for real. `answers` are those
    of the full model, from which settings depart; by default what the loosest setting says."""
    task, data = subject.network.task, subject.data
    single = subject.network.decoder is None  # sentences are scored together: no departure, no error of their own
    meant = (answers or subject.predictions(subject.run({}, recording))) if single else []

    def point(settings: Settings) -> OperatingPoint:
        outcome = subject.run(settings, recording)
        said = subject.predictions(outcome)
        score = task.metrics(data.rows, said)[task.metric]
        layers, _, macs = per_input_row(outcome, data.encoded, len(data.rows))
        made = asdict(methods.configure(subject.method.settings, settings, subject.method.name))
        error = float(np.mean(np.square(task.disagreement(said, meant))) / len(data.rows)) ** 0.5 if single else 0.0
        full = float(full_macs(subject.network, data.encoded, outcome).sum())
        return OperatingPoint(made, float(macs.sum()) / full, score, float(layers.mean()), score, error)

    return point
