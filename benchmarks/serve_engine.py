"""The engine of `subquad serve` without HTTP: beside `Streams` alone, with short requests, long prompts and drafts.

    python benchmarks/serve_engine.py --out FILE                   two CPU cores: CPU time; 200 streams of 5M weights
    python benchmarks/serve_engine.py --out FILE --device cuda     a GPU: time; 1,000 streams of 12 layers, width 768
    python benchmarks/serve_engine.py --out FILE --tiny            tiny sizes on the CPU, as a trial

overhead  tokens/s of the engine over those of `Streams` with the same streams, in turns; and with sampling of all kinds
churn     tokens/s while requests end and others begin, with pieces of one prompt or of several prompts in a call
texts     requests with shared prefixes: how many texts differ between alone, together, and with a cache; and how many
          differ from `generate`, which reads the prompt at once, with sampling of all kinds
stall     the longest turn of running streams while a long prompt is read, and a usual turn
prefix    seconds to the first token of a long prompt, cold and with a state that the cache keeps
draft     one stream: tokens/s with a draft model that is always right, and one that never is, over none

Weights are random. On a CPU seconds are CPU time of this process, with one thread.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from subquad import LanguageModel, Sampling, Streams
from subquad.machine import origin, tell_commit
from subquad.models.state import State
from subquad.serve.borders import EARLY, EVERY
from subquad.serve.engine import Engine
from subquad.serve.request import Request
from subquad.studies.results import save

Figures = dict[str, Any]
SIZES: dict[str, Figures] = {
    "cpu": {
        "model": {"dim": 256, "depth": 6, "heads": 8}, "draft": {"dim": 64, "depth": 2, "heads": 2}, "streams": 200,
        "steps": 100, "rounds": 5, "answer": 64, "requests": 600, "texts": 48, "alone": 12, "prefix": 8192,
    },
    "cuda": {
        "model": {"dim": 768, "depth": 12, "heads": 12}, "draft": {"dim": 256, "depth": 2, "heads": 4}, "streams": 1000,
        "steps": 400, "rounds": 5, "answer": 256, "requests": 6000, "texts": 200, "alone": 40, "prefix": 65_536,
    },
    "tiny": {
        "model": {"dim": 16, "depth": 2, "heads": 2}, "draft": {"dim": 8, "depth": 1, "heads": 2}, "streams": 4,
        "steps": 5, "rounds": 1, "answer": 4, "requests": 12, "texts": 8, "alone": 4, "prefix": 1024,
    },
}  # fmt: skip
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(top_k=40, repetition_penalty=1.1),
    Sampling(min_p=0.05),
)


class Book:
    """A prefix cache that keeps everything, on the device."""

    every = EVERY
    early: tuple[int, ...] = EARLY

    def __init__(self) -> None:
        self.states: dict[tuple[str, tuple[int, ...]], State] = {}

    def find(self, tokens: tuple[int, ...], owner: str = "") -> tuple[int, State | None]:
        last = len(tokens) - 1
        for count in sorted({last, *range(self.every, last, self.every), *self.early}, reverse=True):
            if count <= last and (state := self.states.get((owner, tokens[:count]))) is not None:
                return count, state
        return 0, None

    def put(self, tokens: tuple[int, ...], state: State, owner: str = "") -> None:
        self.states[owner, tokens] = state


def clock(model: LanguageModel) -> float:
    if model.device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(256) for _ in range(length))


def filled(model: LanguageModel, sizes: Figures, samplings: Sequence[Sampling]) -> Engine:
    """An engine in which all slots draw."""
    engine, rng = Engine(model, slots=sizes["streams"]), random.Random(0)
    for number in range(sizes["streams"]):
        sampling = samplings[number % len(samplings)]
        engine.submit(Request(prompt=prompt(rng, 20), steps=1 << 30, seed=number, sampling=sampling))
    while engine.stats.queued or engine.stats.prefilling:
        engine.turn()
    return engine


def overhead(model: LanguageModel, sizes: Figures) -> Figures:
    """The same streams step in both, in turns."""
    rng, count = random.Random(0), sizes["streams"]
    streams = Streams(model, slots=count, capacity=1 << 40)
    streams.admit([list(prompt(rng, 20)) for _ in range(count)], seed=list(range(count)))
    engines = {"plain": filled(model, sizes, SAMPLINGS[:1]), "mixed": filled(model, sizes, SAMPLINGS)}
    runs: dict[str, Callable[[], Any]] = {"streams": streams.step} | {name: e.turn for name, e in engines.items()}
    for run in runs.values():
        for _ in range(5):  # captures on a GPU
            run()
    rounds = []
    for _ in range(sizes["rounds"]):
        seconds = {}
        for name, run in runs.items():
            begun = clock(model)
            for _ in range(sizes["steps"]):
                run()
            seconds[name] = (clock(model) - begun) / sizes["steps"]
        rounds.append(seconds)
    return {
        "seconds_per_step": rounds,
        "captured_steps": {name: len(engine.streams.loop.graphs) for name, engine in engines.items()},
        "tokens_per_second": count / statistics.median(one["plain"] for one in rounds),
        "time_over_streams": statistics.median(one["plain"] / one["streams"] for one in rounds),
        "time_over_streams_with_mixed_sampling": statistics.median(one["mixed"] / one["streams"] for one in rounds),
    }


def churn(model: LanguageModel, sizes: Figures) -> Figures:
    """Short requests: as many wait as run, until all are done."""
    figures: Figures = {}
    for abreast in (1, 8):
        engine = Engine(model, slots=sizes["streams"], queue=sizes["requests"], abreast=abreast)
        rng = random.Random(1)
        for number in range(sizes["requests"]):
            answer = rng.randrange(sizes["answer"] // 2, sizes["answer"] * 3 // 2)
            engine.submit(Request(prompt=prompt(rng, rng.randrange(8, 64)), steps=answer, seed=number))
        begun, turns = clock(model), 0
        while engine.stats.queued or engine.stats.prefilling or engine.stats.running:
            engine.turn()
            turns += 1
        seconds, stats = clock(model) - begun, engine.stats
        figures[f"abreast={abreast}"] = {
            "tokens_per_second": stats.tokens / seconds, "requests_per_second": sizes["requests"] / seconds,
            "mean_running": stats.tokens / turns, "turns": turns,
        }  # fmt: skip
    return figures


def texts(model: LanguageModel, sizes: Figures) -> Figures:
    """How many greedy texts differ from those of requests that run alone, one after the other."""
    rng = random.Random(2)
    starts = [prompt(rng, rng.randrange(100, 700)) for _ in range(6)]
    requests = [
        Request(
            prompt=rng.choice(starts) + prompt(rng, rng.randrange(1, 60)),
            steps=sizes["answer"],
            sampling=Sampling(temperature=0),
        )
        for _ in range(sizes["texts"])
    ]

    def run(engine: Engine, chosen: Sequence[Request]) -> list[list[int]]:
        made: dict[int, list[int]] = {engine.submit(request): [] for request in chosen}
        while engine.known:
            for update in engine.turn():
                made[update.number] += [one.token for one in update.drawn]
        return list(made.values())

    figures: Figures = {}
    types = (torch.float32,) if model.device.type == "cpu" else (torch.float32, torch.bfloat16)
    for dtype in types:
        cast = LanguageModel(model.config).to(model.device)
        cast.load_state_dict(model.state_dict())
        for parameter in cast.parameters():  # predictions far from uniform
            parameter.data.mul_(1.5)
        cast = cast.to(dtype).eval()
        for abreast in (1, 8):
            make = partial(Engine, cast, slots=64, abreast=abreast, piece=Book.every)
            together, cached, single = run(make(), requests), run(make(cache=Book()), requests), make()
            alone = [run(single, [request])[0] for request in requests[: sizes["alone"]]]
            mixed = [
                replace(request, sampling=SAMPLINGS[number % len(SAMPLINGS)], seed=number)
                for number, request in enumerate(requests[: sizes["alone"]])
            ]
            generated = [
                cast.generate([one.prompt], one.steps, sampling=one.sampling, seed=[one.seed])[0].tolist()
                for one in mixed
            ]
            figures[f"{dtype}, abreast={abreast}"] = {
                "texts": len(requests), "alone": len(alone),
                "differ_with_the_cache": sum(a != b for a, b in zip(together, cached, strict=True)),
                "mixed_sampling_differs_from_generate": sum(
                    a != b for a, b in zip(run(make(), mixed), generated, strict=True)
                ),
                "differ_alone": sum(a != b for a, b in zip(together, alone, strict=False)),
            }  # fmt: skip
    return figures


def stall(model: LanguageModel, sizes: Figures) -> Figures:
    """Turns while a long prompt is read."""
    engine = filled(model, {**sizes, "streams": max(2, sizes["streams"] // 2)}, SAMPLINGS[:1])
    engine.cancel(min(engine.known))  # its slot is for the long prompt
    engine.turn()

    def turn() -> float:
        begun = clock(model)
        engine.turn()
        return clock(model) - begun

    usual = [turn() for _ in range(20)]
    engine.submit(Request(prompt=prompt(random.Random(3), sizes["prefix"]), steps=1))
    while_reading = [turn()]
    while engine.stats.prefilling:
        while_reading.append(turn())
    return {
        "piece": engine.piece, "usual_seconds": statistics.median(usual), "turns_to_read": len(while_reading),
        "median_seconds": statistics.median(while_reading), "longest_seconds": max(while_reading),
    }  # fmt: skip


def prefix(model: LanguageModel, sizes: Figures) -> Figures:
    """One client."""
    cold: list[float] = []
    cached: list[float] = []
    engine = Engine(model, slots=8, cache=Book())
    for number in range(4):
        start = prompt(random.Random(number), sizes["prefix"])
        for times, last in ((cold, 1), (cached, 2), (cached, 3)):
            begun = clock(model)
            engine.submit(Request(prompt=(*start, last), steps=1))
            while engine.known:
                engine.turn()
            times.append(clock(model) - begun)
    one, other = statistics.median(cold[1:]), statistics.median(cached[2:])  # the first round warms up
    return {"prefix": sizes["prefix"], "cold_seconds": one, "cached_seconds": other, "ratio": other / one}


def draft(model: LanguageModel, sizes: Figures) -> Figures:
    """The right guesses come from a model that is as large, so its time is what a good small one would not take."""
    small = LanguageModel(vocab=256, mechanism="linear", positions="none", **sizes["draft"])
    small = small.to(model.device, model.dtype).eval()
    figures: Figures = {}
    for name, guesser in (("none", None), ("right", model), ("wrong", small)):
        engine = Engine(model, slots=sizes["streams"], draft=guesser)
        engine.submit(
            Request(prompt=prompt(random.Random(4), 100), steps=sizes["steps"], sampling=Sampling(temperature=0))
        )
        for _ in range(2):
            engine.turn()
        begun, before = clock(model), engine.stats.tokens
        while engine.known:
            engine.turn()
        stats = engine.stats
        figures[name] = {
            "tokens_per_second": (stats.tokens - before) / max(clock(model) - begun, 1e-9),
            "drafted": stats.drafted, "accepted": stats.accepted, "steps": stats.steps,
        }  # fmt: skip
    return figures


SECTIONS: dict[str, Callable[[LanguageModel, Figures], Figures]] = {
    "overhead": overhead, "churn": churn, "texts": texts, "stall": stall, "prefix": prefix, "draft": draft,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of all sections but texts")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--commit", help="commit of the measured code, if git does not know it")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    tell_commit(given.commit)
    if unknown := set(given.sections.split(",")) - SECTIONS.keys():
        parser.error(f"--sections has {', '.join(sorted(unknown))}: accepted are {', '.join(SECTIONS)}")
    sizes = SIZES["tiny" if given.tiny else given.device]
    if given.device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LanguageModel(vocab=256, mechanism="linear", positions="none", **sizes["model"])
    model = model.to(given.device, getattr(torch, given.dtype)).eval()
    figures: Figures = {"kind": "serve engine", **origin(given.device), "dtype": given.dtype, "sizes": sizes}
    figures["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    for name in given.sections.split(","):
        figures[name] = SECTIONS[name](model, sizes)
        print(name, figures[name], flush=True)
        save(figures, given.out)


if __name__ == "__main__":
    main()
