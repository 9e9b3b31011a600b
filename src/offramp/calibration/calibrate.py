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
from offramp.calibration.diagnostics import complaints
from offramp.calibration.gaps import between
from offramp.calibration.replay import ExitRecording
from offramp.calibration.scores import dearer, dependable, earned, every_other, longer, part, shrunk
from offramp.calibration.subject import Answers, Settings, Subject, candidates, pointer, search_exits, unlike
from offramp.decoding.calibration import decoder_candidates
from offramp.inference.batching import full_macs, score
from offramp.inference.operating_points import OperatingPoint, OperatingPoints, pareto
from offramp.methods import Method
from offramp.nn.batches import Data
from offramp.nn.network import Network
from offramp.nn.setting_space import Fixed, Lengths, Threshold

FEW = 200  # rows that are too few to search a threshold for every off-ramp
ENOUGH, LONG = 1000, 100_000  # rows and tokens for a first look
EXITS = 24  # of a pair, under each length setting
BRIEF = 8  # generations of their search


def calibrate(
    network: Network, method: Method, data: Data, name: str, fingerprint: str, known: Sequence[Settings] = ()
) -> OperatingPoints:
    """The Pareto front of settings on these rows. `known`: settings that a search found, tried beside the others."""
    network.eval()
    task, subject = network.task, Subject(network, method, data, known=known)
    about = {"name": name, "rows": len(data.rows), "fingerprint": fingerprint}
    if network.decoder is not None:  # sentences cannot be replayed: what they say next hangs on what they said
        settings, others = _for_decoder(subject)
        point = pointer(others, None)
        tried = [point(one) for one in settings]
        front = pareto(tried, point({}), task.higher_is_better)
        found = OperatingPoints(task.metric, task.higher_is_better, about, front, scale=task.scale)
        return replace(found, warnings=complaints(network, None, tried, found))
    if task.scores_by_loss:  # recording a vocabulary at every exit is out of proportion: one real, loosest run
        policy = method.policy(network, method.settings())
        metrics, outcome = score(network, engines.make("torch", network.encoder), policy, data)
        share = float(outcome.macs.sum() / full_macs(network, data.encoded, outcome).sum())
        only = OperatingPoint(asdict(method.settings()), share, metrics[task.metric], float(outcome.exit_layer.mean()))
        return OperatingPoints(task.metric, task.higher_is_better, about, (only,))
    recording = subject.record()
    *tried, loosest = explore(subject, recording)
    found = OperatingPoints(task.metric, task.higher_is_better, about, pareto(tried, loosest, task.higher_is_better))
    return replace(found, warnings=complaints(network, recording, tried, found))


def _for_decoder(subject: Subject) -> tuple[list[Settings], Subject]:
    """Settings to decode with, and the rows to score them on: where there are many, others than they were found on."""
    network, data = subject.network, subject.data
    if isinstance(subject.method.space, Fixed):
        return [], subject
    if len(data.rows) < FEW:
        return decoder_candidates(network, data), subject
    even = every_other(subject)
    return decoder_candidates(network, subject.part(even).data), subject.part(~even)


def explore(subject: Subject, recording: ExitRecording) -> list[OperatingPoint]:
    """What settings do, the loosest last; of a pair all exits under a few of its lengths."""
    network, method, better = subject.network, subject.method, subject.network.task.higher_is_better
    if method.pair is not None:
        searched = [method.pair.settings.part(0, one) for one in subject.known]
        lengths = [*unlike([*searched, *candidates(network, method.pair.length, recording)]), {}]
        full = subject.predictions(subject.run({}, None))
        *found, loosest = (point for one in lengths for point in exits_under(subject, one, full, apart=True))
        return [*dependable(pareto(shrunk(found, better), loosest, better)[:-1], better), loosest]
    point = pointer(subject, recording if method.replays else None)
    settings = unlike([*candidates(network, method, recording), *subject.known])
    tried, loosest, space = [point(one) for one in settings], point({}), method.space
    if isinstance(space, Threshold) and space.grid:
        tried += between(space.name, tried[: len(space.grid)], loosest, point)
    tried = dependable(tried, better, longer(space.name) if isinstance(space, Lengths) else dearer)
    if searchable(method) and len(subject.data.rows) >= FEW and tried:
        tried += earned(subject, recording, tried, search_exits, point)
    return [*tried, loosest]


def searchable(method: Method) -> bool:
    """Whether each off-ramp may have a threshold of its own, found without running the model."""
    return isinstance(method.space, Threshold) and method.replays and method.space.each


def exits_under(subject: Subject, lengths: Settings, full: Answers, apart: bool = False) -> list[OperatingPoint]:
    """What a pair does at one length setting and a few settings of its exits, spread over their front; the loosest
    last. `full`: what the full model answers. `apart`: thresholds are found on half of many rows and scored on the
    other half, since nobody will score them on other ones."""
    pair, under = subject.method.pair, subject.given(lengths)
    assert pair is not None
    recording = under.record()
    if searchable(under.method):
        seen = under, recording
        if apart and len(subject.data.rows) >= FEW:
            even = every_other(under)
            seen, (under, recording) = part(under, recording, even), part(under, recording, ~even)
            full = [answer for answer, one in zip(full, even, strict=True) if not one]
        tries = [settings for _, settings in search_exits(*seen, EXITS, BRIEF)]
    else:
        tries = candidates(under.network, under.method, recording)
    point = pointer(under, recording if under.method.replays else None, full)
    made = asdict(methods.configure(pair.length.settings, lengths, pair.length.name))
    return [replace(p, settings=pair.settings.join(made, p.settings)) for p in map(point, [*tries, {}])]


def quick(method: Method, data: Data) -> Data:
    """Rows for the calibration that ends a training: not all of many, where every setting means another pass."""
    rows, tokens = len(data.rows), sum(len(one.ids) for one in data.encoded)
    kept = min(ENOUGH, max(FEW, rows * LONG // max(1, tokens)))
    if rows <= kept or (method.replays and method.pair is None) or isinstance(method.space, Fixed):
        return data
    return _some(data, [number * rows // kept for number in range(kept)])


def _some(data: Data, rows: Sequence[int]) -> Data:
    """Some of the rows, with all their windows."""
    place = {row: number for number, row in enumerate(rows)}
    kept = [replace(e, example=place[e.example]) for e in data.encoded if e.example in place]
    return Data([data.rows[row] for row in rows], kept)
