"""Continuous batching at exits: what a worker computes next, as a plain object without threads and without a clock.

New inputs join between segments. A row that exits is answered at once, not when its batch ends. Batches that stand at
the same layer are merged when that is predicted to pay; whether a batch waits for another one to catch up is decided by
the predicted sum of completion times. Rows that expired or whose client has gone are dropped between segments. Where
the engine can run a batch from token ids to answers in one call, that is done whenever the rows are predicted to leave
sooner on average than segment by segment: a single row always, many rows when the steps between them cost more than
early leavers gain. Nothing of this changes an answer: a row's answer does not depend on its batch.

`submit` may be called from any thread; `step` belongs to one thread.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from offramp.core import cost, loop
from offramp.core.columns import ORIGIN
from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.data.tokenization import Encoded
from offramp.inference.batching import run_encoded, run_packed
from offramp.inference.predictor import Predictor
from offramp.nn.batches import pack_rows
from offramp.nn.outputs import Array, RunOutput
from offramp.serving.costs import EMBEDDING, DepthCounts, LinearCost, StepCosts
from offramp.serving.gears import Gear, GearBox

PRIORITIES = range(1, 10)  # 1 is served first
DEFAULT_PRIORITY = 5
KEPT = 1000  # ended inputs that may stay in the queues until they are cleaned
SMALLEST_BATCH = 128  # tokens that may always share a batch
BATCH_SHARE = 0.3  # of the latency target that one batch may take
Kind = Literal["answered", "expired", "cancelled", "failed"]


@dataclass(frozen=True)
class Limits:
    """Bounds of a scheduler."""

    batch_tokens: int = 4096  # tokens of a batch
    batch_rows: int = 256
    queue_tokens: int = 65_536  # tokens that wait
    queue_requests: int = 2048  # inputs that wait
    target: float = 0.05  # seconds within which an input of normal priority should be answered


class Outcome(NamedTuple):
    """How an input ended; exactly one for every input that was submitted."""

    kind: Kind
    output: RunOutput | None = None  # of its rows, if it was answered
    error: Exception | None = None  # if it failed


class Refusal(NamedTuple):
    """Why inputs were not taken, and after how many seconds it is worth trying again."""

    reason: str
    retry_after: float


@dataclass(eq=False)
class Ticket:
    """One input on its way: its rows (several if a long text was cut into windows), its limits, its outcome."""

    encoded: Sequence[Encoded]
    arrived: float
    gear: Gear | None = None  # None: the gear of the moment when it starts
    deadline: float = math.inf
    priority: int = DEFAULT_PRIORITY
    payload: Any = None
    most: Gear | None = None  # no costlier gear than this, whatever the gear of the moment is
    started: float | None = None
    outcome: Outcome | None = None
    cancelled: bool = False
    alone: bool = False  # a batch with it failed: it is computed by itself
    waiting: bool = False
    rows: list[tuple[NDArray[Any], float, float, float] | None] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of tokens of all its rows."""
        return sum(len(one.ids) for one in self.encoded)


@dataclass(eq=False)
class RunningBatch:
    """Rows that are computed together, with the ticket of each."""

    state: State
    lane: str
    owners: list[tuple[Ticket, int]]  # ticket and its row, by ORIGIN
    macs: Array  # by ORIGIN, so far
    kept: Array
    passed_over: int = 0
    _gears: tuple[int, frozenset[Gear]] | None = None  # for so many live rows

    @property
    def rows(self) -> int:
        """Number of live rows."""
        return self.state.packed.count

    @property
    def gears(self) -> frozenset[Gear]:
        """Gears of the live rows."""
        if self._gears is None or self._gears[0] != self.rows:
            live = self.state.packed.rows[ORIGIN].tolist()
            self._gears = self.rows, frozenset(_gear(self.owners[i][0]) for i in live)
        return self._gears[1]


