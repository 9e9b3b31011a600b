"""A thread that drives one scheduler: it steps while there is work and hands over what is finished."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from offramp.data.tokenization import Encoded
from offramp.nn.network import Network
from offramp.serving.gears import Gear
from offramp.serving.scheduler import Refusal, Scheduler, Ticket

LOG = logging.getLogger("offramp.serving")
TICK = 0.1  # seconds after which an idle worker checks for work
WARM_UP_ROWS = ((1, 16), (4, 24), (16, 32), (48, 32))  # rows and tokens of each; run three times, measured twice
LARGEST = 32  # tokens of a row of the largest batch of the warm-up
Clock = Callable[[], float]


class Worker:
    """Runs a scheduler in a thread of its own. `finished` is called in that thread after every step."""

    def __init__(
        self,
        scheduler: Scheduler,
        finished: Callable[[Worker, list[Ticket], float], None],
        tick: Callable[[float], None],
        clock: Clock = time.perf_counter,
    ) -> None:
        self.scheduler, self.finished, self.tick, self.clock = scheduler, finished, tick, clock
        self.ready = threading.Event()
        self.busy = 0.0  # share of the time, over about the last second
        self.steps = 0
        self._work = threading.Event()
        self._noted = clock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="offramp-worker", daemon=True)
        self._gears: Sequence[Gear] = ()

    def start(self, gears: Sequence[Gear] = ()) -> None:
        """Start the thread; it first warms up in these gears, then it is ready."""
        self._gears = gears
        self._thread.start()

    def submit(self, tickets: Sequence[Ticket]) -> Refusal | None:
        """Hand inputs to the scheduler, all or none."""
        refusal = self.scheduler.submit(tickets, self.clock())
        if refusal is None:
            self._work.set()
        return refusal

    def cancel(self, ticket: Ticket) -> None:
        """Cancel an input."""
        self.scheduler.cancel(ticket)
        self._work.set()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout: float = 60.0) -> None:
        """End the thread after its current step, also while it warms up; what still waits stays unanswered.

        A thread that is still inside the engine when Python ends can abort the process, so the limit is generous.
        """
        self._stopping = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._warm_up()
        except Exception:  # a model that cannot warm up will report its error to the first client
            LOG.exception("warm-up failed")
        if not self._stopping:
            self.ready.set()
        while not self._stopping:
            if self.scheduler.idle:
                self._work.wait(TICK)
                self._work.clear()
                self.tick(self.clock())
                if self.scheduler.idle:
                    continue
            try:
                self.one_step()
            except Exception as error:  # a bug must neither end the thread nor leave a client waiting
                LOG.exception("a step failed")
                self.finished(self, self.scheduler.fail_all(error), self.clock())

    def one_step(self) -> None:
        """Take one step and hand over what it finished."""
        before = self.clock()
        finished = self.scheduler.step(before)
        if finished:
            self.finished(self, finished, self.clock())
        after = self.clock()  # what becomes of the answers is part of what a step costs
        self.scheduler.observe(after - before)
        self._note_busy(before, after)
        self.steps += 1
        self.tick(after)

    def _note_busy(self, before: float, after: float) -> None:
        """Keep an exponential mean, over a second, of the share of time in which steps ran."""
        for seconds, value in ((before - self._noted, 0.0), (after - before, 1.0)):
            self.busy += (1.0 - math.exp(-max(0.0, seconds))) * (value - self.busy)
        self._noted = after

    def _warm_up(self) -> None:
        """Run rows of several sizes, small ones in every gear: graphs are compiled, the costs of steps become known."""
        scheduler = self.scheduler
        tokenizer = scheduler.predictor.model.tokenizer
        special = set(tokenizer.all_special_ids)
        ids = [number for number in range(min(len(tokenizer), 2000)) if number not in special] or [0]
        longest = scheduler.predictor.model.max_length
        gears = list(dict.fromkeys([*self._gears, scheduler.gears.full]))
        _read_tables(scheduler.network, len(tokenizer))
        for number, whole in itertools.product(range(3), (True, False)):
            scheduler.whole = whole  # one call where the engine can, then by segments: both costs become known
            for rows, tokens in WARM_UP_ROWS if scheduler.network.decoder is None else WARM_UP_ROWS[:1]:
                for gear in gears if number == 0 and rows < 16 else gears[-1:]:
                    if self._stopping:
                        return
                    lengths = [max(1, min(longest, tokens - place % 5)) for place in range(rows)]
                    tickets = [Ticket([_row(ids, length)], self.clock(), gear) for length in lengths]
                    self._warm_up_with(tickets, measure=number > 0)
            if number == 1:  # the largest batch that will come: memory does not grow under load
                rows = max(1, min(scheduler.batch_tokens // min(longest, LARGEST), scheduler.limits.batch_rows))
                largest = [Ticket([_row(ids, min(longest, LARGEST))], self.clock(), gears[0]) for _ in range(rows)]
                self._warm_up_with(largest, measure=True)
        scheduler.whole = None
        scheduler.depths.clear()

    def _warm_up_with(self, tickets: Sequence[Ticket], measure: bool) -> None:
        self.scheduler.submit(tickets, self.clock())
        while not (self.scheduler.idle or self._stopping):
            before = self.clock()
            self.scheduler.step(before)
            if measure:  # not the first time, when graphs are compiled
                self.scheduler.observe(self.clock() - before)


def _read_tables(network: Network, vocabulary: int) -> None:
    """Read the tables by token: the file they are mapped from is then in memory before the first request."""
    modules = (network.hf, network.added)
    for table in itertools.chain.from_iterable((*one.parameters(), *one.buffers()) for one in modules):
        if table.dim() and len(table) >= vocabulary:
            table.detach().sum()


def _row(ids: Sequence[int], length: int) -> Encoded:
    row = [ids[(7 * place + 3 * length) % len(ids)] for place in range(length)]
    return Encoded(row, [0] * length, 0, list(range(length)), [(0, 0)] * length, 0)
