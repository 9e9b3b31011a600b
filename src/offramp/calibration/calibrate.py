"""Find the settings of a method that are worth using, on held-out rows.

A method whose settings can be replayed is recorded once, and every setting is replayed on the recording. Beside one
threshold for all exits, a search gives each exit its own threshold and a temperature; those settings are used where
they win on rows they were not found on. Other methods run for real at a few settings, and at a few more where the
steps between them are widest. A pair does both: for each of a few settings of its length method the exits are recorded
and searched. The result is the Pareto front of cost and score, the full setting last.
"""

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
from offramp.calibration.diagnostics import calibration_warnings
from offramp.calibration.grids import USEFUL_LOSS, cliff_lengths, constant_length_grid, kept_tokens, refine_grid
from offramp.calibration.layer_search import STARTS, search_layer_values
from offramp.calibration.loss_bounds import CONFIDENCE, MeasuredPoint, bound_losses, loss_bounds, stored_points
from offramp.calibration.replay import (
    ExitOutcomes,
    ExitRecording,
    exit_table,
    fit_temperatures,
    record_exits,
    replay,
    replayed_state,
    with_outcomes,
)
from offramp.calibration.scores import (
    costs_at_least,
    cross_fitted_gains,
    keeps_at_least,
    monotone_scores,
    shrink_scores,
)
from offramp.calibration.thresholds import CUTS, search_thresholds, threshold_cuts
from offramp.calibration.usefulness import keep_useful_points
from offramp.core.columns import SCORED
from offramp.core.engine import Engine
from offramp.core.policy import PairPolicy, Policy
from offramp.decoding.calibration import decoder_candidates
from offramp.errors import OfframpError
from offramp.inference.batching import RunOutput, full_macs, per_input_row, run_encoded, score_policy
from offramp.inference.operating_points import OperatingPoint, OperatingPoints, pareto_front
from offramp.methods import Method, PairMethod
from offramp.nn.batches import Data
from offramp.nn.confidence import normalised_entropy
from offramp.nn.exit_policies import ThresholdPolicy, UncertaintyPolicy
from offramp.nn.network import Network
from offramp.nn.setting_space import FixedSpace, IntegerSpace, LengthSpace, ThresholdSpace

RERUNS = 8  # settings tried by methods that cannot be replayed
EVEN, CLIFFS = 5, 4  # of those, where they are lengths: constant drops and cliffs, beside the shortest lengths
FEW_ROWS = 200  # rows below which no threshold is searched for every exit
SUBSET_ROWS, SUBSET_TOKENS = 1000, 100_000  # size of the subset that a training is calibrated on
POINTS = 60  # settings with a threshold per exit that are kept
GENERATIONS, CHILDREN = 40, 400  # of the search for them
PAIR_POINTS, PAIR_GENERATIONS = 24, 8  # the same for a pair, under each length setting
ENGINE, PRECISION = "torch", "fp32"  # what settings are calibrated on
Settings = dict[str, Any]
Predictions = list[dict[str, Any]]  # one prediction per row
Evaluator = Callable[[Settings], MeasuredPoint]


@dataclass(frozen=True)
class CalibrationEngine:
    """What settings are calibrated on. Another precision decides a little differently, so its points are its own."""

    name: str = ENGINE
    precision: str = PRECISION
    opened: Engine | None = None  # None: opened when needed

    def open(self, network: Network) -> Engine:
        """Return the engine over a network's encoder."""
        return self.opened or engines.make(self.name, network.encoder)


