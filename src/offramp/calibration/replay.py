"""Record every exit in one pass over the rows, then replay any setting without running the model.

A replay runs the same loop and the same policy over the recorded logits, with an engine that computes nothing, so
predictions, exit layers and costs are exactly those of a real run. It is valid for methods whose settings never change
later states (`replay` in their setting space). Tokens may be dropped during the recording: a replay drops the
same tokens at the same moments, so exits can be tried under one length setting after another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offramp import engines
from offramp.calibration.thresholds import ExitTable
from offramp.core.attention import AttentionScores, Layout
from offramp.core.columns import DROPPED_AT, ORIGIN
from offramp.core.cost import Event, macs
from offramp.core.loop import Engine, State, run
from offramp.core.packed import Packed
from offramp.core.policy import PairPolicy, Policy, PolicyWrapper
from offramp.inference.batching import RunOutput, full_macs, run_encoded, run_packed
from offramp.nn.batches import Data, build_batch, pack_rows
from offramp.nn.keys import EXIT_UNIT
from offramp.nn.network import Network

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ExitOutcomes:
    """What each row gets and pays at every exit; the last exit is the full model's own."""

    layers: NDArray[np.int64]  # [exits + 1]
    row_score: Array  # [exits + 1, rows] the task's score of single rows, of which the metric is the mean
    disagreement: Array  # [exits + 1, rows] with the full model
    score: Array  # [exits + 1, rows] 1 minus the error
    reach: Array  # the rest as in `ExitTable`
    ask: Array
    answer: Array
    full_macs: Array  # [rows]
    targets: Tensor | None  # [rows]; None where tokens have targets

    def keep(self, rows: NDArray[np.bool_]) -> ExitOutcomes:
        """Return the outcomes of the selected rows."""
        names = [one.name for one in fields(self) if one.name not in ("layers", "targets")]
        targets = None if self.targets is None else self.targets[torch.from_numpy(rows)]
        return replace(self, targets=targets, **{name: getattr(self, name)[..., rows] for name in names})


@dataclass(frozen=True)
class ExitRecording:
    """The outputs of every exit for every encoded row, in the order of the rows."""

    logits: dict[int, Tensor]  # layer → [rows, outputs] or [tokens, outputs]
    exit_unit: dict[int, Tensor]  # layer → [rows] or [rows, layers], where a method has a learned exit unit
    packed: Packed  # all rows together, without states; the token column `dropped_at` holds the moment of dropping
    predictor_moments: frozenset[int] = frozenset()  # moments at which the method ran a predictor
    restoring_moments: frozenset[int] = frozenset()  # those at which it ran on the dropped tokens alone
    outcomes: ExitOutcomes | None = None  # None: not computed, or rows have no scores of their own

    def keep(self, rows: Tensor, per_token: bool) -> ExitRecording:
        """Return the recording of the selected rows ([rows] bool), as if the others had never been recorded."""
        packed = self.packed.keep_rows(rows)
        index = (rows[self.packed.row_of_token] if per_token else rows).nonzero().squeeze(1)
        numbered = packed.with_rows(origin=torch.arange(packed.count)).with_tokens(origin=torch.arange(packed.total))
        logits = {layer: values[index] for layer, values in self.logits.items()}
        exit_unit = {layer: values[rows] for layer, values in self.exit_unit.items()}
        outcomes = None if self.outcomes is None else self.outcomes.keep(rows.numpy())
        return replace(self, logits=logits, exit_unit=exit_unit, packed=numbered, outcomes=outcomes)

    def keep_exits(self, layers: Collection[int], depth: int) -> ExitRecording:
        """Return the recording of a network that has only these exits below its last layer, `depth`."""
        return replace(
            self,
            logits={layer: values for layer, values in self.logits.items() if layer in layers or layer == depth},
            exit_unit={layer: values for layer, values in self.exit_unit.items() if layer in layers},
            outcomes=None,
        )


def _moment(layer: int, attended: bool) -> int:
    """Return the number of a moment at which tokens may be dropped, in the order of time."""
    return 2 * layer + int(attended)


NEVER = _moment(1 << 20, False)


