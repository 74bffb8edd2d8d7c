"""`subquad serve` under load: CPU time and tokens/s beside `Streams` alone, memory, 1,000 connections, first tokens.

    python benchmarks/serve_http.py --out results/serve_http_cpu.json     two CPU cores: 200 streams of 5M parameters
    python benchmarks/serve_http.py --out results/serve_http.json --device cuda     1,000 streams, 12 layers, width 768
    python benchmarks/serve_http.py --out FILE --tiny                     tiny sizes on the CPU, as a trial

The server runs in a process of its own, as users start it, with a model of random weights. The clients run in others,
so that their CPU time does not count. In each round `Streams` does the same work alone, prompts included, while the
server has nothing to do; then the server works for as long. Ratios are of one round. Tokens are those that the server
counts, and events those that clients get.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from serve_clients import PROMPT, Load

from subquad import LanguageModel, Streams
from subquad.disk import write_whole
from subquad.machine import origin, tell_commit

Figures = dict[str, Any]
TICKS = os.sysconf("SC_CLK_TCK")
ENDING = 6  # seconds to end the streams and the server
SIZES: dict[str, Figures] = {
    "cpu": {
        "model": {"dim": 256, "depth": 6, "heads": 8}, "streams": 200, "answer": 512, "rounds": 12, "seconds": 8.0,
        "minutes": 5.0, "connections": 1000, "prefix": 16_384, "clients": 1,
    },
    "cuda": {
        "model": {"dim": 768, "depth": 12, "heads": 12}, "streams": 1000, "answer": 2048, "rounds": 1, "seconds": 5.0,
        "minutes": 3.0, "connections": 1000, "prefix": 65_536, "clients": 8,
    },
    "tiny": {
        "model": {"dim": 16, "depth": 1, "heads": 2}, "streams": 4, "answer": 16, "rounds": 1, "seconds": 0.5,
        "minutes": 0.02, "connections": 8, "prefix": 600, "clients": 2,
    },
}  # fmt: skip


class Server:
    """A process of `subquad serve`."""

    def __init__(self, folder: Path, device: str, slots: int):
        words = ["serve", str(folder), "--port", "0", "--device", device, "--slots", str(slots), "--queue", "4096"]
        environment = {**os.environ, "COLUMNS": "200"}
        self.device, self.log = device, folder.with_name("server.log")  # a line for each answer
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "subquad.cli", *words], stdout=subprocess.PIPE, stderr=errors, text=True,
                env=environment,
            )  # fmt: skip

    def wait(self) -> None:
        """Until it answers."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline().split()
        if not said:
            self.process.wait()
            raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")
        self.host, _, port = said[-1].removeprefix("http://").rpartition(":")
        self.port = int(port)
        while True:
            try:
                self.stats()
                return
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server ended: {self.log.read_text()[-2000:]}") from None
                time.sleep(0.1)

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

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

    def device_bytes(self) -> int:
        """What all processes hold of the GPU's memory, this one's share included; 0 without a GPU."""
        if self.device == "cpu":
            return 0
        free, whole = torch.cuda.mem_get_info()
        return whole - free

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


