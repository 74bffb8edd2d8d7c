"""`subquad serve` under load: CPU time and tokens/s beside `Streams` alone, memory, 1,000 connections, first tokens.

    python benchmarks/serve_http.py --out results/serve_http_cpu.json     two CPU cores: 200 streams of 5M parameters
    python benchmarks/serve_http.py --out results/serve_http.json --device cuda     1,000 streams, 12 layers, width 768
    python benchmarks/serve_http.py --out FILE --tiny                     tiny sizes on the CPU, as a trial

The server runs in a process of its own, as users start it, with a model of random weights. The clients run in this
process, so that their CPU time does not count. In each round `Streams` does the same work alone, prompts included,
while the server has nothing to do; then the server works for as long. Ratios are of one round. Tokens are those that
the server counts.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from subquad import LanguageModel, Streams
from subquad.disk import write_whole
from subquad.machine import origin, tell_commit

Figures = dict[str, Any]
TICKS = os.sysconf("SC_CLK_TCK")
PROMPT = "It was a dark night, and "  # what every stream begins with, and then its number
SIZES: dict[str, Figures] = {
    "cpu": {
        "model": {"dim": 256, "depth": 6, "heads": 8}, "streams": 200, "answer": 512, "rounds": 12, "seconds": 8.0,
        "minutes": 5.0, "connections": 1000, "prefix": 16_384,
    },
    "cuda": {
        "model": {"dim": 768, "depth": 12, "heads": 12}, "streams": 1000, "answer": 2048, "rounds": 3, "seconds": 20.0,
        "minutes": 3.0, "connections": 1000, "prefix": 65_536,
    },
    "tiny": {
        "model": {"dim": 16, "depth": 1, "heads": 2}, "streams": 4, "answer": 16, "rounds": 1, "seconds": 0.5,
        "minutes": 0.02, "connections": 8, "prefix": 600,
    },
}  # fmt: skip


class Server:
    """A process of `subquad serve`."""

    def __init__(self, folder: Path, device: str, slots: int):
        words = ["serve", str(folder), "--port", "0", "--device", device, "--slots", str(slots), "--queue", "4096"]
        environment = {**os.environ, "COLUMNS": "200"}
        log = folder.with_name("server.log")  # a line for each answer
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "subquad.cli", *words], stdout=subprocess.PIPE, stderr=errors, text=True,
                env=environment,
            )  # fmt: skip
        assert self.process.stdout is not None
        said = self.process.stdout.readline().split()
        if not said:
            self.process.wait()
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
        self.host, _, port = said[-1].removeprefix("http://").rpartition(":")
        self.port = int(port)
        while True:
            try:
                self.stats()
                return
            except OSError:
                time.sleep(0.1)

    def stats(self) -> Figures:
        with urllib.request.urlopen(f"http://{self.host}:{self.port}/stats", timeout=60) as answer:
            found: Figures = json.load(answer)
        return found

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def resident_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


@dataclass
class Load:
    """What clients saw."""

    answers: int = 0
    events: int = 0
    errors: list[str] = field(default_factory=list)
    started: int = 0  # clients that have got a first token
    first: list[float] = field(default_factory=list)  # seconds to first tokens

    async def ask(self, server: Server, prompt: str, steps: int, going: asyncio.Event | None = None) -> None:
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
            transport, _ = await loop.create_connection(lambda: client, server.host, server.port)
        except OSError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            return
        transport.write(head.encode() + data)
        try:
            await client.done
        finally:
            transport.abort()


class Client(asyncio.Protocol):
    """Counts events as they come; quicker than a StreamReader, so that one process can read for 1,000 streams."""

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


@asynccontextmanager
async def load_on(server: Server, streams: int, answer: int) -> AsyncIterator[Load]:
    """Keep `streams` answers running; begins once each has got a token."""
    load, going = Load(), asyncio.Event()
    going.set()

    async def client(number: int) -> None:
        first = answer * (number + 1) // streams + 1  # so that answers end at different times
        while going.is_set():
            await load.ask(server, f"{PROMPT}{number}", first, going)
            first = answer

    clients = [asyncio.create_task(client(number)) for number in range(streams)]
    while load.started < streams:
        await asyncio.sleep(0.05)
        if len(load.errors) > streams:
            raise RuntimeError(load.errors[0])
    yield load
    going.clear()
    await asyncio.gather(*clients)
    while (await asyncio.to_thread(server.stats))["engine"]["running"]:  # until the connections are closed
        await asyncio.sleep(0.05)


class Alone:
    """The same work with `Streams` and no server: as many streams, and a new prompt after each answer."""

    def __init__(self, model: LanguageModel, streams: int, answer: int):
        self.streams, self.answer = Streams(model, slots=streams, capacity=1 << 40, temperature=0.8), answer
        self.left: dict[int, int] = {}
        for number in range(streams):
            self._admit(number, answer * (number + 1) // streams + 1)  # so that answers end at different times

    def _admit(self, number: int, answer: int) -> None:
        (id,) = self.streams.admit([list(f"{PROMPT}{number}".encode())], seed=1)
        self.left[id] = answer

    def run(self, seconds: float) -> Figures:
        begun, cpu, tokens = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - begun < seconds:
            for id in self.streams.step():
                tokens += 1
                self.left[id] -= 1
                if self.left[id] == 0:
                    del self.left[id]
                    self.streams.retire(id)
                    self._admit(id, self.answer)
        return {
            "tokens": tokens, "tokens_per_second": tokens / (time.perf_counter() - begun),
            "cpu_microseconds_per_token": 1e6 * (time.process_time() - cpu) / tokens,
        }  # fmt: skip


async def served(server: Server, load: Load, seconds: float) -> Figures:
    """What the server does in some seconds of load."""
    begun, cpu, before, events = time.perf_counter(), server.cpu_seconds(), server.stats(), load.events
    await asyncio.sleep(seconds)
    took, after = time.perf_counter() - begun, await asyncio.to_thread(server.stats)
    tokens = after["engine"]["tokens"] - before["engine"]["tokens"]
    return {
        "tokens": tokens, "tokens_per_second": tokens / took, "events_per_second": (load.events - events) / took,
        "cpu_microseconds_per_token": 1e6 * (server.cpu_seconds() - cpu) / max(tokens, 1),
    }  # fmt: skip


async def beside_streams(server: Server, model: LanguageModel, sizes: Figures) -> Figures:
    streams = Alone(model, sizes["streams"], sizes["answer"])
    streams.run(min(2.0, sizes["seconds"]))
    rounds = []
    for _ in range(sizes["rounds"]):
        alone = streams.run(sizes["seconds"])
        async with load_on(server, sizes["streams"], sizes["answer"]) as load:
            ours = await served(server, load, sizes["seconds"])
        rounds.append({
            "streams": alone, "server": ours, "errors": load.errors[:3],
            "cpu_ratio": ours["cpu_microseconds_per_token"] / alone["cpu_microseconds_per_token"],
            "tokens_per_second_ratio": ours["tokens_per_second"] / alone["tokens_per_second"],
        })  # fmt: skip
    return {
        "rounds": rounds,
        "cpu_ratio": statistics.median(one["cpu_ratio"] for one in rounds),
        "tokens_per_second_ratio": statistics.median(one["tokens_per_second_ratio"] for one in rounds),
    }


async def soak(server: Server, sizes: Figures) -> Figures:
    """Resident memory over minutes of load: its growth is the slope of a line through the last four fifths."""
    seconds, samples = 60 * sizes["minutes"], []
    async with load_on(server, sizes["streams"], sizes["answer"]) as load:
        whole = asyncio.create_task(served(server, load, seconds))
        begun = time.perf_counter()
        while (now := time.perf_counter() - begun) < seconds:
            samples.append((now, server.resident_bytes()))
            await asyncio.sleep(min(1.0, seconds / 20))
        figures = await whole
    last = samples[len(samples) // 5 :]
    slope, _ = statistics.linear_regression(*zip(*last, strict=True))
    return {
        **figures, "minutes": sizes["minutes"], "answers": load.answers, "errors": len(load.errors),
        "error": load.errors[:1], "resident_bytes": samples[:: max(1, len(samples) // 60)],
        "growth_bytes_per_minute": 60 * slope, "least": min(b for _, b in last), "most": max(b for _, b in last),
    }  # fmt: skip


async def connections(server: Server, count: int) -> Figures:
    """Many connections at once, each with a short answer."""
    load, begun, cpu = Load(), time.perf_counter(), server.cpu_seconds()
    await asyncio.gather(*(load.ask(server, f"{PROMPT}{number}", 16) for number in range(count)))
    return {
        "connections": count, "answers": load.answers, "errors": len(load.errors), "error": load.errors[:1],
        "seconds": time.perf_counter() - begun, "cpu_seconds": server.cpu_seconds() - cpu,
        "engine_after": server.stats()["engine"],
    }  # fmt: skip


async def first_tokens(server: Server, prefix: int) -> Figures:
    """Seconds to the first token of a long prompt: cold, and with a prefix that the cache knows."""
    cold, cached = [], []
    for number in range(3):
        text = f"{number} ".join(["word"] * prefix)[:prefix]
        load = Load()
        await load.ask(server, text + " one", 1)
        cold += load.first
        for other in (" two", " three", " four"):
            load = Load()
            await load.ask(server, text + other, 1)
            cached += load.first
    slow, fast = statistics.median(cold), statistics.median(cached)
    return {"prefix": prefix, "cold_seconds": slow, "cached_seconds": fast, "ratio": fast / slow, "all": [cold, cached]}


async def measure(sections: Sequence[str], sizes: Figures, device: str, out: Path) -> None:
    figures: Figures = {"kind": "serve", **origin(device), "sizes": sizes, "threads": torch.get_num_threads()}
    torch.manual_seed(0)
    model = LanguageModel(vocab=256, mechanism="linear", positions="none", **sizes["model"])
    figures["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        model = (model.bfloat16() if device == "cuda" else model).eval()
        model.save(Path(folder) / "model")
        model = model.to(device)
        server = Server(Path(folder) / "model", device, sizes["streams"])
        try:
            for section in sections:
                if section == "beside":
                    figures[section] = await beside_streams(server, model, sizes)
                elif section == "soak":
                    figures[section] = await soak(server, sizes)
                elif section == "connections":
                    figures[section] = await connections(server, sizes["connections"])
                else:
                    figures[section] = await first_tokens(server, sizes["prefix"])
                print(section, json.dumps({k: v for k, v in figures[section].items() if not isinstance(v, list)}))
                write_whole(out, (json.dumps(figures, indent=1) + "\n").encode())
        finally:
            figures["exit_code"] = server.stop()
    write_whole(out, (json.dumps(figures, indent=1) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sections", default="beside,soak,connections,first_tokens")
    parser.add_argument("--minutes", type=float, help="of the soak")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of each half of a round")
    parser.add_argument("--commit", help="commit of the measured code, if git does not know it")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    tell_commit(given.commit)
    sizes = dict(SIZES["tiny" if given.tiny else given.device])
    sizes |= {
        name: getattr(given, name) for name in ("minutes", "rounds", "seconds") if getattr(given, name) is not None
    }
    known = ("beside", "soak", "connections", "first_tokens")
    if unknown := set(given.sections.split(",")) - set(known):
        parser.error(f"--sections has {', '.join(sorted(unknown))}: accepted are {', '.join(known)}")
    asyncio.run(measure(given.sections.split(","), sizes, given.device, given.out))


if __name__ == "__main__":
    main()
