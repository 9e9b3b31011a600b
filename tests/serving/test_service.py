"""A run as a service: threads, answers equal to the predictor's, audits, gears, refusals."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offramp.errors import OfframpError
from offramp.inference.budget import Budget
from offramp.inference.operating_points import RiskGuarantee
from offramp.inference.predictor import Predictor
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


def test_a_disagreement_above_the_limit_closes_the_gear(predictor: Predictor) -> None:
    assert predictor.points is not None
    service = Service("tiny", predictor, ServiceSettings(Budget.share(0.5), slo=5.0, max_disagreement=0.01))
    gear = service.governor.gear
    answer = Work({}, lambda work: None, prediction={"label": "good"}, gear=gear)
    audit = Work({}, lambda work: None, prediction={"label": "bad"}, kind="answered", audits=answer)
    for _ in range(20):
        service.audited(audit)
    assert service.alarm_count == 1 and service.alarms[0]["tightened"]
    assert service.governor.gear is not gear and service.workers[0].scheduler.gear is service.governor.gear


def test_a_share_bends_under_load_and_a_promise_does_not(predictor: Predictor) -> None:
    service = Service("tiny", predictor, ServiceSettings(Budget.share(1.0), min_budget=1e-6))
    assert len(service.ladder) > 1
    service.governor.update(0.0, 10.0)
    assert service.governor.current == 0
    assert service.gear_for(Budget.share(1.0)) is None
    assert service.gear_for(Budget.loss(0.0)) is service.gears.for_budget(Budget.loss(0.0))


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
