"""The scheduler as a plain object: any arrivals, any exits, and every input is answered once, as if it were alone."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp import engines, methods
from offramp.core.loop import State
from offramp.core.policy import Policy
from offramp.data.tokenization import Encoded
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import LoadedRun
from offramp.serving.costs import DepthCounts, LinearCost, StepCosts
from offramp.serving.gears import Gear, GearBox
from offramp.serving.scheduler import Limits, Scheduler, Ticket
from tests import factories

CASES: dict[str, tuple[str, str, list[dict[str, Any]]]] = {  # method, task, settings
    "thresholds": (
        "deebert",
        "classification",
        [{}, {"threshold": 0.3}, {"threshold": 1.105}, {"thresholds": (0, 1, 0)}],
    ),
    "patience": ("pabee", "classification", [{}, {"patience": 1}, {"patience": 2}]),
    "tags": ("branchynet", "tagging", [{}, {"threshold": 0.9}, {"threshold": 1.1}]),
    "token dropping": ("power_bert", "classification", [{}]),
    "dropping tags": ("length_adaptive", "tagging", [{"lengths": (0.7, 0.5, 0.3)}, {"lengths": (0.9, 0.4, 0.4)}]),
    "tokens that exit": ("token_exit", "tagging", [{}, {"threshold": 0.5}, {"threshold": 0.9}]),
    "a pair": (
        "length_adaptive+deebert",
        "classification",
        [{"threshold": 1.05}, {"lengths": (0.6, 0.5, 0.4), "threshold": 0.9}],
    ),
    "shares": ("length_adaptive", "classification", [{"lengths": (0.8, 0.5, 0.3)}]),
    "planned depth": ("faster_dat", "classification", [{}]),
    "full": ("full", "classification", [{}]),
}


@cache
def gear_box(case: str, engine: str = "torch") -> GearBox:
    method, task, _ = CASES[case]
    chosen, net = methods.get(method), factories.network(method, task)
    run = LoadedRun(net, factories.wordpiece_tokenizer(), chosen, chosen.options(), 64, "tiny")
    return GearBox(Predictor(run, None, engine))


def gears_of(case: str, engine: str = "torch") -> list[Gear]:
    box = gear_box(case, engine)
    return [box.gear(methods.configure(box.predictor.model.method.settings, one, case)) for one in CASES[case][2]]


def ticket(lengths: list[int], seed: int, **more: Any) -> Ticket:
    return Ticket(factories.encode(factories.token_ids(lengths, seed)), **{"arrived": 0.0, **more})


def alone(box: GearBox, encoded: list[Encoded], gear: Gear) -> Any:
    return box.predictor.run(encoded, gear.settings, 1)


def drain(scheduler: Scheduler, now: float = 0.0, steps: int = 1000) -> list[Ticket]:
    finished: list[Ticket] = []
    for _ in range(steps):
        if scheduler.idle:
            return finished
        finished += scheduler.step(now)
        scheduler.observe(0.001)
    raise AssertionError("the scheduler does not end")


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps before it arrives
        st.lists(st.integers(1, 12), min_size=1, max_size=3),  # lengths of its rows
        st.integers(0, 3),  # gear
        st.sampled_from([1, 5, 9]),  # priority
        st.sampled_from(["stays", "stays", "stays", "leaves", "expires"]),
    ),
    min_size=1,
    max_size=12,
)
COSTS = st.sampled_from([(1e-6, 1e-3), (1e-3, 1e-6), (1e-3, 1e-3)])
ENGINES = [(case, "torch") for case in CASES]
if "native" in engines.installed():  # it runs rules in one call
    ENGINES += [("thresholds", "native"), ("patience", "native")]


@pytest.mark.parametrize(("case", "engine"), ENGINES)
@settings(max_examples=25)
@given(arrivals=ARRIVALS, costs=COSTS, whole=COSTS, batch_tokens=st.sampled_from([8, 40, 400]))
def test_every_input_is_answered_once_as_if_alone(
    case: str, engine: str, arrivals: Any, costs: Any, whole: Any, batch_tokens: int
) -> None:
    box, gears = gear_box(case, engine), gears_of(case, engine)
    priced = StepCosts(LinearCost(*costs), LinearCost(*costs), LinearCost(*whole))
    scheduler = Scheduler(box, Limits(batch_tokens=batch_tokens, batch_rows=6), priced)
    finished: list[Ticket] = []
    submitted: list[tuple[Ticket, str]] = []
    now = 0.0
    for number, (steps, lengths, gear, priority, fate) in enumerate(arrivals):
        for _ in range(steps):
            now += 1.0
            finished += scheduler.step(now)
        deadline = now + 2.5 if fate == "expires" else math.inf
        one = ticket(lengths, number, arrived=now, gear=gears[gear % len(gears)], priority=priority, deadline=deadline)
        if scheduler.submit([one], now) is None:
            submitted.append((one, fate))
            if fate == "leaves":
                finished += scheduler.step(now)
                scheduler.cancel(one)
    for _ in range(20 * len(arrivals) * (box.depth + 2)):
        if scheduler.idle:
            break
        now += 0.2
        finished += scheduler.step(now)
    assert scheduler.idle and scheduler.waiting_inputs == 0 and scheduler.waiting_tokens == 0
    assert sorted(map(id, finished)) == sorted(id(one) for one, _ in submitted)
    for one, fate in submitted:
        assert one.outcome is not None and one.gear is not None
        if fate == "stays":
            assert one.outcome.kind == "answered"
        if one.outcome.output is not None:
            expected = alone(box, list(one.encoded), one.gear)
            np.testing.assert_allclose(one.outcome.output.exit_layer, expected.exit_layer, atol=1e-6)
            np.testing.assert_allclose(one.outcome.output.tokens_kept, expected.tokens_kept, atol=1e-6)
            for got, wanted in zip(one.outcome.output.logits, expected.logits, strict=True):
                np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_rows_that_exit_early_are_answered_before_their_batch_ends() -> None:
    gears = gears_of("thresholds")
    scheduler = Scheduler(gear_box("thresholds"))
    early, deep = ticket([5], 1, gear=gears[2]), ticket([7], 2, gear=gears[0])
    scheduler.submit([early, deep], 0.0)
    order = [one for _ in range(10) for one in scheduler.step(0.0)]
    assert order == [early, deep]
    assert early.outcome and early.outcome.output and early.outcome.output.exit_layer[0] == 0
    assert deep.outcome and deep.outcome.output and deep.outcome.output.exit_layer[0] == 3


@pytest.mark.parametrize(("step", "whole", "at_once"), [(1e-3, 1e-3, True), (1e-6, 1.0, False)])
def test_a_batch_runs_in_one_call_when_its_rows_leave_sooner_that_way(step: float, whole: float, at_once: bool) -> None:
    gear = gears_of("full")[0]  # one segment without exits
    priced = StepCosts(LinearCost(step, 1e-9), LinearCost(step, 1e-9), LinearCost(whole, 1e-9))
    scheduler = Scheduler(gear_box("full"), None, priced)
    tickets = [ticket([5], 1, gear=gear), ticket([7], 2, gear=gear)]
    scheduler.submit(tickets, 0.0)
    assert scheduler.step(0.0) == (tickets if at_once else [])
    assert sorted(map(id, drain(scheduler))) == ([] if at_once else sorted(map(id, tickets)))


def test_newcomers_join_between_segments_and_merge_when_steps_are_what_costs() -> None:
    gear = gears_of("thresholds")[1]
    scheduler = Scheduler(gear_box("thresholds"), None, StepCosts(LinearCost(1.0, 1e-9), LinearCost(1.0, 1e-9)))
    first, second = ticket([5], 1, gear=gear), ticket([7], 2, gear=gear)
    scheduler.submit([first], 0.0)
    scheduler.step(0.0)
    scheduler.submit([second], 0.0)
    scheduler.step(0.0)
    assert [batch.rows for batch in scheduler.batches] == [2]


def test_batches_stay_apart_when_tokens_are_what_costs() -> None:
    gear = gears_of("thresholds")[0]
    scheduler = Scheduler(gear_box("thresholds"), None, StepCosts(LinearCost(1e-9, 1.0), LinearCost(1e-9, 1.0)))
    scheduler.whole = False
    first = ticket([5], 1, gear=gear)
    scheduler.submit([first], 0.0)
    scheduler.step(0.0)
    scheduler.submit([ticket([9], 2, gear=gear)], 0.0)
    assert scheduler.step(0.0) == [first]


def test_urgent_inputs_overtake() -> None:
    gear = gears_of("thresholds")[0]
    scheduler = Scheduler(gear_box("thresholds"), Limits(batch_rows=1))
    patient, urgent = ticket([4], 1, gear=gear, priority=9), ticket([4], 2, gear=gear, priority=1)
    scheduler.submit([patient, urgent], 0.0)
    assert drain(scheduler) == [urgent, patient]


def test_an_expired_input_is_never_computed() -> None:
    box = gear_box("thresholds")
    scheduler = Scheduler(box)
    late = ticket([4], 1, deadline=1.0)
    scheduler.submit([late], 0.0)
    assert scheduler.step(2.0) == [late]
    assert late.outcome and late.outcome.kind == "expired" and late.started is None


def test_a_cancelled_input_frees_its_place_at_once() -> None:
    scheduler = Scheduler(gear_box("thresholds"), Limits(queue_requests=1))
    first, second = ticket([4], 1), ticket([4], 2)
    assert scheduler.submit([first], 0.0) is None
    assert scheduler.submit([second], 0.0) is not None
    scheduler.cancel(first)
    assert scheduler.submit([second], 0.0) is None
    assert [one.outcome.kind for one in drain(scheduler) if one.outcome] == ["cancelled", "answered"]


def test_admission_is_bounded_in_tokens_and_all_or_none() -> None:
    scheduler = Scheduler(gear_box("thresholds"), Limits(queue_tokens=10))
    assert scheduler.submit([ticket([8], 1)], 0.0) is None
    refusal = scheduler.submit([ticket([1], 2), ticket([4], 3)], 0.0)
    assert refusal is not None and "8 tokens" in refusal.reason and refusal.retry_after > 0.0
    assert scheduler.waiting_inputs == 1


def test_a_deadline_sooner_than_the_predicted_wait_is_refused() -> None:
    scheduler = Scheduler(gear_box("thresholds"), None, StepCosts(LinearCost(1.0, 0.0), LinearCost(1.0, 0.0)))
    assert scheduler.submit([ticket([4], 1)], 0.0) is None
    assert scheduler.submit([ticket([4], 2, deadline=0.5)], 0.0) is not None
    assert scheduler.submit([ticket([4], 3, deadline=60.0)], 0.0) is None


class FailOnLongRows(Policy):
    """Raises after the second layer if a row has eleven tokens."""

    def should_exit(self, layer: int, s: State) -> None:
        if layer == 2 and 11 in s.packed.lengths.tolist():
            raise RuntimeError("broken row")


def test_a_failing_input_harms_no_other() -> None:
    gear = replace(gears_of("full")[0], policy=FailOnLongRows())
    scheduler = Scheduler(gear_box("full"))
    good, bad, fine = (ticket([n], n, gear=gear) for n in (4, 11, 6))
    scheduler.submit([good, bad, fine], 0.0)
    drain(scheduler)
    assert [one.outcome.kind for one in (good, bad, fine) if one.outcome] == ["answered", "failed", "answered"]
    assert bad.outcome and "broken row" in str(bad.outcome.error)


def test_ended_inputs_with_far_deadlines_are_forgotten() -> None:
    scheduler = Scheduler(gear_box("full"), Limits(queue_requests=100))
    for number in range(0, 3000, 50):
        scheduler.submit([ticket([1], n, deadline=1e6) for n in range(number, number + 50)], 0.0)
        drain(scheduler)
    kept = [one for one in gc.get_objects() if type(one) is Ticket]
    assert len(kept) < 1500


def test_everything_ends_when_the_scheduler_itself_fails() -> None:
    scheduler = Scheduler(gear_box("thresholds"))
    scheduler.whole = False
    running, waiting = ticket([4], 1), ticket([4], 2)
    scheduler.submit([running], 0.0)
    scheduler.step(0.0)
    scheduler.submit([waiting], 0.0)
    assert scheduler.fail_all(RuntimeError("bug")) == [running, waiting] and scheduler.idle
    assert running.outcome == waiting.outcome and waiting.outcome and waiting.outcome.kind == "failed"
    assert scheduler.waiting_inputs == scheduler.waiting_tokens == 0


def test_linear_costs_learn_constant_and_price() -> None:
    cost = LinearCost(0.01, 1e-3)
    for tokens in [10, 100, 1000] * 200:
        cost.observe(tokens, 0.002 + 1e-5 * tokens)
    assert cost(0) == pytest.approx(0.002, rel=0.2) and cost(1000) == pytest.approx(0.012, rel=0.1)


def test_linear_costs_hardly_move_with_one_pause_and_follow_a_slower_machine() -> None:
    cost = LinearCost(0.001, 1e-5)
    for tokens in [10, 100, 1000] * 100:
        cost.observe(tokens, 0.001 + 1e-5 * tokens)
    cost.observe(100, 5.0)
    assert cost(100) < 0.0025
    for tokens in [10, 100, 1000] * 300:
        cost.observe(tokens, 0.01 + 1e-4 * tokens)
    assert cost(100) == pytest.approx(0.02, rel=0.1)


def test_depth_counts_begin_with_calibration_and_follow_what_happens() -> None:
    counts = DepthCounts(6, 2.5)
    assert counts.remaining(-1) == pytest.approx(2.5) and counts.surviving(-1, 2) == pytest.approx(0.5)
    counts.observe(np.full(2000, 6.0))
    assert counts.remaining(-1) == pytest.approx(6.0, abs=0.01) and counts.remaining(4) == pytest.approx(2.0)
    assert counts.surviving(0, 6) == 0.0
