"""A run as a service: threads, answers equal to the predictor's, audits, gears, refusals."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offramp.errors import OfframpError
from offramp.inference.budget import Budget
from offramp.inference.operating_points import DisagreementPoint, OperatingPoint, RiskGuarantee
from offramp.inference.predictor import Predictor
from offramp.serving.gears import Gear
from offramp.serving.scheduler import Refusal
from offramp.serving.service import RequestOptions, Service, ServiceSettings, Work, check_service_settings
from tests import factories

TEXTS = [row["text"] for row in factories.labelled_rows(count=24, seed=5)]


@pytest.fixture(scope="module")
def predictor(trained: Path) -> Predictor:
    return Predictor.load(trained, "torch")


@pytest.fixture
def service(predictor: Predictor) -> Iterator[Service]:
    one = Service("tiny", predictor, ServiceSettings(slo=5.0, workers=2, audit=0.2))
    one.start()
    assert all(worker.ready.wait(60) for worker in one.workers)
    yield one
    one.stop()


def ask(service: Service, texts: list[str], **options: Any) -> list[Work]:
    done: list[Work] = []
    ended = threading.Event()

    def collect(work: Work) -> None:
        done.append(work)
        if len(done) == len(texts):
            ended.set()

    rows = [{"text": text} for text in texts]
    result = service.submit(rows, service.prepare(rows), RequestOptions(**options), collect)
    assert not isinstance(result, Refusal)
    assert ended.wait(60)
    order = {id(ticket.payload): number for number, ticket in enumerate(result[0])}
    return sorted(done, key=lambda work: order[id(work)])


def test_answers_are_those_of_the_predictor(service: Service, predictor: Predictor) -> None:
    for budget in (Budget.share(1.0), Budget.share(0.5), Budget.default()):
        works, expected = ask(service, TEXTS, budget=budget), predictor.predict(TEXTS, budget=budget)
        for work, wanted in zip(works, expected, strict=True):
            assert work.prediction is not None
            assert (work.prediction["label"], work.prediction["exit_layer"]) == (wanted["label"], wanted["exit_layer"])
            assert work.prediction["scores"] == pytest.approx(wanted["scores"], abs=1e-4)


def test_threads_that_submit_at_once_all_get_their_answers(service: Service) -> None:
    results: list[list[Work]] = []
    threads = [threading.Thread(target=lambda: results.append(ask(service, TEXTS[:5]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 8 and all(work.kind == "answered" for works in results for work in works)


def test_the_status_can_be_read_while_answers_are_counted(predictor: Predictor) -> None:
    service, ended = Service("tiny", predictor), threading.Event()
    service.recent.extend((service.clock(), 0.001, 1.0) for _ in range(2000))

    def count() -> None:
        while not ended.is_set():
            service.recent.append((service.clock(), 0.001, 1.0))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        assert all(service.status()["answers_per_second"] > 0 for _ in range(50))
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()


def test_early_answers_are_checked_at_full_depth(service: Service) -> None:
    for _ in range(6):
        ask(service, TEXTS, budget=Budget.share(0.5))
    for _ in range(200):
        if service.idle:
            break
        threading.Event().wait(0.05)
    gear = service.gears.for_budget(Budget.share(0.5))
    status = service.status()
    assert service.watch_of(gear).samples > 0
    assert sum(status["exits"]) == 6 * len(TEXTS)


SHARES = (0.1, 0.2, 0.4, 0.7, 1.0)  # of the points of `several_points`: of the full compute


@pytest.fixture
def several_points(predictor: Predictor) -> Predictor:
    """The same run with points at known shares: thresholds from 0.45 to 0, a risk and a disagreement."""
    assert predictor.points is not None
    points = tuple(
        OperatingPoint({"threshold": round((1.0 - share) / 2, 2)}, share, 0.9 + share / 10, 3 * share)
        for share in SHARES
    )
    risk = RiskGuarantee(0.05, 0.95, {"threshold": 0.33}, 100, 0.01, 0.35, "torch", "fp32")
    limited = DisagreementPoint(0.02, {"threshold": 0.12}, 0.75, 0.01, 100)
    own = replace(
        predictor.points, points=points, guarantees=(risk,), disagreements=(limited,), bounds=None, trusted=True
    )
    return Predictor(predictor.model, own, "torch")


def raise_alarm(service: Service, gear: Gear) -> None:
    """Let audits find that every answer of a gear differs from the full model's."""
    answer = Work({}, lambda work: None, prediction={"label": "good"}, gear=gear)
    audit = Work({}, lambda work: None, prediction={"label": "bad"}, kind="answered", audits=answer)
    for _ in range(20):
        service.audited(audit)


