"""One run as a service: its workers, its governor, its watch, and how a request becomes answers."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.inference.budget import Budget
from offramp.inference.predictor import Predictor
from offramp.nn.outputs import RunOutput
from offramp.serving.costs import LinearCost
from offramp.serving.gears import Gear, GearBox
from offramp.serving.governor import Governor, GovernorSettings
from offramp.serving.scheduler import DEFAULT_PRIORITY, Limits, Refusal, Scheduler, Ticket
from offramp.serving.watch import Watch
from offramp.serving.worker import Worker
from offramp.tasks import Task

LOG = logging.getLogger("offramp.serving")
AUDIT_PRIORITY = 9
IDLE = 0.3  # a worker that is busy for a smaller share of the time is idle
ADMIT = 0.5  # of the latency target: a longer wait in the cheapest gear is refused; the rest is for computing
DEFAULT_MAX_LOSS = 0.01  # of the metric, of the cheapest gear that load may lead to


@dataclass(frozen=True)
class ServiceSettings:
    """How a run is served."""

    budget: Budget = field(default_factory=Budget.default)
    slo: float = 0.05  # seconds within which an accepted input should be answered
    min_budget: float | None = None  # the cheapest gear that load may lead to: share of the full compute,
    max_loss: float | None = None  # or loss of the metric
    max_disagreement: float | None = None  # with the full model, that raises an alarm; None: only shown
    audit: float = 0.01  # share of early answers that is checked at full depth
    idle_audit: float = 0.2  # the same in idle time
    workers: int = 1
    queue_tokens: int = 65_536
    queue_requests: int = 2048


@dataclass(frozen=True)
class RequestOptions:
    """Budget, deadline and priority of one request."""

    budget: Budget | None = None
    deadline: float | None = None  # seconds from now
    priority: int = DEFAULT_PRIORITY


@dataclass(eq=False)
class Work:
    """One input of a request: what a ticket carries through the scheduler."""

    row: Mapping[str, Any]
    done: Callable[[Work], None]  # called in the worker's thread
    prediction: dict[str, Any] | None = None
    logits: list[np.ndarray[Any, Any]] = field(default_factory=list)
    gear: Gear | None = None
    kind: str = ""  # of the outcome
    error: Exception | None = None
    queue_seconds: float = 0.0
    run_seconds: float = 0.0
    tokens: int = 0
    encoded: Sequence[Encoded] = ()
    audits: Work | None = None  # the early answer that this work checks at full depth
    finished: float = 0.0


class Service:
    """A run with its workers; `submit` may be called from any thread."""

    def __init__(
        self,
        name: str,
        predictor: Predictor,
        settings: ServiceSettings | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name, self.predictor, self.clock = name, predictor, clock
        self.settings = settings or ServiceSettings()
        self.gears = GearBox(predictor)
        self.task, self.depth = predictor.task, predictor.network.depth
        normal = self.gears.for_budget(self.settings.budget)
        bounds = self.settings.min_budget, self.settings.max_loss
        self.promised_disagreement = _promised_disagreement(self.settings.budget, predictor)
        # a proven or limited disagreement stays as promised unless bounds are given
        if bounds == (None, None) and self.promised_disagreement is None:
            bounds = None, max(DEFAULT_MAX_LOSS, normal.loss or 0.0)
        self.ladder = self.gears.ladder(normal, *bounds)
        target = GovernorSettings(target=self.settings.slo)
        self.governor: Governor[Gear] = Governor(self.ladder, self.ladder.index(normal), target)
        self.watches: dict[str, Watch] = {}
        self.can_audit = type(self.task).disagreement is not Task.disagreement and predictor.network.decoder is None
        limits = Limits(
            queue_tokens=self.settings.queue_tokens,
            queue_requests=self.settings.queue_requests,
            target=self.settings.slo,
        )
        self.workers = [
            Worker(Scheduler(self.gears, limits), self._finished, self._tick, clock)
            for _ in range(max(1, self.settings.workers))
        ]
        self.listeners: list[Callable[[Service, list[Work]], None]] = []
        self.alarms: deque[dict[str, Any]] = deque(maxlen=20)
        self.alarm_count = 0
        self.closed_share = 0.0  # of the full compute: settings that cost no more are closed by an alarm
        self.exits: Counter[int] = Counter()
        self.recent: deque[tuple[float, float, float]] = deque(maxlen=2000)  # finished, seconds, MAC share or NaN
        self._lock = threading.Lock()
        self._audits: deque[Ticket] = deque()
        self._numbers = itertools.count()
        self._long_predictor: Predictor | None = None  # as soon as it is needed

    # life

    def start(self) -> None:
        """Start the workers; they warm up first."""
        for worker in self.workers:
            worker.start(self.ladder)

    @property
    def ready(self) -> bool:
        """Whether every worker is warm."""
        return all(worker.ready.is_set() for worker in self.workers)

    @property
    def alive(self) -> bool:
        """Whether every worker's thread runs."""
        return all(worker.alive for worker in self.workers)

    @property
    def idle(self) -> bool:
        """Whether no work waits or runs."""
        return all(worker.scheduler.idle for worker in self.workers)

    def stop(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.stop()

    # requests

    def gear_for(self, budget: Budget | None) -> Gear | None:
        """Return the gear of a request's own budget; None: the governor's.

        A share of compute is a maximum: under load the governor's cheaper gear replaces it. A loss, a disagreement and
        a risk are promises and are kept. Where an alarm has closed the gear, it is the next costlier one that is open.
        """
        gear, governor = self._own_gear(budget), self.governor
        if budget is None or gear is None:
            return None
        pressed = governor.current < governor.normal
        if budget.kind == "share" and pressed and _share(governor.gear) < _share(gear):
            return None
        return gear

    def _own_gear(self, budget: Budget | None) -> Gear | None:
        """Return the gear of a request's own budget without regard to load; None if it has none."""
        if budget is None or budget.kind == "default":
            return None
        gear = self.gears.for_budget(budget)
        return gear if self._is_open(gear) else self.gears.cheapest_above(self.closed_share)

    def _is_open(self, gear: Gear) -> bool:
        return gear is self.gears.full or gear.share > self.closed_share

    def _close(self, gear: Gear) -> bool:
        """Close a gear and all cheaper ones, also those that only requests choose; False if it was closed before."""
        if gear is self.gears.full or not self._is_open(gear):
            return False
        self.closed_share = gear.share
        self.governor.tighten(next(number for number, one in enumerate(self.ladder) if self._is_open(one)))
        return True

    def prepare(self, rows: Sequence[Mapping[str, Any]]) -> list[list[Encoded]]:
        """Check and tokenise inputs; return the rows of each. For one thread only: a tokenizer cannot be shared."""
        return _prepared(self.predictor, rows)

    def prepare_long(self, rows: Sequence[Mapping[str, Any]]) -> list[list[Encoded]]:
        """Do the same with a tokenizer of its own, for a thread that takes the inputs that need long."""
        if self._long_predictor is None:
            predictor = copy.copy(self.predictor)
            predictor.model = replace(predictor.model, tokenizer=copy.deepcopy(predictor.model.tokenizer))
            self._long_predictor = predictor
        return _prepared(self._long_predictor, rows)

    def submit(
        self,
        rows: Sequence[Mapping[str, Any]],
        encoded: Sequence[Sequence[Encoded]],
        options: RequestOptions,
        done: Callable[[Work], None],
        behind: float = 0.0,
    ) -> tuple[list[Ticket], Worker] | Refusal:
        """Send inputs to the worker with the shortest predicted wait, or refuse all of them.

        `behind` is how many seconds the answer will have to wait outside the scheduler.
        """
        gear, most, now = self.gear_for(options.budget), self._own_gear(options.budget), self.clock()
        worker = self.workers[0]
        if len(self.workers) > 1:
            worker = min(self.workers, key=lambda one: one.scheduler.predicted_wait())
        scheduler = worker.scheduler
        deadline = math.inf if options.deadline is None else now + options.deadline
        if options.deadline is None:
            cheapest = behind + scheduler.predicted_wait(self.ladder[self.governor.floor])
            if cheapest > ADMIT * self.settings.slo:
                return Refusal(f"the predicted wait is {1000 * cheapest:.0f} ms", cheapest)
        elif gear is None:
            tokens = sum(len(one.ids) for each in encoded for one in each)
            gear = self._gear_in_time(scheduler, tokens, options.deadline - scheduler.predicted_wait())
        tickets = []
        for row, own in zip(rows, encoded, strict=True):
            work = Work(row, done, tokens=sum(len(one.ids) for one in own), encoded=own)
            tickets.append(Ticket(own, now, gear, deadline, options.priority, work, most))
        refusal = worker.submit(tickets)
        return (tickets, worker) if refusal is None else refusal

    def overload(self, behind: float = 0.0) -> Refusal | None:
        """Return a refusal if even the cheapest gear cannot answer in time; requests with a deadline may still be."""
        cheapest = self.ladder[self.governor.floor]
        wait = behind + min(one.scheduler.predicted_wait(cheapest) for one in self.workers)
        late = wait > ADMIT * self.settings.slo
        return Refusal(f"the predicted wait is {1000 * wait:.0f} ms", wait) if late else None

    def _gear_in_time(self, scheduler: Scheduler, tokens: int, left: float) -> Gear | None:
        """Return the gear of the moment (None), or the first cheaper one that meets a deadline."""
        governor, layer = self.governor, scheduler.costs.layer
        for number in range(governor.current, governor.floor - 1, -1):
            depth = scheduler.counts_of(self.ladder[number]).remaining(-1)
            if scheduler.costs.start(tokens) + depth * layer(tokens) <= left:
                return None if number == governor.current else self.ladder[number]
        return None

    # what workers report

    def _tick(self, now: float) -> None:
        """Update the governor with the predicted wait, and pass its gear on."""
        wait = max(worker.scheduler.predicted_wait() for worker in self.workers)
        with self._lock:
            moved = self.governor.update(now, wait)
            gear = self.governor.gear
        if moved:
            for worker in self.workers:
                worker.scheduler.gear = gear
            share = _share(gear)
            LOG.info("gear", extra={"fields": {"model": self.name, "gear": self.governor.current, "mac_share": share}})
        elif self.workers[0].scheduler.gear is not gear:
            for worker in self.workers:
                worker.scheduler.gear = gear

    def _finished(self, worker: Worker, tickets: list[Ticket], now: float) -> None:
        answered = [ticket for ticket in tickets if ticket.outcome is not None and ticket.outcome.kind == "answered"]
        works: list[Work] = []
        self._predict([ticket for ticket in answered if ticket.payload is not None])
        for ticket in tickets:
            work: Work | None = ticket.payload
            if work is None or ticket.outcome is None:  # a row of the warm-up
                continue
            work.gear, work.finished = ticket.gear, now
            work.kind, work.error = work.kind or ticket.outcome.kind, work.error or ticket.outcome.error
            work.queue_seconds = (ticket.started if ticket.started is not None else now) - ticket.arrived
            work.run_seconds = now - (ticket.started if ticket.started is not None else now)
            if work.error is not None:
                LOG.error("an input failed", extra={"fields": {"model": self.name, "error": repr(work.error)[:200]}})
            works.append(work)
            work.done(work)  # clients first
        try:
            for work in works:
                if work.audits is not None:
                    self.audited(work)
                elif work.kind == "answered":
                    self._note(worker, work, now)
            for listener in self.listeners:
                listener(self, [work for work in works if work.audits is None])
        except Exception:  # a bug in what is counted must not stop answers
            LOG.exception("an answer was not counted")

    def _predict(self, tickets: Sequence[Ticket]) -> None:
        """Turn logits into predictions, all together; one by one if that fails."""
        if not tickets:
            return
        try:
            for ticket, prediction in zip(tickets, self._predictions(tickets), strict=True):
                self._set_prediction(ticket, prediction)
        except Exception as error:
            for ticket in tickets:
                if len(tickets) > 1:
                    self._predict([ticket])
                elif ticket.payload is not None:
                    LOG.error("no prediction from logits", exc_info=error)
                    ticket.payload.kind, ticket.payload.error = "failed", error

    @staticmethod
    def _set_prediction(ticket: Ticket, prediction: dict[str, Any]) -> None:
        if ticket.payload is not None and ticket.outcome is not None and ticket.outcome.output is not None:
            ticket.payload.prediction, ticket.payload.logits = prediction, ticket.outcome.output.logits

    def _predictions(self, tickets: Sequence[Ticket]) -> list[dict[str, Any]]:
        outputs = [ticket.outcome.output for ticket in tickets if ticket.outcome and ticket.outcome.output]
        together = RunOutput(
            [logits for output in outputs for logits in output.logits],
            *(
                np.concatenate([getattr(one, name) for one in outputs])
                for name in ("exit_layer", "macs", "tokens_kept")
            ),
        )
        rows = [ticket.payload.row for ticket in tickets]
        encoded = [replace(one, example=number) for number, ticket in enumerate(tickets) for one in ticket.encoded]
        return self.predictor.finish(rows, encoded, together)

    def _note(self, worker: Worker, work: Work, now: float) -> None:
        """Count an answer, and perhaps send it through the full model as well."""
        assert work.prediction is not None and work.gear is not None, "an answered input has both"
        layer = float(work.prediction["exit_layer"])
        self.exits[round(layer)] += 1
        self.recent.append((now, work.queue_seconds + work.run_seconds, _share(work.gear)))
        if not self.can_audit or work.gear is self.gears.full:
            return
        watch = self.watch_of(work.gear)
        idle = worker.busy < IDLE and worker.scheduler.waiting_inputs == 0
        if watch.wants(layer, idle):
            if layer >= self.depth and self._always_agrees(work.gear):
                watch.add(0.0)
                return
            audit = Work(work.row, _nothing, tokens=work.tokens, encoded=work.encoded, audits=work)
            worker.submit([Ticket(work.encoded, now, self.gears.full, math.inf, AUDIT_PRIORITY, audit)])

    def _always_agrees(self, gear: Gear) -> bool:
        """Whether a row that went through all layers in this gear has the full model's answer: no tokens were lost."""
        return bool(gear.columns)

    def watch_of(self, gear: Gear) -> Watch:
        """Return the watch of a gear."""
        if gear.key not in self.watches:
            limit = self.settings.max_disagreement
            limit = self.promised_disagreement if limit is None else limit
            self.watches[gear.key] = Watch(limit, rate=self.settings.audit, idle_rate=self.settings.idle_audit)
        return self.watches[gear.key]

    def audited(self, audit: Work) -> None:
        early = audit.audits
        if audit.kind != "answered" or audit.prediction is None or early is None or early.prediction is None:
            return
        assert early.gear is not None, "an answered input has a gear"
        difference = self.task.disagreement([early.prediction], [audit.prediction])[0]
        watch = self.watch_of(early.gear)
        if watch.add(difference):
            reading = watch.reading()
            with self._lock:
                tightened = self._close(early.gear)
            self.alarm_count += 1
            event = {
                "model": self.name,
                "mac_share": _share(early.gear),
                "disagreement_lower": round(reading.lower, 5),
                "limit": watch.limit,
                "samples": reading.samples,
                "tightened": tightened,
                "mac_share_now": _share(self.governor.gear),
            }
            self.alarms.append(event)
            LOG.warning("early answers differ from the full model's too often", extra={"fields": event})
            self._tick(self.clock())

    # what people see

    def status(self) -> dict[str, Any]:
        """Return load, gear, queue, exits and disagreement as plain numbers."""
        now, governor = self.clock(), self.governor
        recent = [entry for entry in list(self.recent) if now - entry[0] < 10.0]  # workers add to it meanwhile
        latencies = sorted(entry[1] for entry in recent)
        watch = self.watches.get(governor.gear.key)
        reading = watch.reading() if watch else None
        return {
            "model": self.name,
            "task": self.task.name,
            "ready": self.ready,
            "gear": governor.current,
            "gears": [{"mac_share": _share(gear), "expected_loss": gear.loss} for gear in self.ladder],
            "normal_gear": governor.normal,
            "lowest_gear": governor.floor,
            "queue_inputs": sum(worker.scheduler.waiting_inputs for worker in self.workers),
            "queue_tokens": sum(worker.scheduler.waiting_tokens for worker in self.workers),
            "batches": sum(len(worker.scheduler.batches) for worker in self.workers),
            "predicted_wait_ms": round(1000 * max(one.scheduler.predicted_wait() for one in self.workers), 2),
            "busy": round(max(worker.busy for worker in self.workers), 3),
            "layer_ms": _cost_ms(self.workers[0].scheduler.costs.layer),
            "answers_per_second": round(len(recent) / 10.0, 1),
            "p50_ms": round(1000 * _quantile(latencies, 0.5), 2),
            "p99_ms": round(1000 * _quantile(latencies, 0.99), 2),
            "exits": [self.exits.get(layer, 0) for layer in range(self.depth + 1)],
            "disagreement": None
            if reading is None
            else {
                "samples": reading.samples,
                "mean": round(reading.mean, 5),
                "lower": round(reading.lower, 5),
                "upper": round(reading.upper, 5),
                "limit": None if watch is None else watch.limit,
                "alarm": reading.alarm,
                "audit_rate": reading.rate,
            },
            "alarms": list(self.alarms),
        }


def check_service_settings(settings: ServiceSettings) -> None:
    """Refuse settings that no server can follow."""
    if not 0.0 < settings.slo < math.inf:
        raise OfframpError("a latency target", f"slo={settings.slo}", "give a time such as 50ms")
    for name, value in (("audit", settings.audit), ("idle_audit", settings.idle_audit)):
        if not 0.0 <= value <= 0.2:
            raise OfframpError("a share of answers to check", f"{name}={value}", "give 0 to 0.2, e.g. 0.01")
    if settings.min_budget is not None:
        Budget.share(settings.min_budget)
    if settings.max_loss is not None:
        Budget.loss(settings.max_loss)
    if settings.max_disagreement is not None and not 0.0 < settings.max_disagreement < 1.0:
        given = f"max_disagreement={settings.max_disagreement}"
        raise OfframpError("a disagreement that raises an alarm", given, "give a number above 0 and below 1, e.g. 0.02")


def _promised_disagreement(budget: Budget, predictor: Predictor) -> float | None:
    """Return how many answers may differ by a budget, or by the run's own default; None if it does not say."""
    if budget.kind == "default" and predictor.points is not None:
        budget = predictor.points.default_budget
    return budget.value if budget.kind in ("risk", "disagreement") else None


def _prepared(predictor: Predictor, rows: Sequence[Mapping[str, Any]]) -> list[list[Encoded]]:
    encoded: list[list[Encoded]] = [[] for _ in rows]
    for one in predictor.prepare(rows, "the request"):
        encoded[one.example].append(one)
    return encoded


def _share(gear: Gear) -> float:
    return round(gear.share, 4)


def _cost_ms(cost: LinearCost) -> dict[str, float]:
    return {"fixed": round(1000 * cost.fixed, 4), "per_token": round(1000 * cost.per_token, 6)}


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def _nothing(work: Work) -> None:
    """Ignore an audit's own answer."""
