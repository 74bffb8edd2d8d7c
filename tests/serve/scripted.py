"""An engine whose answers are known: every request gets its own prompt again and again."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from subquad.models.decoding import limit_of
from subquad.serve.request import Drawn, Full, Request, Stats, Update

OTHER = ord("?")  # the second most probable token, always


class Scripted:
    def __init__(
        self, model: Any, *, slots: int, capacity: int | None, queue: int, cache: Any, draft: Any,
        deliver: Callable[[list[Update]], None], pause: float = 0.0005,
    ):  # fmt: skip
        self.slots, self.queue, self.deliver, self.pause = slots, queue, deliver, pause
        self.capacity = capacity or limit_of(model) or 1 << 40
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, tuple[Request, int]] = {}
        self.cancelled: list[int] = []
        self.lock = threading.Condition()
        self.submitted = self.tokens = 0
        self.owners: set[str] = set()
        self.fails = False
        self.thread: threading.Thread | None = None
        self.ended = False

    def check(self, requests: Sequence[Request]) -> None: ...

    def submit_all(self, requests: Sequence[Request], checked: bool = False) -> list[int]:
        assert checked
        with self.lock:
            if len(self.waiting) + len(requests) > self.queue:
                raise Full
            numbers = list(range(self.submitted + 1, self.submitted + 1 + len(requests)))
            self.submitted += len(requests)
            self.owners.update(request.owner for request in requests)
            self.waiting.update(zip(numbers, requests, strict=True))
            self.lock.notify()
            return numbers

    def cancel(self, *numbers: int) -> None:
        with self.lock:
            for number in numbers:
                if self.waiting.pop(number, None) or self.running.pop(number, None):
                    self.cancelled.append(number)

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self, drain: bool = True, seconds: float = 30.0) -> None:
        with self.lock:
            self.ended = True
            left = [*self.waiting, *self.running]
            self.waiting.clear()
            self.running.clear()
            self.lock.notify()
        self.deliver([Update(number, end="cancelled") for number in left])
        if self.thread is not None:
            self.thread.join()

    def _run(self) -> None:
        while not self.ended:
            with self.lock:
                while not (self.waiting or self.running or self.ended):
                    self.lock.wait()
                while self.waiting and len(self.running) < self.slots:
                    number = next(iter(self.waiting))
                    self.running[number] = (self.waiting.pop(number), 0)
                updates = [self._draw(number, *self.running[number]) for number in list(self.running)]
            self.deliver(updates)
            time.sleep(self.pause)

    def _draw(self, number: int, request: Request, made: int) -> Update:
        if self.fails:
            del self.running[number]
            return Update(number, end="error", error="the prompt was secret")
        token = request.prompt[made % len(request.prompt)]
        self.tokens += 1
        self.running[number] = (request, made + 1)
        end = "stop" if token in request.stop else "length" if made + 1 >= request.steps else None
        if end is not None:
            del self.running[number]
        prompt: tuple[Drawn, ...] = ()
        if request.prompt_logprobs and not made:
            prompt = tuple(self._drawn(request, token, number) for number, token in enumerate(request.prompt))
        return Update(number, (self._drawn(request, token, 1),), end, len(request.prompt) // 2, prompt)

    def _drawn(self, request: Request, token: int, place: int) -> Drawn:
        if request.logprobs is None or place == 0:
            return Drawn(token)
        return Drawn(token, -0.5, ((token, -0.5), (OTHER, -1.5))[: request.logprobs])

    @property
    def stats(self) -> Stats:
        free = self.slots - len(self.running)
        return Stats(len(self.running), len(self.waiting), 0, free, 0, self.tokens, 0, 0, 0, 0, 1024, 1024 * self.slots)
