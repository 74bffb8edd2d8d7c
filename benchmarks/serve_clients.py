"""Clients of `subquad serve` for benchmarks/serve_http.py, which starts this file in processes of their own.

The first line of the input says whom to ask, and how many streams to keep running. To each line that follows, a line
with counts is the answer; after "stop", or at the end of the input, all streams end. Imports little, so that many
processes start at once.
"""

import asyncio
import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

PROMPT = "It was a dark night, and "  # what every stream begins with, and then its number


@dataclass
class Load:
    """What clients saw."""

    answers: int = 0
    events: int = 0
    errors: list[str] = field(default_factory=list)
    started: int = 0  # answers that have got a first token
    first: list[float] = field(default_factory=list)  # seconds to first tokens

    async def ask(self, address: tuple[str, int], prompt: str, steps: int, going: asyncio.Event | None = None) -> None:
        """One streamed answer over a connection of its own; stops in the middle when `going` is cleared."""
        body = {
            "prompt": prompt,
            "max_tokens": steps,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": 1,
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
        loop = asyncio.get_running_loop()
        client = Client(self, going, loop.create_future())
        try:
            transport, _ = await loop.create_connection(lambda: client, *address)
        except OSError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)
            return
        transport.write(head.encode() + data)
        try:
            await client.done
        finally:
            transport.abort()


class Client(asyncio.Protocol):
    """Counts events as they come; quicker than a StreamReader, so that one process can read for many streams."""

    def __init__(self, load: Load, going: asyncio.Event | None, done: asyncio.Future[None]):
        self.load, self.going, self.done = load, going, done
        self.begun, self.seen, self.last = time.perf_counter(), False, b""

    def data_received(self, part: bytes) -> None:
        count = part.count(b"data: ")
        self.load.events += count
        self.last = part if len(part) >= 400 else (self.last + part)[-400:]
        if count and not self.seen:
            self.seen = True
            self.load.first.append(time.perf_counter() - self.begun)
            self.load.started += 1
        if self.going is not None and not self.going.is_set() and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is not None:
            self.load.errors.append(f"{type(error).__name__}: {error}")
        elif b'"finish_reason":"length"' not in self.last or b"data: [DONE]" not in self.last:
            self.load.errors.append(self.last.decode(errors="replace"))
        self.load.answers += error is None
        self.done.set_result(None)


async def main() -> None:
    words: dict[str, Any] = json.loads(sys.stdin.readline())
    host, port, streams, answer = words["host"], words["port"], words["streams"], words["answer"]
    load, going = Load(), asyncio.Event()
    going.set()

    async def client(number: int) -> None:
        steps = answer * (number + 1) // streams + 1  # so that answers end at different times
        while going.is_set():
            await load.ask((host, port), f"{PROMPT}{number}", steps, going)
            steps = answer

    clients = [asyncio.create_task(client(number)) for number in words["numbers"]]
    while (await asyncio.to_thread(sys.stdin.readline)).strip() not in ("", "stop"):
        tell(load)
    going.clear()
    await asyncio.gather(*clients)
    tell(load)


def tell(load: Load) -> None:
    counts = asdict(load) | {"first": [], "errors": load.errors[:3], "failed": len(load.errors)}
    with suppress(BrokenPipeError):  # nobody asks any more
        print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