class Clients:
    """Processes that keep answers running. Counts are their sums."""

    def __init__(self, processes: list[asyncio.subprocess.Process]):
        self.processes = processes

    @classmethod
    async def of(cls, server: "Server", sizes: Figures) -> "Clients":
        count, streams = sizes["clients"], sizes["streams"]
        words = [sys.executable, str(Path(__file__).with_name("serve_clients.py"))]
        pipe = asyncio.subprocess.PIPE
        processes = [await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe) for _ in range(count)]
        about = {"host": server.host, "port": server.port, "streams": streams, "answer": sizes["answer"]}
        for number, process in enumerate(processes):
            assert process.stdin is not None
            process.stdin.write((json.dumps({**about, "numbers": list(range(number, streams, count))}) + "\n").encode())
        return cls(processes)

    async def counts(self, word: str = "count") -> Figures:
        """What they have seen so far; with the word "stop", all that they will have seen."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{word}\n".encode())
        told = []
        for process in self.processes:
            assert process.stdout is not None
            told.append(json.loads(await process.stdout.readline()))
        summed = {name: sum(one[name] for one in told) for name in ("answers", "events", "started", "failed")}
        return {**summed, "errors": [error for one in told for error in one["errors"]][:3]}

    async def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()  # the end of its input ends a process
            await process.wait()


@asynccontextmanager
async def load_on(server: "Server", sizes: Figures) -> AsyncIterator[Clients]:
    """Keep as many answers running as there are streams; begins once each has got a token."""
    clients = await Clients.of(server, sizes)
    try:
        while (counts := await clients.counts())["started"] < sizes["streams"]:
            if counts["failed"] > sizes["streams"]:
                raise RuntimeError(counts["errors"][0])
            await asyncio.sleep(0.05)
        yield clients
    finally:
        await clients.close()
    while (await asyncio.to_thread(server.stats))["engine"]["running"]:  # until the connections are closed
        await asyncio.sleep(0.05)


class Alone:
    """The same work with `Streams` and no server: as many streams, and a new prompt after each answer."""

    def __init__(self, model: LanguageModel, streams: int, answer: int):
        self.streams, self.answer = Streams(model, slots=streams, capacity=1 << 40, temperature=0.8), answer
        ids = self.streams.admit([list(f"{PROMPT}{number}".encode()) for number in range(streams)], seed=1)
        # so that answers end at different times
        self.left = {id: answer * (number + 1) // streams + 1 for number, id in enumerate(ids)}

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


class Mark(NamedTuple):
    """Where the server and its clients were at a time."""

    at: float
    cpu: float
    tokens: int
    events: int

    @classmethod
    async def of(cls, server: Server, clients: Clients) -> "Mark":
        counts, stats = await clients.counts(), await asyncio.to_thread(server.stats)
        return cls(time.perf_counter(), server.cpu_seconds(), stats["engine"]["tokens"], counts["events"])

    def until(self, later: "Mark") -> Figures:
        took, tokens = later.at - self.at, later.tokens - self.tokens
        return {
            "tokens": tokens, "tokens_per_second": tokens / took,
            "events_per_second": (later.events - self.events) / took,
            "cpu_microseconds_per_token": 1e6 * (later.cpu - self.cpu) / max(tokens, 1),
        }  # fmt: skip


async def beside_streams(server: Server, streams: Alone, sizes: Figures) -> Figures:
    rounds = []
    for _ in range(sizes["rounds"]):
        alone = streams.run(sizes["seconds"])
        async with load_on(server, sizes) as clients:
            begin = await Mark.of(server, clients)
            await asyncio.sleep(sizes["seconds"])
            ours = begin.until(await Mark.of(server, clients))
            errors = (await clients.counts("stop"))["errors"]
        rounds.append({
            "streams": alone, "server": ours, "errors": errors,
            "cpu_ratio": ours["cpu_microseconds_per_token"] / alone["cpu_microseconds_per_token"],
            "tokens_per_second_ratio": ours["tokens_per_second"] / alone["tokens_per_second"],
        })  # fmt: skip
    return {
        "rounds": rounds,
        "cpu_ratio": statistics.median(one["cpu_ratio"] for one in rounds),
        "tokens_per_second_ratio": statistics.median(one["tokens_per_second_ratio"] for one in rounds),
    }


async def soak(server: Server, sizes: Figures, most: float, keep: Callable[[Figures], None]) -> Figures:
    """Memory over minutes of load: its growth is the slope of a line through the last four fifths.

    most  seconds that it may take. What has been measured so far is kept every ten seconds.
    """
    until, samples, kept = time.perf_counter() + most, list[tuple[float, int, int]](), time.perf_counter()
    async with load_on(server, sizes) as clients:
        begin = await Mark.of(server, clients)
        seconds = min(60 * sizes["minutes"], until - begin.at)
        while True:
            await asyncio.sleep(min(1.0, seconds / 20))
            mark = await Mark.of(server, clients)
            samples.append((mark.at - begin.at, server.resident_bytes(), server.device_bytes()))
            ended = mark.at - begin.at >= seconds
            figures = {**begin.until(mark), **_memory(samples), "minutes": (mark.at - begin.at) / 60}
            if ended:
                break
            if mark.at - kept > 10:
                kept = mark.at
                keep(figures)
        counts = await clients.counts("stop")
    return {**figures, "answers": counts["answers"], "errors": counts["failed"], "error": counts["errors"][:1]}


def _memory(samples: Sequence[tuple[float, int, int]]) -> Figures:
    last = samples[len(samples) // 5 :]
    times, bytes, device = zip(*last, strict=True)
    slope = statistics.linear_regression(times, bytes).slope if len(last) > 1 else 0.0
    figures = {
        "resident_bytes": [one[:2] for one in samples[:: max(1, len(samples) // 60)]],
        "growth_bytes_per_minute": 60 * slope, "least": min(bytes), "most": max(bytes),
    }  # fmt: skip
    return figures | ({"device_least": min(device), "device_most": max(device)} if any(device) else {})


async def connections(server: Server, count: int) -> Figures:
    """Many connections at once, each with a short answer."""
    load, begun, cpu = Load(), time.perf_counter(), server.cpu_seconds()
    await asyncio.gather(*(load.ask(server.address, f"{PROMPT}{number}", 16) for number in range(count)))
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
        await load.ask(server.address, text + " one", 1)
        cold += load.first
        for other in (" two", " three", " four"):
            load = Load()
            await load.ask(server.address, text + other, 1)
            cached += load.first
    slow, fast = statistics.median(cold), statistics.median(cached)
    return {"prefix": prefix, "cold_seconds": slow, "cached_seconds": fast, "ratio": fast / slow, "all": [cold, cached]}


async def measure(sections: Sequence[str], sizes: Figures, device: str, out: Path, deadline: float) -> None:
    """Everything is written as soon as it is known; after `deadline` seconds nothing more is measured."""
    begun = time.perf_counter()
    used = [name for name in ("httptools", "uvloop") if find_spec(name)]  # uvicorn uses them where they are installed
    figures: Figures = {
        "kind": "serve", **origin(device), "sizes": sizes, "threads": torch.get_num_threads(), "uvicorn_with": used,
    }  # fmt: skip

    def keep(name: str, found: Any) -> None:
        figures[name] = found
        write_whole(out, (json.dumps(figures, indent=1) + "\n").encode())

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - begun:5.1f} s] {what}", flush=True)

    torch.manual_seed(0)
    model = LanguageModel(vocab=256, mechanism="linear", positions="none", **sizes["model"])
    figures["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        model = (model.bfloat16() if device == "cuda" else model).eval()
        model.save(Path(folder) / "model")
        server = Server(Path(folder) / "model", device, sizes["streams"])

        def give_up() -> None:
            print(f"after {deadline:.0f} s not all was measured; the end of the server's log:", flush=True)
            print(server.log.read_text()[-2000:], flush=True)
            server.process.kill()
            keep("unfinished", True)
            os._exit(1)

        timer = threading.Timer(deadline, give_up)
        timer.daemon = True
        timer.start()
        try:
            if "beside" in sections:
                streams = Alone(model.to(device), sizes["streams"], sizes["answer"])
                streams.run(min(2.0, sizes["seconds"]))
                say("Streams are ready")
            server.wait()
            say(f"the server is ready; beside uvicorn there is {' and '.join(used) or 'nothing'}")
            for section in sections:
                if section == "beside":
                    found = await beside_streams(server, streams, sizes)
                elif section == "soak":
                    most = deadline - (time.perf_counter() - begun) - ENDING
                    found = await soak(server, sizes, most, lambda so_far: keep("soak", so_far))
                elif section == "connections":
                    found = await connections(server, sizes["connections"])
                else:
                    found = await first_tokens(server, sizes["prefix"])
                keep(section, found)
                say(f"{section} {json.dumps({k: v for k, v in found.items() if k != 'resident_bytes'})}")
        except BaseException:
            print(server.log.read_text()[-2000:], flush=True)
            server.process.kill()
            raise
        keep("exit_code", server.stop())
        timer.cancel()
        say("ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sections", default="beside,first_tokens,connections,soak")
    parser.add_argument("--minutes", type=float, help="of the soak")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of each half of a round")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds for everything; shortens the soak")
    parser.add_argument("--commit", help="commit of the measured code, if git does not know it")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    tell_commit(given.commit)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each connection is an open file
    sizes = dict(SIZES["tiny" if given.tiny else given.device])
    sizes |= {
        name: getattr(given, name) for name in ("minutes", "rounds", "seconds") if getattr(given, name) is not None
    }
    known = ("beside", "soak", "connections", "first_tokens")
    if unknown := set(given.sections.split(",")) - set(known):
        parser.error(f"--sections has {', '.join(sorted(unknown))}: accepted are {', '.join(known)}")
    asyncio.run(measure(given.sections.split(","), sizes, given.device, given.out, given.deadline))


if __name__ == "__main__":
    main()