@dataclass(frozen=True)
class CalibrationContext:
    """A method of a network and the rows it is calibrated on."""

    network: Network
    method: Method
    data: Data
    length_policy: Policy = field(default_factory=Policy)  # drops tokens where the method is the depth half of a pair
    searched: Sequence[Settings] = ()  # settings that a length search found, tried beside those of the setting space
    searched_among: int = 0  # lengths that these were the best of, on rows that are here as well
    bfloat16: bool = False  # precise enough to rank settings that are scored again later
    loss_confidence: float = CONFIDENCE  # of the bounds on what settings lose
    closed_exits: frozenset[int] = frozenset()  # layers whose exits no setting uses
    engine: CalibrationEngine = field(default_factory=CalibrationEngine)
    generations: int = GENERATIONS  # of the search for a threshold per exit
    children: int = CHILDREN  # in each of them

    def candidates(self, recording: ExitRecording) -> list[Settings]:
        """Return the settings worth trying (`candidate_settings`) without the closed exits, and those of a search."""
        settings, space = candidate_settings(self.network, self.method, recording), self.method.space
        if self.closed_exits and isinstance(space, ThresholdSpace):
            is_open = [float(layer not in self.closed_exits) for layer in sorted(self.network.exit_heads)]
            settings = [{"thresholds": tuple(one[space.name] * share for share in is_open)} for one in settings]
        return unique_settings([*settings, *self.searched])

    def record(self) -> ExitRecording:
        """Return the outputs of every exit at the full setting."""
        full = self.method.policy(self.network, self.method.settings())
        policy = PairPolicy(self.length_policy, full) if self.method.replays else self.length_policy
        with self._precision():
            return record_exits(self.network, self.data, engine=self.engine.open(self.network), policy=policy)

    @cached_property
    def full_output(self) -> RunOutput:
        """The real run at the full setting, which every setting is compared with."""
        return self._run({})

    def run(self, settings: Settings, recording: ExitRecording | None) -> RunOutput:
        """Run one setting: replayed if there is a recording, else for real."""
        return self.full_output if not settings and recording is None else self._run(settings, recording)

    def _run(self, settings: Settings, recording: ExitRecording | None = None) -> RunOutput:
        configured = methods.configure(self.method.settings, settings, self.method.name)
        policy = self.method.policy(self.network, configured)
        if recording is not None:
            return replay(self.network, recording, policy)
        engine = self.engine.open(self.network)
        if self.network.decoder is None:  # no pair decodes
            policy = PairPolicy(self.length_policy, policy)
        with self._precision():
            return run_encoded(self.network, engine, policy, self.data.encoded)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.network.device.type, torch.bfloat16, enabled=self.bfloat16)

    def subset(self, chosen: NDArray[np.bool_]) -> CalibrationContext:
        """Return the same context on some of the rows."""
        return replace(self, data=self.data.subset(chosen.tolist()))

    def select_rows(
        self, chosen: NDArray[np.bool_], recording: ExitRecording
    ) -> tuple[CalibrationContext, ExitRecording]:
        """Return the context and its recording on some of the rows, as if the others did not exist."""
        keep = torch.tensor([bool(chosen[e.example]) for e in self.data.encoded])
        return self.subset(chosen), recording.keep(keep, self.network.per_token)

    def exits_at_lengths(self, settings: Settings) -> CalibrationContext:
        """Return the context of a pair's exits while its length method runs at these settings."""
        assert isinstance(self.method, PairMethod)
        length, depth = self.method.length, self.method.depth
        configured = methods.configure(length.settings, settings, length.name)
        policy = length.policy(self.network, configured)
        return replace(self, method=depth, length_policy=policy, searched=(), generations=PAIR_GENERATIONS)

    def predictions(self, output: RunOutput) -> Predictions:
        """Return the predictions for the rows."""
        return self.network.task.predictions(self.data.rows, self.data.encoded, output.logits)

    @property
    def even_rows(self) -> NDArray[np.bool_]:
        """Every other row: settings are found on these and scored on the rest."""
        return np.arange(len(self.data.rows)) % 2 == 0


