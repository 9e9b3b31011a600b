"""Settings for a budget, found on held-out rows.

Methods that replay are recorded once; beside one threshold for all off-ramps a search gives each its own and a
temperature, where that pays on rows it has not seen. The others run for real at a few settings, and at a few between
them where steps are widest. A pair is both: for each of a few settings of its length method the exits are recorded and
searched. Either way the result is the Pareto front, the loosest setting last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from offramp import engines, methods
from offramp.calibration.diagnostics import calibration_warnings
from offramp.calibration.gaps import refine_grid
from offramp.calibration.replay import ExitRecording
from offramp.calibration.scores import (
    costs_at_least,
    cross_fitted_gains,
    even_rows,
    keeps_at_least,
    monotone_scores,
    select_rows,
    shrink_scores,
)
from offramp.calibration.subject import (
    CalibrationContext,
    Predictions,
    Settings,
    candidate_settings,
    point_evaluator,
    search_exit_settings,
    unique_settings,
)
from offramp.decoding.calibration import decoder_candidates
from offramp.inference.batching import full_macs, score_policy
from offramp.inference.operating_points import OperatingPoint, OperatingPoints, pareto_front
from offramp.methods import Method, PairMethod
from offramp.nn.batches import Data
from offramp.nn.network import Network
from offramp.nn.setting_space import FixedSpace, LengthSpace, ThresholdSpace

FEW = 200  # rows that are too few to search a threshold for every off-ramp
ENOUGH, LONG = 1000, 100_000  # rows and tokens for a first look
EXITS = 24  # of a pair, under each length setting
BRIEF = 8  # generations of their search


def calibrate(
    network: Network, method: Method, data: Data, name: str, fingerprint: str, known: Sequence[Settings] = ()
) -> OperatingPoints:
    """The Pareto front of settings on these rows. `known`: settings that a search found, tried beside the others."""
    network.eval()
    task, subject = network.task, CalibrationContext(network, method, data, searched=known)
    about = {"name": name, "rows": len(data.rows), "fingerprint": fingerprint}
    if network.decoder is not None:  # sentences cannot be replayed: what they say next hangs on what they said
        settings, others = _for_decoder(subject)
        point = point_evaluator(others, None)
        tried = [point(one) for one in settings]
        front = pareto_front(tried, point({}), task.higher_is_better)
        found = OperatingPoints(task.metric, task.higher_is_better, about, front, scale=task.scale)
        return replace(found, warnings=calibration_warnings(network, None, tried, found))
    if task.scores_by_loss:  # recording a vocabulary at every exit is out of proportion: one real, loosest run
        policy = method.policy(network, method.settings())
        metrics, outcome = score_policy(network, engines.make("torch", network.encoder), policy, data)
        share = float(outcome.macs.sum() / full_macs(network, data.encoded, outcome).sum())
        only = OperatingPoint(asdict(method.settings()), share, metrics[task.metric], float(outcome.exit_layer.mean()))
        return OperatingPoints(task.metric, task.higher_is_better, about, (only,))
    recording = subject.record()
    *tried, loosest = explore_settings(subject, recording)
    found = OperatingPoints(
        task.metric, task.higher_is_better, about, pareto_front(tried, loosest, task.higher_is_better)
    )
    return replace(found, warnings=calibration_warnings(network, recording, tried, found))


def _for_decoder(subject: CalibrationContext) -> tuple[list[Settings], CalibrationContext]:
    """Settings to decode with, and the rows to score them on: where there are many, others than they were found on."""
    network, data = subject.network, subject.data
    if isinstance(subject.method.space, FixedSpace):
        return [], subject
    if len(data.rows) < FEW:
        return decoder_candidates(network, data), subject
    even = even_rows(subject)
    return decoder_candidates(network, subject.subset(even).data), subject.subset(~even)


def explore_settings(subject: CalibrationContext, recording: ExitRecording) -> list[OperatingPoint]:
    """What settings do, the loosest last; of a pair all exits under a few of its lengths."""
    network, method, better = subject.network, subject.method, subject.network.task.higher_is_better
    if isinstance(method, PairMethod):
        searched = [method.merged_settings.part(0, one) for one in subject.searched]
        lengths = [*unique_settings([*searched, *candidate_settings(network, method.length, recording)]), {}]
        full = subject.predictions(subject.run({}, None))
        *found, loosest = (point for one in lengths for point in pair_points_at_lengths(subject, one, full, apart=True))
        return [*monotone_scores(pareto_front(shrink_scores(found, better), loosest, better)[:-1], better), loosest]
    point = point_evaluator(subject, recording if method.replays else None)
    settings = unique_settings([*candidate_settings(network, method, recording), *subject.searched])
    tried, loosest, space = [point(one) for one in settings], point({}), method.space
    if isinstance(space, ThresholdSpace) and space.grid:
        tried += refine_grid(space.name, tried[: len(space.grid)], loosest, point)
    tried = monotone_scores(
        tried, better, keeps_at_least(space.name) if isinstance(space, LengthSpace) else costs_at_least
    )
    if has_searchable_thresholds(method) and len(subject.data.rows) >= FEW and tried:
        tried += cross_fitted_gains(subject, recording, tried, search_exit_settings, point)
    return [*tried, loosest]


def has_searchable_thresholds(method: Method) -> bool:
    """Whether each off-ramp may have a threshold of its own, found without running the model."""
    return isinstance(method.space, ThresholdSpace) and method.replays and method.space.per_exit


def pair_points_at_lengths(
    subject: CalibrationContext, lengths: Settings, full: Predictions, apart: bool = False
) -> list[OperatingPoint]:
    """What a pair does at one length setting and a few settings of its exits, spread over their front; the loosest
    last. `full`: what the full model answers. `apart`: thresholds are found on half of many rows and scored on the
    other half, since nobody will score them on other ones."""
    pair, under = subject.method, subject.exits_at_lengths(lengths)
    assert isinstance(pair, PairMethod)
    recording = under.record()
    if has_searchable_thresholds(under.method):
        seen = under, recording
        if apart and len(subject.data.rows) >= FEW:
            even = even_rows(under)
            seen, (under, recording) = select_rows(under, recording, even), select_rows(under, recording, ~even)
            full = [answer for answer, one in zip(full, even, strict=True) if not one]
        tries = [settings for _, settings in search_exit_settings(*seen, EXITS, BRIEF)]
    else:
        tries = candidate_settings(under.network, under.method, recording)
    point = point_evaluator(under, recording if under.method.replays else None, full)
    made = asdict(methods.configure(pair.length.settings, lengths, pair.length.name))
    return [replace(p, settings=pair.merged_settings.join(made, p.settings)) for p in map(point, [*tries, {}])]


def calibration_subset(method: Method, data: Data) -> Data:
    """Rows for the calibration that ends a training: not all of many, where every setting means another pass."""
    rows, tokens = len(data.rows), sum(len(one.ids) for one in data.encoded)
    kept = min(ENOUGH, max(FEW, rows * LONG // max(1, tokens)))
    if rows <= kept or method.replays or isinstance(method.space, FixedSpace):
        return data
    return _some(data, [number * rows // kept for number in range(kept)])


def _some(data: Data, rows: Sequence[int]) -> Data:
    """Some of the rows, with all their windows."""
    place = {row: number for number, row in enumerate(rows)}
    kept = [replace(e, example=place[e.example]) for e in data.encoded if e.example in place]
    return Data([data.rows[row] for row in rows], kept)