def share_of(service: Service, budget: Budget) -> float | None:
    gear = service.gear_for(budget)
    assert gear is not None
    return gear.mac_share


def test_a_disagreement_above_the_limit_closes_the_gear(several_points: Predictor) -> None:
    service = Service("tiny", several_points, ServiceSettings(Budget.share(0.4), slo=5.0, max_disagreement=0.01))
    gear = service.governor.gear
    assert [one.mac_share for one in service.ladder] == [0.4, 0.7, 1.0]
    raise_alarm(service, gear)
    assert service.alarm_count == 1 and service.alarms[0]["tightened"]
    assert service.governor.gear.mac_share == 0.7 and service.workers[0].scheduler.gear is service.governor.gear
    budgets = [Budget.share(0.4), Budget.share(0.01), Budget.loss(0.06), Budget.loss(0.5), Budget.risk(0.05)]
    assert [share_of(service, budget) for budget in budgets] == [0.7] * 5, "closed, and the cheaper ones with it"
    unchanged = [Budget.share(0.7), Budget.loss(0.03), Budget.disagreement(0.02), Budget.share(1.0)]
    assert [share_of(service, budget) for budget in unchanged] == [0.7, 0.7, 0.75, 1.0]


def test_an_alarm_of_a_setting_that_requests_chose_closes_it_as_well(several_points: Predictor) -> None:
    service = Service("tiny", several_points, ServiceSettings(Budget.share(0.4), slo=5.0, max_disagreement=0.01))
    cheap, risky = service.gear_for(Budget.share(0.2)), service.gear_for(Budget.risk(0.05))
    assert cheap is not None and risky is not None and cheap not in service.ladder and risky not in service.ladder
    raise_alarm(service, cheap)
    assert service.alarms[0]["tightened"] and service.governor.gear.mac_share == 0.4
    assert share_of(service, Budget.share(0.2)) == share_of(service, Budget.share(0.1)) == 0.4
    assert service.gear_for(Budget.risk(0.05)) is risky
    raise_alarm(service, risky)
    assert share_of(service, Budget.risk(0.05)) == 0.4
    costly = service.gear_for(Budget.disagreement(0.02))
    assert costly is not None
    raise_alarm(service, costly)
    assert service.governor.gear is service.gears.full, "0.75 is closed, and 0.4 and 0.7 with it"
    for budget in (Budget.share(0.2), Budget.loss(0.5), Budget.risk(0.05), Budget.disagreement(0.02)):
        assert service.gear_for(budget) is service.gears.full
    raise_alarm(service, service.gears.full)
    assert service.gear_for(Budget.share(1.0)) is service.gears.full
    assert [event["tightened"] for event in service.alarms] == [True, True, True, False]


def test_a_closed_setting_stays_closed_under_load(several_points: Predictor) -> None:
    settings = ServiceSettings(Budget.share(0.7), slo=5.0, min_budget=0.1, max_disagreement=0.01)
    service = Service("tiny", several_points, settings)
    cheapest = service.gears.for_budget(Budget.share(0.2))
    raise_alarm(service, cheapest)
    service.governor.update(0.0, 100.0)
    assert service.governor.gear.mac_share == 0.4
    assert service.gear_for(Budget.share(0.2)) is service.gears.for_budget(Budget.share(0.4))
    assert service.gear_for(Budget.share(0.7)) is None, "the governor's, which is cheaper and open"


def test_a_share_bends_under_load_and_a_promise_does_not(predictor: Predictor) -> None:
    service = Service("tiny", predictor, ServiceSettings(Budget.share(1.0), min_budget=1e-6))
    assert len(service.ladder) > 1
    service.governor.update(0.0, 10.0)
    assert service.governor.current == 0
    assert service.gear_for(Budget.share(1.0)) is None
    assert service.gear_for(Budget.loss(0.0)) is service.gears.for_budget(Budget.loss(0.0))