def find_operating_points(
    network: Network,
    method: Method,
    data: Data,
    name: str,
    fingerprint: str,
    searched: Sequence[Settings] = (),
    loss_confidence: float = CONFIDENCE,
    closed_exits: frozenset[int] = frozenset(),
    engine: CalibrationEngine | None = None,
    searched_among: int = 0,
) -> OperatingPoints:
    """Return the Pareto front of settings on these rows.

    `searched`: settings of a length search, tried as well; `searched_among`: so many lengths were scored on these rows.
    """
    network.eval()
    task = network.task
    check_closed_exits(network, method, closed_exits)
    context = CalibrationContext(
        network,
        method,
        data,
        searched=searched,
        searched_among=searched_among,
        loss_confidence=loss_confidence,
        closed_exits=closed_exits,
        engine=engine or CalibrationEngine(),
    )
    rows = {"name": name, "rows": len(data.rows), "fingerprint": fingerprint}
    found = OperatingPoints(
        task.metric,
        task.higher_is_better,
        {**rows, "closed_exits": sorted(closed_exits)} if closed_exits else rows,
        (),
        engine=context.engine.name,
        precision=context.engine.precision,
    )
    if network.decoder is not None:  # generation cannot be replayed: each token depends on those before it
        settings, scored_on = _decoder_settings(context)
        evaluate = point_evaluator(scored_on, None)
        tried = [evaluate(one) for one in settings]
        front = pareto_front(tried, evaluate({}), task.higher_is_better)
        found = replace(
            found,
            points=stored_points(front),
            scale=task.scale,
            bounds=loss_bounds(tried, loss_confidence, len(data.rows)),
        )
        found = replace(found, warnings=calibration_warnings(network, None, tried, found))
        return keep_useful_points(found, task, data.rows)
    if task.scores_by_loss:  # every exit would record a vocabulary: one real run at the full setting
        return replace(found, points=(_full_point_by_loss(context),))
    recording = context.record()
    *explored, full_point = explore_settings(context, recording)
    front = pareto_front(explored, full_point, task.higher_is_better)
    found = replace(found, points=stored_points(front), bounds=loss_bounds(explored, loss_confidence, len(data.rows)))
    found = replace(found, warnings=calibration_warnings(network, recording, explored, found))
    return keep_useful_points(found, task, data.rows)


def _full_point_by_loss(context: CalibrationContext) -> OperatingPoint:
    """Return the full setting's point for a task that is scored by its loss."""
    network, settings = context.network, context.method.settings()
    policy, engine = context.method.policy(network, settings), context.engine.open(network)
    metrics, output = score_policy(network, engine, policy, context.data)
    share = float(output.macs.sum() / full_macs(network, context.data.encoded, output).sum())
    return OperatingPoint(asdict(settings), share, metrics[network.task.metric], float(output.exit_layer.mean()))


def _decoder_settings(context: CalibrationContext) -> tuple[list[Settings], CalibrationContext]:
    """Return settings to decode with, and the rows to score them on: other rows than they were found on, if many."""
    network, data = context.network, context.data
    if isinstance(context.method.space, FixedSpace):
        return [], context
    if len(data.rows) < FEW_ROWS:
        return decoder_candidates(network, data), context
    even = context.even_rows
    return decoder_candidates(network, context.subset(even).data), context.subset(~even)


def explore_settings(context: CalibrationContext, recording: ExitRecording) -> list[OperatingPoint]:
    """Return the points of all settings worth trying, the full setting last."""
    method, higher = context.method, context.network.task.higher_is_better
    if isinstance(method, PairMethod):
        return _explore_pair(context, method, recording)
    space = method.space
    if method.replays:
        recording = with_outcomes(context.network, recording, context.data)
    evaluate = point_evaluator(
        context, recording if method.replays else None, own_family=isinstance(space, LengthSpace)
    )
    settings = context.candidates(recording)
    tried: list[OperatingPoint] = [evaluate(one) for one in settings]
    full_point = evaluate({})
    if isinstance(space, ThresholdSpace) and space.grid:
        tried += refine_grid(space.name, tried[: len(space.grid)], full_point, evaluate)
    tried = monotone_scores(
        tried, higher, keeps_at_least(space.name) if isinstance(space, LengthSpace) else costs_at_least
    )
    enough, searches_exits = len(context.data.rows) >= FEW_ROWS, has_searchable_thresholds(method)
    layered = space if isinstance(space, ThresholdSpace) and space.per_layer else None
    if enough and layered is not None:
        tried += _search_layers(context, layered, tried, full_point)
    if enough and searches_exits and tried:
        tried += cross_fitted_gains(context, recording, tried, search_exit_settings, point_evaluator)
    searched = enough and (searches_exits or layered is not None)  # whether or not anything was found
    return [*bound_losses(tried, context.loss_confidence, searched, context.searched_among), full_point]


