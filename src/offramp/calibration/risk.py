"""Prove that an adaptive model disagrees with its full model at most so often on new rows from the same source.

Learn-then-Test (Angelopoulos et al. 2021): candidate settings come from one half of the calibration rows and are
ordered from the lowest disagreement to the lowest cost. On the other half each must show, by an exact binomial test (a
Hoeffding–Bentkus bound where the loss is not 0 or 1), that its risk is at most the limit. The first that fails ends the
sequence, so all tests together fail with probability at most 1 − confidence. Candidates and tests never share a row.

The loss of a row is the task's `disagreement`: 1 when the label differs (classification), the share of words whose tag
differs (tagging), one minus the word F1 of the two answers (question answering), and the absolute difference capped at
1 (regression).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from offramp import methods
from offramp.calibration.calibrate import (
    CalibrationContext,
    Settings,
    explore_settings,
    has_searchable_thresholds,
    search_exit_settings,
)
from offramp.calibration.replay import ExitRecording
from offramp.errors import OfframpError
from offramp.inference.batching import full_macs
from offramp.inference.operating_points import RiskGuarantee, pareto_front
from offramp.methods import Method, PairMethod
from offramp.nn.setting_space import ThresholdSpace
from offramp.tasks import Task

STRICTEST = 0.001  # share of the thresholds found at which testing begins
STEPS_FROM_STRICTEST, STEPS = 14, 4  # settings tested between the strictest and the first found, and between others
STEPPED = 12  # of the settings found, how many have steps before them
Losses = NDArray[np.float64]
RecordedRows = tuple[CalibrationContext, ExitRecording | None]
DisagreementEvaluator = Callable[[Settings], tuple[Losses, float]]  # settings → loss of every row, share of MACs


def rows_needed(risk: float, confidence: float) -> int:
    """Return how many rows without a single disagreement prove a risk; fewer rows cannot prove it."""
    return math.ceil(math.log(1.0 - confidence) / math.log(1.0 - risk))


def check_provable(risk: float, confidence: float, rows: int) -> None:
    """Refuse a risk and a confidence that are out of range, or that `rows` test rows cannot prove."""
    if not 0.0 < risk < 1.0 or not 0.5 <= confidence < 1.0:
        raise OfframpError(
            "a risk and a confidence", f"risk={risk}, confidence={confidence}", "use e.g. --risk 0.01 --confidence 0.95"
        )
    need = rows_needed(risk, confidence)
    if rows < need:
        raise OfframpError(
            f"a risk of {risk} with confidence {confidence}",
            f"{rows} rows to test it on (half of the calibration rows)",
            f"give at least {2 * need} calibration rows, or a larger risk or a smaller confidence",
        )


def check_task_has_risk(task: Task) -> None:
    """Refuse a task that has no single predictions to compare with those of the full model."""
    if task.scores_by_loss or task.kind == "sequence":
        asked = f"a risk for the task {task.name}"
        raise OfframpError(asked, "a task without single answers to compare", "leave --risk out")


def p_value(losses: Losses, risk: float, binary: bool) -> float:
    """Return how likely losses this small are if the true risk were above `risk`.

    `binary` says that the task's losses are 0 or 1. The choice of the test must not depend on the observed losses, or
    the two tests would share one error probability.
    """
    n, mean = len(losses), float(losses.mean())
    if binary:
        return float(binom.cdf(round(losses.sum()), n, risk))
    if mean >= risk:
        return 1.0
    divergence = mean * math.log(mean / risk) if mean > 0 else 0.0
    divergence += (1 - mean) * math.log((1 - mean) / (1 - risk))
    bentkus = math.e * float(binom.cdf(math.ceil(n * mean), n, risk))
    return min(1.0, math.exp(-n * divergence), bentkus)


def split_in_halves(rows: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row indices for finding candidates, and those for testing them."""
    order = np.random.default_rng(seed).permutation(rows)
    return np.sort(order[: rows // 2]), np.sort(order[rows // 2 :])


def learn_then_test(
    candidates: Sequence[Settings],
    evaluate: DisagreementEvaluator,
    risk: float,
    confidence: float,
    binary: bool = True,
) -> RiskGuarantee | None:
    """Test candidates in order until one fails and return the last that passed; `evaluate` uses the testing half."""
    best: RiskGuarantee | None = None
    for settings in candidates:
        losses, share = evaluate(settings)
        if p_value(losses, risk, binary) > 1.0 - confidence:
            break
        best = RiskGuarantee(risk, confidence, settings, len(losses), float(losses.mean()), share)
    return best


def prove_risk(
    context: CalibrationContext, recording: ExitRecording | None, risk: float, confidence: float
) -> RiskGuarantee:
    """Return the cheapest setting whose disagreement is proven small; the full setting if there is none.

    Settings are found on one half of the rows and tested on the other.
    """
    halves = split_in_halves(len(context.data.rows), seed=0)
    finding, testing = (split_rows(context, recording, rows) for rows in halves)
    return prove_risk_on(finding, testing, risk, confidence)


def prove_risk_on(finding: RecordedRows, testing: RecordedRows, risk: float, confidence: float) -> RiskGuarantee:
    """Return the cheapest setting found on some rows whose disagreement is proven small on others."""
    context = testing[0]
    candidates = order_by_disagreement(context.method, disagreement_evaluator(*finding), risk_candidates(*finding))
    full, binary = asdict(context.method.settings()), context.network.task.disagreement_is_binary
    proven = learn_then_test([full, *candidates], disagreement_evaluator(*testing), risk, confidence, binary)
    proven = proven or RiskGuarantee(risk, confidence, full, len(context.data.rows), 0.0, 1.0)
    return replace(proven, engine=context.engine.name, precision=context.engine.precision)


def split_rows(context: CalibrationContext, recording: ExitRecording | None, rows: NDArray[np.int64]) -> RecordedRows:
    chosen = np.isin(np.arange(len(context.data.rows)), rows)
    return (context.subset(chosen), None) if recording is None else context.select_rows(chosen, recording)


def risk_candidates(context: CalibrationContext, recording: ExitRecording | None) -> list[Settings]:
    """Return the settings that may be tested, in any order."""
    if isinstance(context.method, PairMethod):
        *tried, full_point = explore_settings(context, context.record())
        return [p.settings for p in pareto_front(tried, full_point, context.network.task.higher_is_better)]
    recording = recording or context.record()
    found = context.candidates(recording)
    if has_searchable_thresholds(context.method):
        found += [settings for _, settings in search_exit_settings(context, recording)]
    return found


def order_by_disagreement(
    method: Method, evaluate: DisagreementEvaluator, candidates: list[Settings]
) -> list[Settings]:
    """Return the front of disagreement against cost on the finding half, from lowest disagreement to lowest cost.

    Before it come stricter versions of its first setting, from the strictest on: that setting was chosen as the
    cheapest without a disagreement on few rows, and on others it has some. Between settings come steps, so that the
    last one that passes is close to the limit.
    """
    measured = [(float(losses.mean()), share, s) for s in candidates for losses, share in [evaluate(s)]]
    front: list[Settings] = []
    cheapest = 1.0
    for _, share, settings in sorted(measured, key=lambda item: (item[0], item[1])):
        if share < cheapest:
            front.append(asdict(methods.configure(method.settings, settings, method.name)))
            cheapest = share
    if not front or not isinstance(method.space, ThresholdSpace):
        return front
    strictest = {**front[0], **_scaled(method.space, front[0], STRICTEST)}
    return _with_steps_between(method.space, [strictest, *front])


def _scaled(space: ThresholdSpace, settings: Settings, factor: float) -> Settings:
    """Return the thresholds of settings, moved towards the full setting's."""
    one, every = space.name, f"{space.name}s"
    scaled: Settings = {one: space.full_value + factor * (settings[one] - space.full_value)}
    if settings.get(every):
        scaled[every] = tuple(space.full_value + factor * (value - space.full_value) for value in settings[every])
    return scaled


def _with_steps_between(space: ThresholdSpace, ordered: list[Settings]) -> list[Settings]:
    """Return ordered settings with steps from each to the next, where they differ in thresholds only."""
    one, every = space.name, f"{space.name}s"
    found = [ordered[0]]
    for number, (before, after) in enumerate(itertools.pairwise(ordered)):
        if {**before, one: 0, every: 0} == {**after, one: 0, every: 0} and number <= STEPPED:
            low, high = (np.array([settings[one], *(settings.get(every) or ())]) for settings in (before, after))
            count = (STEPS_FROM_STRICTEST if number == 0 else STEPS) if len(low) == len(high) else 0
            for share in np.linspace(0.0, 1.0, count + 2)[1:-1]:
                both = (low > 0.0) & (high > 0.0)
                log = np.exp((1 - share) * np.log(np.where(both, low, 1.0)) + share * np.log(np.where(both, high, 1.0)))
                first, *others = np.where(both, log, (1 - share) * low + share * high).tolist()
                found.append({**after, one: first, **({every: tuple(others)} if others else {})})
        found.append(after)
    return found


def disagreement_evaluator(context: CalibrationContext, recording: ExitRecording | None) -> DisagreementEvaluator:
    """Return a function from settings to the disagreement with the full model on every row, and the MAC share."""
    data, reference = context.data, context.predictions(context.run({}, recording))
    full = float(full_macs(context.network, data.encoded).sum())

    def evaluate(settings: Settings) -> tuple[Losses, float]:
        output = context.run(settings, recording)
        losses = context.network.task.disagreement(context.predictions(output), reference)
        return np.array(losses), float(output.macs.sum()) / full

    return evaluate
