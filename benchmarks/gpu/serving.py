"""Texts of the serving engine, with the prefix cache and a draft model, and the time of its turns.

`serve_engine.py` and `serve_http.py` measure the engine and the server under load.
"""

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from subquad import LanguageModel, Sampling
from subquad.models.state import positions
from subquad.serve.cache import PrefixCache
from subquad.serve.engine import Engine
from subquad.serve.reading import Reader, record
from subquad.serve.request import Request

from .bench import DEVICE, Case, Figures, Verdict, alone

GREEDY = Sampling(temperature=0)
SAMPLINGS = (
    Sampling(), GREEDY, Sampling(temperature=0.8, top_p=0.9), Sampling(top_k=40, repetition_penalty=1.1),
    Sampling(min_p=0.05),
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "linear": {"mechanism": "linear"},
    "taps": {"mechanism": ["linear", "linear", ["local", {"window": 64, "rotary": True}]], "taps": (1, 2, 3)},
    "gated_deltanet": {"mechanism": "gated_deltanet"},
    "softmax": {"mechanism": "softmax", "positions": "rotary"},
}


def linearised(dtype: torch.dtype) -> Any:
    """A Llama of transformers with grouped queries, of which two layers in three are linear."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import subquad.hf

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    subquad.hf.replace(model, [0], "gated_deltanet", expand_v=1)
    subquad.hf.replace(model, [2], "linear", exact_window=64)
    return subquad.hf.Decoder(model.to(DEVICE, dtype).eval())


def make_model(name: str, dtype: torch.dtype, **more: Any) -> Any:
    if name == "linearised":
        return linearised(dtype)
    torch.manual_seed(0)
    model = LanguageModel(vocab=256, dim=256, depth=3, heads=4, **{"positions": "none", **MODELS[name], **more})
    with torch.no_grad():
        for parameter in model.parameters():  # predictions far from uniform
            parameter.mul_(1.5)
    return model.to(DEVICE, dtype).eval()


def prompts(count: int) -> list[tuple[int, ...]]:
    """Prompts that share four beginnings."""
    rng = random.Random(2)

    def drawn(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(256) for _ in range(rng.randrange(least, most)))

    starts = [drawn(250, 700) for _ in range(4)]
    return [rng.choice(starts) + drawn(1, 60) for _ in range(count)]


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    made: dict[int, list[int]] = {engine.submit(one): [] for one in requests}
    while engine.known:
        for update in engine.turn():
            made[update.number] += [drawn.token for drawn in update.drawn]
            if update.end == "error":
                raise RuntimeError(update.error)
    return list(made.values())


def texts(name: str, dtype: torch.dtype, count: int = 40) -> Verdict:
    """Greedy texts do not depend on the cache or on other requests, and drawn ones are those of `generate`."""
    model, found = make_model(name, dtype), Verdict()

    def engine(cache: PrefixCache | None = None) -> Engine:
        return Engine(model, slots=32, capacity=1024, cache=cache)

    requests = [Request(prompt=prompt, steps=32, sampling=GREEDY) for prompt in prompts(count)]
    plain, cache = run(engine(), requests), PrefixCache.of(model, 1 << 30)
    results = {"with the cache": run(engine(cache), requests), "all kept": run(engine(cache), requests)}
    results["evicting"] = run(engine(PrefixCache.of(model, 3 * cache.bytes // 4)), requests)
    single = engine()
    results["alone"] = [run(single, [one])[0] for one in requests[:8]]
    if name in MODELS:
        found.expect("pieces of prompts are recorded", any(single.reader.recorded.values()))
    bar = 0.0 if dtype == torch.float32 else 0.1  # in 16 bits a draw may flip
    for label, made in results.items():
        differ = sum(a != b for a, b in zip(plain, made, strict=False))
        found.bound(label, differ / len(made), bar)
    mixed = [
        Request(
            prompt=one.prompt, steps=32, sampling=SAMPLINGS[n % len(SAMPLINGS)], seed=n,
            logprobs=5 if n % 7 == 3 else None,
        )
        for n, one in enumerate(requests[:20])
    ]  # fmt: skip
    generated = [model.generate([m.prompt], m.steps, sampling=m.sampling, seed=[m.seed])[0].tolist() for m in mixed]
    differ = sum(a != b for a, b in zip(run(engine(), mixed), generated, strict=True))
    found.bound("from generate", differ / len(mixed), bar)
    return found


def drafts(norm: str) -> Verdict:
    """Greedy text with a draft model, right or wrong, is that without one."""
    model, found = make_model("linear", torch.float32), Verdict()
    requests = [Request(prompt=prompt, steps=40, sampling=GREEDY) for prompt in prompts(3)]
    drafted = run(Engine(model, slots=4, draft=make_model("linear", torch.float32, norm=norm)), requests)
    found.expect("the same text", drafted == run(Engine(model, slots=4), requests))
    return found


def large() -> Any:
    torch.manual_seed(0)
    model = LanguageModel(vocab=256, mechanism="linear", positions="none", dim=768, depth=12, heads=12)
    return model.to(DEVICE, torch.bfloat16).eval()


def milliseconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begun)


def cache_times() -> Figures:
    """How long keeping a state in host memory holds the engine up, and finding it."""
    model = large()
    cache, state = PrefixCache.of(model, 4 << 30), model.init_state(1)
    tokens, puts, finds = tuple(n % 256 for n in range(256 * 80)), [], []
    for n in range(1, 81):
        for position in positions(state):
            position.fill_(256 * n)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        cache.put(tokens[: 256 * n], state)  # copies go on behind it
        puts.append(1000 * (time.perf_counter() - begun))
    for n in range(1, 60):
        finds.append(milliseconds(partial(cache.find, tokens[: 256 * n + 5])))
    return {
        "put_ms": statistics.median(puts), "longest_put_ms": max(puts),
        "find_ms": statistics.median(finds), "longest_find_ms": max(finds),
    }  # fmt: skip


@torch.no_grad()
def turn_times(streams: int = 1000, turns: int = 50) -> Figures:
    """Where a turn of many streams goes: a captured graph, `Streams.step` around it, the engine's turn around that."""
    engine = Engine(large(), slots=streams)
    for n in range(streams):
        prompt = (*b"It was a dark night, and ", n % 256)
        engine.submit(Request(prompt=prompt, steps=1 << 30, seed=n))

    def admit() -> None:
        while engine.stats.queued or engine.stats.prefilling:
            engine.turn()

    def repeat(call: Callable[[], object]) -> None:
        for _ in range(turns):
            call()

    with alone():
        found: Figures = {"admitted_ms": milliseconds(admit)}
        for _ in range(8):
            engine.turn()
        loop = engine.streams.loop
        runs: dict[str, Callable[[], object]] = {
            "graph_ms": lambda: list(loop.advance(1)), "step_ms": engine.streams.step, "turn_ms": engine.turn,
        }  # fmt: skip
        for name, call in runs.items():
            found[name] = milliseconds(partial(repeat, call)) / turns
    return found


@torch.no_grad()
def reading_times(rows: int = 8, width: int = 32, count: int = 50) -> Figures:
    """Reading the ends of a few prompts: kernel by kernel, and recorded."""
    model = large()
    tokens = torch.randint(256, (rows, width), device=DEVICE)
    lengths, state, found = torch.full((rows,), width, device=DEVICE), model.init_state(rows), Figures()
    for name, reader in (("launched_ms", Reader(model)), ("recorded_ms", Reader(model, record))):

        def read(reader: Reader = reader) -> None:
            for _ in range(count):
                reader.read(tokens, lengths, state, False)

        read()
        with alone():
            found[name] = milliseconds(read) / count
    return found


CHECKS = [
    *(Case("serving", texts, (name, torch.float32)) for name in (*MODELS, "linearised")),
    Case("serving", texts, ("linear", torch.bfloat16)),
    *(Case("serving", drafts, (norm,)) for norm in ("layer", "rms")),
]
TIMES = [Case("serving", turn_times), Case("serving", reading_times), Case("serving", cache_times)]