def _search_layers(
    context: CalibrationContext, space: ThresholdSpace, grid: Sequence[OperatingPoint], full_point: OperatingPoint
) -> list[OperatingPoint]:
    """Return points with a number for every layer, found on half of the rows and scored on the other half."""
    higher, even = context.network.task.higher_is_better, context.even_rows
    find, measure = (point_evaluator(context.subset(rows), None) for rows in (even, ~even))
    useful = [point for point in grid if abs(full_point.score - point.score) <= USEFUL_LOSS]
    chosen = {round(place) for place in np.linspace(0, len(useful) - 1, STARTS)} if useful else set()
    starts = [float(useful[place].settings[space.name]) for place in sorted(chosen)]
    found = search_layer_values(
        lambda values: find({space.per_layer: values}), starts, context.network.depth, find({}), USEFUL_LOSS, higher
    )
    lost = full_point.score - measure({}).score  # between all rows and those that score
    points = [measure({space.per_layer: values}) for values in found]
    return [replace(point, score=point.score + lost, family=space.per_layer) for point in points]


def _explore_pair(context: CalibrationContext, pair: PairMethod, recording: ExitRecording) -> list[OperatingPoint]:
    """Return the points of a pair: its exits under each of a few length settings."""
    higher = context.network.task.higher_is_better
    searched = [pair.merged_settings.part(0, one) for one in context.searched]
    candidates = candidate_settings(context.network, pair.length, recording)
    full_predictions = context.predictions(context.run({}, None))
    *measured, full_point = (
        point
        for lengths in [*unique_settings([*searched, *candidates]), {}]
        for point in pair_points_at_lengths(context, lengths, full_predictions, split_rows=True)
    )
    tried = bound_losses(
        measured, context.loss_confidence, more_families=context.searched_among
    )  # of all of them: the front is a choice
    front = pareto_front(shrink_scores(tried, higher), full_point, higher)[:-1]
    return [*monotone_scores(front, higher), full_point]


def pair_points_at_lengths(
    context: CalibrationContext, lengths: Settings, full_predictions: Predictions, split_rows: bool = False
) -> list[MeasuredPoint]:
    """Return a pair's points at one length setting and a few settings of its exits, the full setting of the exits last.

    `full_predictions` are those of the full model. With `split_rows`, thresholds of every exit are found on half of the
    rows and scored on the other half, and where rows are few there is one threshold for all: for callers that do not
    score the points again on other rows.
    """
    pair, exits = context.method, context.exits_at_lengths(lengths)
    assert isinstance(pair, PairMethod)
    recording = exits.record()
    if has_searchable_thresholds(exits.method) and not (split_rows and len(context.data.rows) < FEW_ROWS):
        searched_on = exits, recording
        if split_rows:
            even = exits.even_rows
            searched_on, (exits, recording) = exits.select_rows(even, recording), exits.select_rows(~even, recording)
            full_predictions = [one for one, is_even in zip(full_predictions, even, strict=True) if not is_even]
        settings = [one for _, one in search_exit_settings(*searched_on, PAIR_POINTS)]
    else:
        settings = candidate_settings(exits.network, exits.method, recording)
    evaluate = point_evaluator(exits, recording if exits.method.replays else None, full_predictions)
    length_settings = asdict(methods.configure(pair.length.settings, lengths, pair.length.name))
    points = [evaluate(one) for one in [*settings, {}]]
    return [
        replace(point, settings=pair.merged_settings.join(length_settings, point.settings), family=repr(lengths))
        for point in points
    ]


def has_searchable_thresholds(method: Method) -> bool:
    """Return whether each exit may have its own threshold, found without running the model."""
    return isinstance(method.space, ThresholdSpace) and method.replays and method.space.per_exit


def check_closed_exits(network: Network, method: Method, closed: frozenset[int]) -> None:
    """Refuse to close exits that a network does not have, or of a method without a threshold for every exit."""
    if not closed:
        return
    exits, depth = sorted(network.exit_heads), method.depth if isinstance(method, PairMethod) else method
    if not has_searchable_thresholds(depth):
        given, fix = f"method {method.name!r}", "train it without them, e.g. with --set exit0=false"
        raise OfframpError("a method whose exits can be closed one by one", given, fix)
    if not closed <= set(exits):
        given = f"layers {', '.join(map(str, sorted(closed)))}"
        raise OfframpError("exits to close", given, f"use some of: {', '.join(map(str, exits))}")


