"""Between the engine's thread and the event loop: requests go one way, updates the other."""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from subquad.serve.engine import Engine
from subquad.serve.metrics import Metrics
from subquad.serve.request import Request, Update

JOIN = 0.02  # seconds between events of a stream: updates wait for others at most so long, and become one event
LAG = 1.0  # seconds for which the engine waits for a loop that has much else to do
BEHIND = 8192  # tokens that a slow reader may be behind; then it is cut off


class Writer(Protocol):
    def prepare(self) -> None:
        """Make one event of what is in the inbox."""

    def write(self) -> None:
        """Send it."""


class Job:
    """The engine's requests of one HTTP request."""

    # A step of the model empties the caches. With slots, here and in what else each token needs, less is read again
    __slots__ = (
        "begun", "behind", "ended", "exchange", "first", "gone", "inbox", "numbers", "streams", "waiter", "writer",
    )  # fmt: skip

    def __init__(self, exchange: "Exchange", streams: bool):
        self.exchange, self.streams = exchange, streams
        self.numbers: dict[int, int] = {}  # of the engine's requests to choices
        self.inbox: list[tuple[int, Update]] = []
        self.waiter: asyncio.Future[None] | None = None  # of who writes the answer
        self.writer: Writer | None = None  # called in place of waking a task
        self.begun = time.monotonic()
        self.first: float | None = None  # seconds to the first token
        self.behind = 0  # tokens in the inbox
        self.ended = False  # a choice, at least
        self.gone = ""  # why nobody reads the answer any more

    def submit(self, requests: Sequence[Request]) -> None:
        """All requests, which the engine has checked, or none: Full and ValueError are the engine's."""
        for choice, number in enumerate(self.exchange.engine.submit_all(requests, checked=True)):
            self.numbers[number] = choice
            self.exchange.jobs[number] = (self, choice)

    def take(self) -> list[tuple[int, Update]]:
        inbox, self.inbox, self.behind = self.inbox, [], 0
        return inbox

    async def wait(self) -> None:
        """Until there is something to take, or nobody reads."""
        if not self.inbox and not self.gone:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter

    def wake(self) -> None:
        if self.writer is not None:
            self.writer.write()
        elif self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def end(self, choice: int) -> None:
        """End one choice early: its text is complete."""
        self._forget([number for number, other in self.numbers.items() if other == choice])

    def cancel(self) -> None:
        self._forget(list(self.numbers))

    def leave(self, why: str) -> None:
        """The client does not read the answer: free the slots at once."""
        self.gone = self.gone or why
        self.cancel()
        self.wake()

    def _forget(self, numbers: list[int]) -> None:
        run = [number for number in numbers if self.exchange.jobs.pop(number, None) is not None]
        for number in numbers:
            del self.numbers[number]
        if run:
            self.exchange.engine.cancel(*run)


class Exchange:
    """Made and used in the event loop; only `deliver` is called from the engine's thread.

    in_turn  the engine goes on when its updates are taken. On a CPU the two threads would get into each other's way:
             every operation of one hands the interpreter over to the other, which costs more than the wait. On a GPU
             the next step runs meanwhile, and only its updates wait
    """

    engine: Engine

    def __init__(self, metrics: Metrics, in_turn: bool = False):
        self.metrics, self.in_turn = metrics, in_turn
        self.jobs: dict[int, tuple[Job, int]] = {}  # by the engine's number of a request, with the choice that it is
        self.ready: set[Job] = set()
        self.flushed = 0.0  # when events were last written
        self.timer: asyncio.TimerHandle | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.taken = threading.Event()
        self.taken.set()

    def deliver(self, updates: list[Update]) -> None:
        if self.loop is not None and updates:
            self.taken.wait(LAG)
            self.taken.clear()
            self.loop.call_soon_threadsafe(self._receive, updates)
            if self.in_turn:
                self.taken.wait(LAG)

    def _receive(self, updates: list[Update]) -> None:
        try:
            self._take(updates)
        finally:
            self.taken.set()

    def _take(self, updates: list[Update]) -> None:
        assert self.loop is not None
        now, made, jobs, ready = time.monotonic(), 0, self.jobs, self.ready
        for update in updates:
            count, end = len(update.drawn), update.end
            made += count
            if (found := jobs.get(update.number)) is None:
                continue
            job, choice = found
            job.inbox.append((choice, update))
            job.behind += count
            first = job.first is None and count
            if first:
                job.first = now - job.begun
                self.metrics.first_token.observe(job.first)
            if end is not None:
                del jobs[update.number], job.numbers[update.number]
                job.ended = True
            if job.streams and job.behind > BEHIND:
                job.leave(f"the client reads too slowly: it is more than {BEHIND:,} tokens behind")
            elif first or end is not None:
                job.wake()  # without waiting for others
            elif job.streams:
                ready.add(job)
        self.metrics.made(made, now)
        if self.ready and self.timer is None:
            # counted from the beginning of the last writing, which takes long itself where there are many streams
            if (left := self.flushed + JOIN - now) > 0:
                self.timer = self.loop.call_later(left, self._flush)
            else:
                self._flush()

    def _flush(self) -> None:
        self.timer, self.flushed = None, time.monotonic()
        ready, self.ready = self.ready, set()
        # first all that is computed: between system calls, which fill the caches with other things, it takes longer
        for job in ready:
            if job.writer is not None:
                job.writer.prepare()
        for job in ready:
            job.wake()

    @property
    def counts(self) -> Any:
        return self.engine.stats