@dataclass
class _Recorder(PolicyWrapper):
    """Records the output of each exit (and of the exit unit) and the tokens that the inner policy drops."""

    network: Network
    inner: Policy
    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    exit_unit: dict[int, list[Tensor]] = field(default_factory=dict)
    gone: list[Tensor] = field(default_factory=list)  # one tensor per batch
    predictor_moments: set[int] = field(default_factory=set)
    restoring_moments: set[int] = field(default_factory=set)

    def on_embeddings(self, s: State) -> None:
        self.gone.append(torch.full((s.packed.total,), NEVER))
        self.inner.on_embeddings(s)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        return self._record_dropped(_moment(layer, False), s, lambda: self.inner.before_layer(layer, s))

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        return self._record_dropped(_moment(layer, True), s, lambda: self.inner.after_attention(layer, s, scores))

    def _record_dropped(self, moment: int, s: State, decide: Callable[[], Tensor | None]) -> Tensor | None:
        before = len(s.trace)
        keep = decide()
        events = [event for event in s.trace[before:] if event.kind == "predictor"]
        whole = all(torch.equal(event.tokens, s.packed.lengths) for event in events)
        if events:
            (self.predictor_moments if whole else self.restoring_moments).add(moment)
        if keep is not None:
            self.gone[-1][s.packed.tokens[ORIGIN][~keep].cpu()] = moment
        return keep

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        leaving = self.inner.should_exit(layer, s)  # at the full setting: no row, or (a truncated model) every row
        if layer in self.network.exit_heads:
            self.logits.setdefault(layer, []).append(s.logits().float().cpu())
            if EXIT_UNIT in self.network.added:
                self.exit_unit.setdefault(layer, []).append(s.exit_unit().float().cpu())
        return leaving


def record_exits(
    network: Network, data: Data, batch_size: int = 32, engine: Engine | None = None, policy: Policy | None = None
) -> ExitRecording:
    """Return the outputs of every exit, from one pass over the rows under a `policy` that lets no row leave early."""
    engine = engine or engines.make("torch", network.encoder)
    order = sorted(range(len(data.encoded)), key=lambda i: len(data.encoded[i].ids))
    ordered, recorder = [data.encoded[i] for i in order], _Recorder(network, policy or Policy())
    output = run_encoded(network, engine, recorder, ordered, batch_size)
    recorder.logits[network.depth] = [torch.from_numpy(np.atleast_2d(part)) for part in output.logits]
    original_order = torch.tensor(np.argsort(order))
    sizes = [len(e.ids) for e in ordered] if network.per_token else [1] * len(ordered)

    def restore_order(parts: list[Tensor], pieces: list[int]) -> Tensor:
        split = torch.cat(parts).split(pieces)
        return torch.cat([split[i] for i in original_order])

    logits = {layer: restore_order(parts, sizes) for layer, parts in recorder.logits.items()}
    exit_unit = {layer: restore_order(parts, [1] * len(ordered)) for layer, parts in recorder.exit_unit.items()}
    gone = restore_order(recorder.gone, [len(e.ids) for e in ordered])
    packed = pack_rows(network.task, data.encoded).with_tokens(dropped_at=gone)
    moments = frozenset(recorder.predictor_moments), frozenset(recorder.restoring_moments)
    return ExitRecording(logits, exit_unit, packed, *moments)


@dataclass(frozen=True)
class _ReplayedDropping(Policy):
    """Drops the tokens that were dropped while recording, at the same moments."""

    recording: ExitRecording

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        return self._keep(_moment(layer, False), layer, s)

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        return self._keep(_moment(layer, True), layer, s)

    def _keep(self, moment: int, layer: int, s: State) -> Tensor | None:
        packed, gone = s.packed, s.packed.tokens.get(DROPPED_AT)
        if moment in self.recording.predictor_moments:
            s.trace.append(Event("predictor", layer, packed.rows[ORIGIN], packed.lengths, packed.lengths))
        if moment in self.recording.restoring_moments and gone is not None:
            counts = torch.bincount(packed.row_of_token[gone == moment], minlength=packed.count)
            s.trace.append(Event("predictor", layer, packed.rows[ORIGIN], counts, counts))
        return None if gone is None else gone > moment