def candidate_settings(network: Network, method: Method, recording: ExitRecording) -> list[Settings]:
    """Return settings worth trying, cheapest first, without the full setting."""
    space = method.space
    if isinstance(space, ThresholdSpace | IntegerSpace) and space.grid:
        also = space.extra_settings(network) if isinstance(space, ThresholdSpace) and space.extra_settings else []
        return [*({space.name: value} for value in space.grid), *also]
    if isinstance(space, IntegerSpace):
        largest = (
            space.largest(network) if space.largest else len(network.exit_heads) if space.replay else network.depth - 1
        )
        return [{space.name: value} for value in range(1, largest + 1)]
    if isinstance(space, LengthSpace):
        lengths = recording.packed.lengths
        grid = [*constant_length_grid(network, lengths, EVEN), *cliff_lengths(network, CLIFFS)]
        return [{space.name: shares} for shares in sorted(grid, key=lambda shares: kept_tokens(shares, lengths))]
    if not isinstance(space, ThresholdSpace):
        return []
    if not space.replay:
        cuts = threshold_cuts(_answer_uncertainties(network, recording))[:: -(CUTS // RERUNS)]
        return [{space.name: min(1.0, cut)} for cut in cuts]
    uncertainties = row_uncertainties(network, method, {}, recording)
    return [{space.name: min(cut, method.settings.largest_threshold)} for cut in threshold_cuts(uncertainties.ravel())][
        ::-1
    ]


def unique_settings(settings: Sequence[Settings]) -> list[Settings]:
    """Return every setting once, in order."""
    return [one for number, one in enumerate(settings) if one not in settings[:number]]


def _answer_uncertainties(network: Network, recording: ExitRecording) -> NDArray[np.float64]:
    """Return the normalised entropy of every single answer (of tagging: every word) at every exit."""
    packed = recording.packed
    distributions = [
        network.task.distributions(recording.logits[layer], packed.lengths, packed.tokens.get(SCORED))[0]
        for layer in network.exit_heads
    ]
    return np.asarray(torch.cat([normalised_entropy(one) for one in distributions]).double().numpy())


def row_uncertainties(
    network: Network, method: Method, settings: Settings, recording: ExitRecording
) -> NDArray[np.float64]:
    """Return the uncertainty of every row at every exit."""
    policy = method.policy(network, methods.configure(method.settings, settings, method.name))
    assert isinstance(policy, UncertaintyPolicy), f"the thresholds of {method.name} replay, so it measures uncertainty"
    with torch.inference_mode():
        uncertainties = [
            policy.uncertainty(layer, replayed_state(network, recording, layer)) for layer in sorted(network.exit_heads)
        ]
    return np.asarray(torch.stack(uncertainties).double().numpy())  # [exits, rows]


def search_exit_settings(
    context: CalibrationContext, recording: ExitRecording, limit: int = POINTS
) -> list[tuple[float, Settings]]:
    """Return settings with a threshold and a temperature per exit, spread over the front, with their MAC share."""
    network, method = context.network, context.method
    temperatures = fit_temperatures(network, recording, context.data)
    uncertainties = row_uncertainties(network, method, {"temperatures": temperatures}, recording)
    table = exit_table(network, recording, context.data, uncertainties)
    largest = np.minimum(uncertainties.max() * 1.001 + 1e-6, method.settings.largest_threshold)
    start = np.minimum(np.array([[cut] * len(uncertainties) for cut in threshold_cuts(uncertainties.ravel())]), largest)
    levels = np.minimum(np.stack([np.resize(threshold_cuts(values), CUTS + 1) for values in uncertainties]), largest)
    closed = [number for number, layer in enumerate(sorted(network.exit_heads)) if layer in context.closed_exits]
    start[:, closed], levels[closed] = 0.0, 0.0
    front = search_thresholds(table, start, levels, context.generations, context.children)
    share, vectors = front.cost / table.reach[-1].mean(), front.thresholds
    index = np.unique(np.linspace(0, len(share) - 1, limit).round().astype(int))
    return [(float(share[i]), {"thresholds": tuple(vectors[i].tolist()), "temperatures": temperatures}) for i in index]


def point_evaluator(
    context: CalibrationContext,
    recording: ExitRecording | None,
    full_predictions: Predictions | None = None,
    own_family: bool = False,
) -> Evaluator:
    """Return a function that gives the operating point of a setting on the context's rows.

    Settings are replayed if there is a recording, else run. `full_predictions` are those of the full model, which
    disagreement and losses are measured against; by default those of the full setting. With `own_family` every
    setting is bounded by itself: for settings of which costlier ones are not always better. Where the recording holds
    the outcomes of every exit, a setting is evaluated by looking them up.
    """
    task, data = context.network.task, context.data
    if recording is not None and recording.outcomes is not None and full_predictions is None:
        return _outcome_evaluator(context, recording, recording.outcomes, own_family)
    single = context.network.decoder is None  # translations are scored together: no error of single rows
    reference = (full_predictions or context.predictions(context.run({}, recording))) if single else []
    full_scores = task.row_scores(data.rows, reference) if single else None

    def evaluate(settings: Settings) -> MeasuredPoint:
        output = context.run(settings, recording)
        predictions = context.predictions(output)
        score = task.metrics(data.rows, predictions)[task.metric]
        layers, _, macs = per_input_row(output, data.encoded, len(data.rows))
        configured = asdict(methods.configure(context.method.settings, settings, context.method.name))
        error = 0.0
        if single:
            error = float(np.mean(np.square(task.disagreement(predictions, reference))) / len(data.rows)) ** 0.5
        full = float(full_macs(context.network, data.encoded, output).sum())
        scores = task.row_scores(data.rows, predictions) if single else None
        return MeasuredPoint(
            configured,
            float(macs.sum()) / full,
            score,
            float(layers.mean()),
            score,
            error,
            row_losses=None if scores is None or full_scores is None else np.subtract(full_scores, scores),
            family=repr(settings) if own_family else "",
        )

    return evaluate


def _outcome_evaluator(
    context: CalibrationContext, recording: ExitRecording, outcomes: ExitOutcomes, own_family: bool
) -> Evaluator:
    """Return `point_evaluator` for a recording with outcomes: the same points, without answers in between."""
    network, method, rows = context.network, context.method, np.arange(len(context.data.rows))
    uncertainties: dict[tuple[float, ...], NDArray[np.float64]] = {}

    def exits_and_macs(configured: Any, settings: Settings) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        policy = method.policy(network, configured)
        if not isinstance(policy, ThresholdPolicy):
            output = context.run(settings, recording)
            return np.searchsorted(outcomes.layers, output.exit_layer), output.macs
        key = configured.temperatures
        if key not in uncertainties:
            uncertainties[key] = row_uncertainties(network, method, {"temperatures": key}, recording)
        limits = np.array([policy.threshold(layer) for layer in outcomes.layers[:-1]], dtype=np.float32)[:, None]
        leaving = uncertainties[key] < limits  # [exits, rows]
        places = np.where(leaving.any(axis=0), leaving.argmax(axis=0), len(limits))
        paid = np.cumsum(outcomes.ask * (limits > 0), axis=0)[np.minimum(places, len(limits) - 1), rows]
        answer = np.where(places < len(limits), outcomes.answer[np.minimum(places, len(limits) - 1), rows], 0.0)
        return places, outcomes.reach[places, rows] + paid + answer

    def evaluate(settings: Settings) -> MeasuredPoint:
        configured = methods.configure(method.settings, settings, method.name)
        places, macs = exits_and_macs(configured, settings)
        losses = outcomes.row_score[-1] - outcomes.row_score[places, rows]
        score = float(outcomes.row_score[places, rows].mean())
        return MeasuredPoint(
            asdict(configured),
            float(macs.sum() / outcomes.full_macs.sum()),
            score,
            float(outcomes.layers[places].mean()),
            score,
            float(np.mean(np.square(outcomes.disagreement[places, rows])) / len(rows)) ** 0.5,
            row_losses=losses,
            family=repr(settings) if own_family else "",
        )

    return evaluate


def calibration_subset(method: Method, data: Data) -> Data:
    """Return the rows for the calibration that ends a training: fewer if there are many and every setting is a run."""
    rows, tokens = len(data.rows), sum(len(one.ids) for one in data.encoded)
    kept = min(SUBSET_ROWS, max(FEW_ROWS, rows * SUBSET_TOKENS // max(1, tokens)))
    if rows <= kept or method.replays or isinstance(method.space, FixedSpace):
        return data
    chosen = {number * rows // kept for number in range(kept)}
    return data.subset([row in chosen for row in range(rows)])