def test_a_share_stays_a_maximum_when_the_load_ends_before_a_row_starts(several_points: Predictor) -> None:
    service = Service("tiny", several_points, ServiceSettings(Budget.share(0.7), slo=5.0, min_budget=0.1))
    service.governor.update(0.0, 100.0)
    assert service.governor.gear.mac_share == 0.1
    rows = [{"text": "a film"}]
    result = service.submit(rows, service.prepare(rows), RequestOptions(Budget.share(0.4)), lambda work: None)
    assert not isinstance(result, Refusal)
    for now in range(1, 10):
        service._tick(float(now))
    assert service.governor.gear.mac_share == 0.7
    service.workers[0].scheduler.step(10.0)
    gear = result[0][0].gear
    assert gear is not None and gear.mac_share == 0.4


def test_work_beyond_the_latency_target_is_refused(predictor: Predictor) -> None:
    service = Service("tiny", predictor, ServiceSettings(slo=1e-6))
    rows = [{"text": "a film"}]
    encoded = service.prepare(rows)
    assert not isinstance(service.submit(rows, encoded, RequestOptions(), lambda work: None), Refusal), (
        "nothing waits yet"
    )
    refusal = service.submit(rows, encoded, RequestOptions(), lambda work: None)
    assert isinstance(refusal, Refusal) and refusal.retry_after > 0.0


def test_a_risk_is_honoured_only_where_it_was_proven(predictor: Predictor) -> None:
    assert predictor.points is not None
    proven = RiskGuarantee(0.05, 0.95, {"threshold": 0.2}, 100, 0.01, 0.5, "torch", "fp32")
    points = replace(predictor.points, guarantees=(proven, replace(proven, risk=0.01, precision="int8")))
    service = Service("tiny", Predictor(predictor.model, points, "torch"))
    gear = service.gear_for(Budget.risk(0.05))
    assert gear is not None and gear.settings.threshold == 0.2
    with pytest.raises(OfframpError, match="int8"):
        service.gear_for(Budget.risk(0.01))
    bounded = Service("tiny", service.predictor, ServiceSettings(Budget.risk(0.05)))
    assert bounded.governor.normal == 0 and bounded.watch_of(gear).limit == 0.05


@pytest.mark.parametrize(
    ("default", "normal", "limit"),
    [({"kind": "risk", "value": 0.05}, 0.35, 0.05), ({"kind": "disagreement", "value": 0.02}, 0.75, 0.02)],
)
def test_a_default_that_is_a_promise_does_not_bend_under_load_and_is_watched(
    several_points: Predictor, default: dict[str, Any], normal: float, limit: float
) -> None:
    assert several_points.points is not None
    predictor = Predictor(several_points.model, replace(several_points.points, default=default), "torch")
    service = Service("tiny", predictor)
    service.governor.update(0.0, 100.0)
    assert service.governor.gear.mac_share == normal and service.governor.current == service.governor.normal == 0
    assert service.watch_of(service.governor.gear).limit == limit
    loose = Service("tiny", predictor, ServiceSettings(min_budget=0.1, max_disagreement=0.2))
    loose.governor.update(0.0, 100.0)
    assert loose.governor.gear.mac_share == 0.1, "the bounds that were given win"
    assert loose.watch_of(loose.governor.gear).limit == 0.2


@pytest.mark.parametrize("default", [None, {"kind": "share", "value": 0.7}])
def test_a_default_that_promises_no_answers_bends_under_load(
    several_points: Predictor, default: dict[str, Any] | None
) -> None:
    assert several_points.points is not None
    points = replace(several_points.points, default=default)
    service = Service("tiny", Predictor(several_points.model, points, "torch"), ServiceSettings(max_loss=0.1))
    service.governor.update(0.0, 100.0)
    assert service.governor.current < service.governor.normal
    assert service.watch_of(service.governor.gear).limit is None


def test_any_number_of_budgets_leaves_no_more_than_the_points(predictor: Predictor) -> None:
    service = Service("tiny", predictor)
    assert predictor.points is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gears = {service.gears.for_budget(Budget.share(number / 5000)).key for number in range(1, 5001)}
    assert len(gears) <= len(predictor.points.points)


@pytest.mark.parametrize("wrong", [{"slo": 0.0}, {"audit": 0.5}, {"min_budget": 2.0}, {"max_disagreement": 1.5}])
def test_settings_that_cannot_be_followed_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OfframpError):
        check_service_settings(ServiceSettings(**wrong))