class Scheduler:
    """Decides what is computed next, computes it, and returns the inputs that are finished."""

    def __init__(self, gears: GearBox, limits: Limits | None = None, costs: StepCosts | None = None) -> None:
        self.gears, self.limits, self.costs = gears, limits or Limits(), costs or StepCosts()
        self.predictor: Predictor = gears.predictor
        self.network, self.engine = self.predictor.network, self.predictor.engine
        self.heads = self.engine.compile_heads(self.network)
        self.depth = self.network.depth
        self.gear: Gear = gears.full  # of inputs that bring none
        self.depths: dict[str, DepthCounts] = {}
        self.batches: list[RunningBatch] = []
        self.waiting_tokens = self.waiting_inputs = 0
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._inbox: deque[Ticket] = deque()
        self._heap: list[tuple[float, int, Ticket]] = []
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._check_running = False  # a running row may have been cancelled or have expired
        self._running = (0, 0.0)  # batches and token-layers that are under way
        self._last: tuple[LinearCost, int, int] | None = None  # what the last step teaches: cost, size, how many times
        self.whole: bool | None = None  # whether batches run in one call; None: where that is predicted to be quicker

    # taking in

    def submit(self, tickets: Sequence[Ticket], now: float) -> Refusal | None:
        """Take inputs, all or none; they wait until a step starts them. Thread-safe."""
        tokens, soonest = sum(ticket.tokens for ticket in tickets), min(ticket.deadline for ticket in tickets)
        if soonest < math.inf and soonest <= now + (least := self.predicted_wait() + self.costs.start(tokens)):
            return Refusal(f"the deadline is sooner than the predicted wait of {1000 * least:.1f} ms", least)
        with self._lock:
            if self.waiting_inputs + len(tickets) > self.limits.queue_requests:
                return Refusal(f"{self.waiting_inputs} inputs wait already", self.predicted_wait())
            if self.waiting_inputs and self.waiting_tokens + tokens > self.limits.queue_tokens:
                return Refusal(f"{self.waiting_tokens} tokens wait already", self.predicted_wait())
            self.waiting_inputs += len(tickets)
            self.waiting_tokens += tokens
            for ticket in tickets:
                ticket.waiting, ticket.rows = True, [None] * len(ticket.encoded)
            self._inbox.extend(tickets)
        return None

    def cancel(self, ticket: Ticket) -> None:
        """Cancel an input: it is dropped from the queue at once, or between segments. Thread-safe."""
        ticket.cancelled = True
        self._stop_waiting(ticket)
        self._check_running = True

    def _stop_waiting(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket.waiting:
                ticket.waiting = False
                self.waiting_inputs -= 1
                self.waiting_tokens -= ticket.tokens

    def predicted_wait(self, gear: Gear | None = None) -> float:
        """Return the predicted seconds until all work is done that waits or runs, if what waits runs in a gear."""
        batches, token_layers = self._running
        tokens, layer, start = self.waiting_tokens, self.costs.layer, self.costs.start
        if not tokens and not batches:
            return 0.0
        depth = self.counts_of(gear or self.gear).remaining(-1)
        groups = math.ceil(tokens / self.batch_tokens)
        running = (1.0 + depth) * layer.fixed + token_layers * layer.per_token if batches else 0.0
        waiting = groups * (start.fixed + (1.0 + depth) * layer.fixed)
        waiting += tokens * (start.per_token + depth * layer.per_token)
        if (whole := self.costs.whole).count:
            waiting = min(waiting, groups * whole.fixed + tokens * (depth + EMBEDDING) * whole.per_token)
            if not self.batches and batches:  # the batch under way is a whole run
                running = whole(token_layers)
        return running + waiting

    def counts_of(self, gear: Gear) -> DepthCounts:
        """Return how deep rows of a gear go."""
        counts = self.depths.get(gear.key)
        if counts is None:
            counts = self.depths[gear.key] = DepthCounts(self.depth, gear.mean_exit_layer)
        return counts

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.batches and not self._inbox and not self._heap

    # one step

    def step(self, now: float) -> list[Ticket]:
        """Compute one segment, or start a batch; return the inputs that are finished, each with its outcome."""
        finished: list[Ticket] = []
        self._last = None
        self._take_in()
        self._expire(now, finished)
        if self._check_running:
            self._check_running = False
            self._drop_running(now, finished)
        batch = self._next()
        if batch is None:
            self._start(now, finished)
        else:
            for other in self.batches:
                other.passed_over = 0 if other is batch else other.passed_over + 1
            self._advance(batch, finished)
        token_layers = sum(one.state.packed.total * self._remaining(one) for one in self.batches)
        self._running = (len(self.batches), token_layers)
        return finished

    def observe(self, seconds: float) -> None:
        """Learn what the last step took."""
        if self._last is not None:
            cost, size, times = self._last
            cost.observe(size, seconds / times)

    def fail_all(self, error: Exception) -> list[Ticket]:
        """End everything that waits or runs; the last resort after an error in the scheduler itself."""
        finished: list[Ticket] = []
        self._take_in()
        running = [ticket for batch in self.batches for ticket, _ in batch.owners]
        for ticket in [*running, *(entry[2] for entry in self._heap)]:
            if ticket.outcome is None:
                self._finish(ticket, Outcome("failed", error=error), finished)
        self.batches.clear()
        self._heap.clear()
        self._running = (0, 0.0)
        return finished

    def _take_in(self) -> None:
        while self._inbox:
            ticket = self._inbox.popleft()
            self._push(ticket)
            if ticket.deadline < math.inf:
                heapq.heappush(self._deadlines, (ticket.deadline, next(self._numbers), ticket))
        open_inputs = self.waiting_inputs + sum(len(batch.owners) for batch in self.batches)
        for heap in (self._heap, self._deadlines):
            if len(heap) > 2 * open_inputs + KEPT:  # inputs that ended long before their deadline are forgotten
                heap[:] = [entry for entry in heap if entry[2].outcome is None]
                heapq.heapify(heap)

    def _push(self, ticket: Ticket) -> None:
        # a virtual deadline: urgent inputs overtake, and none is overtaken for ever
        due = ticket.arrived + self.limits.target * ticket.priority / DEFAULT_PRIORITY
        heapq.heappush(self._heap, (min(due, ticket.deadline), next(self._numbers), ticket))

    def _expire(self, now: float, finished: list[Ticket]) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = heapq.heappop(self._deadlines)[2]
            if ticket.outcome is None:
                if ticket.waiting:
                    self._finish(ticket, Outcome("expired"), finished)
                else:
                    self._check_running = True

    def _drop_running(self, now: float, finished: list[Ticket]) -> None:
        """Drop rows between segments whose input was cancelled, has expired or has failed."""
        for batch in list(self.batches):
            keep = []
            for origin in batch.state.packed.rows[ORIGIN].tolist():
                ticket = batch.owners[origin][0]
                if ticket.outcome is None and (ticket.cancelled or ticket.deadline <= now):
                    self._finish(ticket, Outcome("cancelled" if ticket.cancelled else "expired"), finished)
                keep.append(ticket.outcome is None)
            if not any(keep):
                self.batches.remove(batch)
            elif not all(keep):
                batch.state.packed = batch.state.packed.keep_rows(torch.tensor(keep))

    def _finish(self, ticket: Ticket, outcome: Outcome, finished: list[Ticket]) -> None:
        self._stop_waiting(ticket)
        ticket.outcome, ticket.rows = outcome, []
        finished.append(ticket)

    # what comes next

    def _next(self) -> RunningBatch | None:
        """Return the batch to advance; None: start a new one from the queue, if anything waits."""
        if not self.batches:
            return None
        late = max(self.batches, key=lambda batch: batch.passed_over)
        if late.passed_over > 3 * self.depth:
            return late
        order = sorted(self.batches, key=lambda batch: -batch.state.layer)
        chosen = order[0]
        for behind in order[1:]:
            if behind.lane == chosen.lane and self._waiting_pays(chosen, behind.rows, behind.state):
                chosen = behind
        if self._heap and self._room() and self._waiting_pays(chosen, self.waiting_inputs, None):
            return None
        return chosen

    def _room(self) -> bool:
        """Whether another batch may start beside those that run."""
        return sum(batch.state.packed.total for batch in self.batches) < 2 * self.batch_tokens

    @property
    def batch_tokens(self) -> int:
        """Tokens of a batch: as many as get through in a share of the latency target, within the limit."""
        start, layer, depth = self.costs.start, self.costs.layer, self.counts_of(self.gear).remaining(-1)
        time, whole = BATCH_SHARE * self.limits.target, self.costs.whole
        tokens = (time - start.fixed - self.depth * layer.fixed) / (start.per_token + depth * layer.per_token + 1e-12)
        if whole.count:
            tokens = max(tokens, (time - whole.fixed) / ((depth + EMBEDDING) * whole.per_token + 1e-12))
        return int(min(self.limits.batch_tokens, max(SMALLEST_BATCH, tokens)))

    def _waiting_pays(self, ahead: RunningBatch, rows: int, behind: State | None) -> bool:
        """Whether the sum of completion times is smaller if `ahead` waits until rows behind it have caught up.

        `behind` is another batch, or None for the rows that wait in the queue.
        """
        layer, place = self.costs.layer, ahead.state.layer
        counts = self.counts_of(next(iter(ahead.gears)))
        if behind is None:
            tokens = float(min(self.waiting_tokens, self.batch_tokens))
            rows, below, catch_up = min(rows, self.limits.batch_rows), -1, self.costs.start(tokens)
        else:
            tokens, below, catch_up = float(behind.packed.total), behind.layer, 0.0
        for passed in range(max(below, 0) + 1, place + 1):
            catch_up += layer(tokens * counts.surviving(below, passed - 1))
        share = counts.surviving(below, place)
        arriving, own = tokens * share, float(ahead.state.packed.total)
        if own + arriving > self.batch_tokens or ahead.rows + rows * share > self.limits.batch_rows:
            return False
        alone, together = self._rest(own, place, counts), self._rest(own + arriving, place, counts)
        wait = ahead.rows * (catch_up + together) + rows * (catch_up + share * together)
        go = ahead.rows * alone + rows * (alone + catch_up + share * self._rest(arriving, place, counts))
        return wait <= go

    def _rest(self, tokens: float, layer: int, counts: DepthCounts) -> float:
        """Return the predicted seconds until the last of these rows has left."""
        steps = self.depth - layer
        return steps * self.costs.layer.fixed + tokens * counts.remaining(layer) * self.costs.layer.per_token

    def _remaining(self, batch: RunningBatch) -> float:
        return self.counts_of(next(iter(batch.gears))).remaining(batch.state.layer)

    # computing

    def _start(self, now: float, finished: list[Ticket]) -> None:
        """Start a batch from the queue: embeddings and exit 0; a decoder runs to the end."""
        tickets = self._pop(now, finished)
        if not tickets:
            return
        owners = [(ticket, number) for ticket in tickets for number in range(len(ticket.encoded))]
        encoded = [ticket.encoded[number] for ticket, number in owners]
        try:
            lane = f"alone {next(self._numbers)}" if tickets[0].alone else _gear(tickets[0]).lane
            gears = frozenset(_gear(ticket) for ticket in tickets)
            policy, tokens = self.gears.mixed_policy(gears), sum(len(one.ids) for one in encoded)
            if self.network.decoder is not None:
                self._answer(owners, run_encoded(self.network, self.engine, policy, encoded), finished)
                self._last = (self.costs.layer, tokens, self.depth)
                return
            packed = pack_rows(self.network.task, encoded)
            whole = self._whole_pays(policy, tickets, len(owners), tokens)
            if _gear(tickets[0]).columns and not (whole and len(gears) == 1):  # batches of other gears may be merged
                each = [_gear(ticket).columns for ticket, _ in owners]
                packed = packed.with_rows(**{name: torch.stack([one[name] for one in each]) for name in each[0]})
            if whole:
                self._run_whole(policy, packed, owners, finished)
                return
            with torch.inference_mode(), self.engine.running():
                state = loop.start(self.engine, self.heads, policy, packed.to(self.network.device))
            batch = RunningBatch(state, lane, owners, np.zeros(len(owners)), np.zeros(len(owners)))
            self._last = (self.costs.start, tokens, 1)
            self._collect(batch, finished)
            if not batch.state.done:
                self.batches.append(batch)
                self._merge(batch)
        except Exception as error:  # whatever the model raises must not harm other inputs
            self._isolate([ticket for ticket in tickets if ticket.outcome is None], error, finished)

    def _whole_pays(self, policy: Policy, tickets: Sequence[Ticket], rows: int, tokens: int) -> bool:
        """Whether the sum of completion times is smaller if a new batch runs in one call, where the engine can.

        Rows that wait or run elsewhere count as well: they go on when the call, or the last segment, has ended.
        """
        if self.whole is False or not loop.runs_whole(self.engine, self.heads, policy):
            return False
        if self.whole:
            return True
        counts = self.counts_of(_gear(tickets[0]))
        mean, last = self.costs.by_steps(tokens, counts.alive)
        whole = self.costs.whole(tokens * (counts.remaining(-1) + EMBEDDING))
        others = self.waiting_inputs + sum(batch.rows for batch in self.batches)
        return (rows + others) * whole <= rows * mean + others * last

    def _run_whole(
        self, policy: Policy, packed: Packed, owners: Sequence[tuple[Ticket, int]], finished: list[Ticket]
    ) -> None:
        """Run a batch from its token ids to all its answers."""
        depth = self.counts_of(_gear(owners[0][0])).remaining(-1) + EMBEDDING
        self._running = (len(self.batches) + 1, packed.total * depth)
        output = run_packed(self.network, self.engine, policy, packed)
        size = (packed.lengths.numpy() * (output.exit_layer + EMBEDDING)).sum()
        self._last = (self.costs.whole, int(size), 1)
        self._answer(owners, output, finished)

    def _pop(self, now: float, finished: list[Ticket]) -> list[Ticket]:
        """Return inputs that wait and may share a batch, the most urgent first."""
        tickets: list[Ticket] = []
        others: list[tuple[float, int, Ticket]] = []
        tokens, rows, most = 0, 0, self.batch_tokens
        while self._heap and len(others) < self.limits.batch_rows:
            entry = heapq.heappop(self._heap)
            ticket = entry[2]
            if ticket.outcome is not None:
                continue
            if ticket.cancelled or ticket.deadline <= now:
                self._finish(ticket, Outcome("cancelled" if ticket.cancelled else "expired"), finished)
                continue
            gear = ticket.gear or self.gear
            if ticket.most is not None and gear.share > ticket.most.share:
                gear = ticket.most
            if tickets:
                full = tokens + ticket.tokens > most
                full = full or rows + len(ticket.encoded) > self.limits.batch_rows
                if full or ticket.alone or tickets[0].alone:
                    others.append(entry)
                    break
                if _gear(tickets[0]).lane != gear.lane:
                    others.append(entry)
                    continue
            self._stop_waiting(ticket)
            ticket.gear, ticket.started = gear, now
            tickets.append(ticket)
            tokens, rows = tokens + ticket.tokens, rows + len(ticket.encoded)
        for entry in others:
            heapq.heappush(self._heap, entry)
        return tickets

    def _advance(self, batch: RunningBatch, finished: list[Ticket]) -> None:
        """Advance a batch by one segment, answer the rows that leave, and merge it with another one if that pays."""
        try:
            before, tokens = batch.state.layer, batch.state.packed.total
            with torch.inference_mode(), self.engine.running():
                loop.step(self.engine, self.gears.mixed_policy(batch.gears), batch.state)
            self._last = (self.costs.layer, tokens, batch.state.layer - before)
            self._collect(batch, finished)
            if batch.state.done:
                self.batches.remove(batch)
            else:
                self._merge(batch)
        except Exception as error:  # whatever the model raises must not harm other inputs
            self.batches.remove(batch)
            live = dict.fromkeys(ticket for ticket, _ in batch.owners if ticket.outcome is None)
            self._isolate(live, error, finished)

    def _isolate(self, tickets: Iterable[Ticket], error: Exception, finished: list[Ticket]) -> None:
        """After a failure: an input that was alone has failed, the others are computed again one by one."""
        tickets = list(tickets)
        for ticket in tickets:
            if len(tickets) == 1 or ticket.alone:
                self._finish(ticket, Outcome("failed", error=error), finished)
                continue
            ticket.alone, ticket.rows = True, [None] * len(ticket.encoded)
            with self._lock:
                ticket.waiting = True
                self.waiting_inputs += 1
                self.waiting_tokens += ticket.tokens
            self._push(ticket)
        if any(ticket.outcome is None for ticket in tickets):
            self._forget(tickets)

    def _forget(self, tickets: list[Ticket]) -> None:
        """Drop rows of inputs that begin again from the other batches."""
        again = set(map(id, tickets))
        for batch in list(self.batches):
            keep = [id(batch.owners[origin][0]) not in again for origin in batch.state.packed.rows[ORIGIN].tolist()]
            if not any(keep):
                self.batches.remove(batch)
            elif not all(keep):
                batch.state.packed = batch.state.packed.keep_rows(torch.tensor(keep))

    def _collect(self, batch: RunningBatch, finished: list[Ticket]) -> None:
        """Account for the events of the last step and answer the rows that left in it."""
        state, size = batch.state, len(batch.owners)
        batch.macs += cost.macs(state.trace, self.network, size).numpy()
        batch.kept += cost.tokens_kept(state.trace, self.depth, size).numpy()
        state.trace.clear()
        for group in state.exited:
            origins, layers = group.rows.tolist(), group.layers.numpy()
            logits = group.logits.float().cpu().numpy()
            each = list(logits)
            if self.network.per_token:
                lengths = [int(state.base.lengths[origin]) for origin in origins]
                each = np.split(logits, np.cumsum(lengths)[:-1])
            self._count([batch.owners[origin][0] for origin in origins], layers)
            for origin, row_logits, layer in zip(origins, each, layers.tolist(), strict=True):
                ticket, number = batch.owners[origin]
                row = (row_logits, layer, float(batch.macs[origin]), float(batch.kept[origin]))
                self._row_done(ticket, number, row, finished)
        state.exited.clear()

    def _count(self, tickets: Sequence[Ticket], layers: Array) -> None:
        keys = [_gear(ticket).key for ticket in tickets]
        for key in dict.fromkeys(keys):
            own = layers[np.array([other == key for other in keys])]
            self.counts_of(next(_gear(ticket) for ticket in tickets if _gear(ticket).key == key)).observe(own)

    def _row_done(
        self, ticket: Ticket, number: int, row: tuple[NDArray[Any], float, float, float], finished: list[Ticket]
    ) -> None:
        if ticket.outcome is not None:
            return
        ticket.rows[number] = row
        done = [one for one in ticket.rows if one is not None]
        if len(done) == len(ticket.rows):
            logits, layers, macs, kept = zip(*done, strict=True)
            output = RunOutput(list(logits), np.array(layers), np.array(macs), np.array(kept))
            self._finish(ticket, Outcome("answered", output), finished)

    def _answer(self, owners: Sequence[tuple[Ticket, int]], output: RunOutput, finished: list[Ticket]) -> None:
        """Answer inputs whose rows ran to the end in one call."""
        self._count([ticket for ticket, _ in owners], output.exit_layer)
        columns = (output.exit_layer.tolist(), output.macs.tolist(), output.tokens_kept.tolist())
        for (ticket, number), logits, layer, macs, kept in zip(owners, output.logits, *columns, strict=True):
            self._row_done(ticket, number, (logits, layer, macs, kept), finished)

    # merging

    def _merge(self, batch: RunningBatch) -> None:
        """Merge a batch with others at its layer, as long as the saved steps cost more than moving the rows."""
        for other in list(self.batches):
            if other is batch or not _mergeable(batch, other):
                continue
            tokens = batch.state.packed.total + other.state.packed.total
            steps = math.ceil(self._remaining(batch))
            moving = 0.1 * self.costs.layer(tokens)  # rows are copied once, which is little beside a layer's products
            fits = tokens <= self.batch_tokens and batch.rows + other.rows <= self.limits.batch_rows
            if fits and steps * self.costs.layer.fixed > moving:
                first, second = _compact(other), _compact(batch)
                batch.state = loop.merge([first.state, second.state])
                batch.owners = first.owners + second.owners
                batch.macs, batch.kept = (
                    np.concatenate(pair) for pair in ((first.macs, second.macs), (first.kept, second.kept))
                )
                batch.passed_over, batch._gears = max(batch.passed_over, other.passed_over), None
                self.batches.remove(other)


def _gear(ticket: Ticket) -> Gear:
    assert ticket.gear is not None, "an input that started has a gear"
    return ticket.gear


def _mergeable(a: RunningBatch, b: RunningBatch) -> bool:
    """Whether two batches stand at the same layer and carry the same columns."""
    first, second = a.state.packed, b.state.packed
    same = a.lane == b.lane and a.state.layer == b.state.layer and a.state.has_dropped == b.state.has_dropped
    if a.state.has_dropped:  # answers per token then need the tokens of both bases
        same = same and a.state.base.tokens.keys() == b.state.base.tokens.keys()
    return same and first.rows.keys() == second.rows.keys() and first.tokens.keys() == second.tokens.keys()


def _compact(batch: RunningBatch) -> RunningBatch:
    """Return a batch of the live rows alone, numbered anew."""
    live = batch.state.packed.rows[ORIGIN].cpu().numpy()
    owners = [batch.owners[origin] for origin in live.tolist()]
    return replace(batch, state=batch.state.live_part(), owners=owners, macs=batch.macs[live], kept=batch.kept[live])