@dataclass(frozen=True)
class _IdleEngine(Engine):
    """An engine that computes nothing: states are a column of zeros."""

    layers: int

    @property
    def depth(self) -> int:
        return self.layers

    def embed(self, packed: Packed) -> Tensor:
        return torch.zeros(packed.total, 1)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, AttentionScores | None]:
        return queries, None

    def feed(self, layer: int, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class ReplayedExitHeads:
    """Exit heads that return recorded outputs."""

    recording: ExitRecording
    per_token: bool

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        index = packed.tokens[ORIGIN] if self.per_token else packed.rows[ORIGIN]
        return self.recording.logits[layer][index]

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        """Return the recorded output of the exit unit."""
        return self.recording.exit_unit[layer][packed.rows[ORIGIN]]

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        """Refuse: methods with token predictors change later states and cannot be replayed."""
        raise NotImplementedError


def replay(network: Network, recording: ExitRecording, policy: Policy) -> RunOutput:
    """Return the logits, exit layers and costs that a real run of this policy would have."""
    heads, dropping = ReplayedExitHeads(recording, network.per_token), _ReplayedDropping(recording)
    return run_packed(network, _IdleEngine(network.depth), PairPolicy(dropping, policy), recording.packed, heads)


def replay_trace(network: Network, recording: ExitRecording, policy: Policy) -> Sequence[Event]:
    """Return the events of the loop under this policy."""
    heads = ReplayedExitHeads(recording, network.per_token)
    with torch.inference_mode():
        return run(_IdleEngine(network.depth), heads, policy, recording.packed).trace


def trace_all_exits(network: Network, recording: ExitRecording) -> Sequence[Event]:
    """Return the events of the loop when every exit is evaluated for every row and no row leaves."""
    policy = PairPolicy(_ReplayedDropping(recording), _Recorder(network, Policy()))
    heads = ReplayedExitHeads(recording, network.per_token)
    return run(_IdleEngine(network.depth), heads, policy, recording.packed).trace


def replayed_state(network: Network, recording: ExitRecording, layer: int) -> State:
    """Return the state of all rows after a layer as a policy sees it, with recorded exit outputs."""
    heads = ReplayedExitHeads(recording, network.per_token)
    return State(recording.packed, recording.packed, heads, network.depth, layer)


def exit_table(network: Network, recording: ExitRecording, data: Data, uncertainties: Array) -> ExitTable:
    """Return the score and cost of every exit for every encoded row, beside its uncertainty."""
    known = recording.outcomes
    if known is not None:
        return ExitTable(uncertainties, known.score, known.reach, known.ask, known.answer)
    exits = [*sorted(network.exit_heads), network.depth]
    learned, trace = EXIT_UNIT in network.added, trace_all_exits(network, recording)

    def cost(events: list[Event]) -> Array:
        return np.asarray(macs(events, network, recording.packed.count).numpy())

    def cost_of(kind: str, layer: int) -> Array:
        return cost([event for event in trace if event.kind == kind and event.layer == layer])

    heads = np.stack([cost_of("head", layer) for layer in exits])
    ask = np.stack([cost_of("exit_unit", layer) for layer in exits[:-1]]) if learned else heads[:-1]
    without_exits = [event for event in trace if event.kind not in ("head", "exit_unit")]
    reach = np.stack([cost([event for event in without_exits if event.layer <= layer]) for layer in exits])
    reach[-1] += heads[-1]
    answer = heads[:-1] if learned else np.zeros_like(heads[:-1])
    return ExitTable(uncertainties, _exit_scores(network, recording, data, exits), reach, ask, answer)


def _exit_scores(network: Network, recording: ExitRecording, data: Data, exits: list[int]) -> Array:
    """Return 1 minus the error of each exit on each row."""
    targets, lengths = _targets(network, data), recording.packed.lengths
    errors = [network.task.example_error(recording.logits[layer], targets, lengths) for layer in exits]
    return 1.0 - np.asarray(torch.stack(errors).double().numpy())


def _targets(network: Network, data: Data) -> Tensor:
    return build_batch(network.task, data, range(len(data.encoded)), seed=0).targets


def with_outcomes(network: Network, recording: ExitRecording, data: Data) -> ExitRecording:
    """Return the recording with the outcomes of every exit, so that settings are evaluated by looking them up.

    Unchanged where rows have no scores of their own, or several windows.
    """
    task, count = network.task, len(data.rows)
    if recording.outcomes is not None or [one.example for one in data.encoded] != list(range(count)):
        return recording
    layers = [*sorted(network.exit_heads), network.depth]
    lengths = recording.packed.lengths.tolist()
    outputs = [recording.logits[layer] for layer in layers]
    logits = [[part.numpy() for part in (one.split(lengths) if network.per_token else one)] for one in outputs]
    predictions = [task.predictions(data.rows, data.encoded, one) for one in logits]
    scores = [task.row_scores(data.rows, one) for one in predictions]
    if any(one is None for one in scores):
        return recording
    exits = len(layers) - 1
    table = exit_table(network, recording, data, np.zeros((exits, count)))
    outcomes = ExitOutcomes(
        np.array(layers),
        np.array(scores, dtype=np.float64),
        np.array([task.disagreement(one, predictions[-1]) for one in predictions], dtype=np.float64),
        table.score,
        table.reach,
        table.ask,
        table.answer,
        full_macs(network, data.encoded),
        None if network.per_token else _targets(network, data),
    )
    return replace(recording, outcomes=outcomes)


def fit_temperatures(network: Network, recording: ExitRecording, data: Data) -> tuple[float, ...]:
    """Return for each exit the divisor of its logits, between 0.5 and 4, under which the labels are most likely."""
    if "distribution" not in network.task.provides:
        return ()
    known = None if recording.outcomes is None else recording.outcomes.targets
    targets = _targets(network, data) if known is None else known
    grid = np.geomspace(0.5, 4.0, 31)

    def best(logits: Tensor) -> float:
        @cache
        def loss(place: int) -> float:
            return float(network.task.loss(logits / grid[place], targets, recording.packed.lengths))

        low, high = 0, len(grid) - 1
        while low < high:  # the loss is convex in the inverse of the temperature: it falls, then rises
            middle = (low + high) // 2
            low, high = (low, middle) if loss(middle) <= loss(middle + 1) else (middle + 1, high)
        return float(f"{grid[low]:.4g}")

    return tuple(best(recording.logits[layer]) for layer in sorted(network.exit_heads))
