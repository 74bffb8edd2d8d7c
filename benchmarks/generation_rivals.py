"""The rivals of linear attention: our own softmax with a cache, softmax that recomputes the prefix, an LSTM.

Each runs at the batch of linear attention and at the largest batch that makes it faster. Softmax steps cost more at
later positions, LSTM steps always cost the same: both are timed at some positions and integrated; the JSON says where.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from subquad.models import LanguageModel, logistic_mixture
from subquad.models.footprint import largest_batch
from subquad.studies.generation import MODELS, START, Figures, measure, paper_model

PAPER = {"mnist": {"softmax": 7.56, "recompute": 0.45}, "cifar10": {"softmax": 0.32, "recompute": 0.004}}
EQUAL = {"mnist": 10240, "cifar10": 2048}  # streams whose cache fits into an H200
Attempt = Callable[[str, Callable[[], Figures]], Figures]


def rivals(
    name: str,
    attempt: Attempt,
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    equal: int | None = None,
    most: int | None = None,
    compiled: bool = False,
    lstm_steps: int = 256,
) -> Figures:
    length, equal = MODELS[name]["length"], equal or EQUAL[name]
    model = paper_model(name, "softmax", device=device, dtype=dtype)
    most = most or int(0.9 * largest_batch(model, length)) // 64 * 64
    spots = [0, length // 4, length // 2, 3 * length // 4, length - 16]
    cache: Figures = {}
    for batch in sorted({min(256, equal), equal, most}):
        cache[str(batch)] = attempt(
            f"{name} softmax with a cache, batch {batch}", partial(with_cache, model, batch, length, spots)
        )
    if compiled:
        cache[f"{equal}, compiled"] = attempt(
            f"{name} softmax with a cache, batch {equal}, compiled",
            partial(with_cache, model, equal, length, spots, compile=True),
        )
    again: Figures = {}
    for batch in sorted({max(1, equal // 128), equal}):
        again[str(batch)] = attempt(
            f"{name} softmax recomputing the prefix, batch {batch}", partial(recompute, model, batch, length)
        )
    recurrent: Figures = {}
    weights = sum(p.numel() for p in model.parameters())
    for batch in sorted({equal, 32 * equal if name == "cifar10" else 8 * equal}):
        recurrent[str(batch)] = attempt(
            f"{name} LSTM of equal size, batch {batch}", partial(lstm, name, batch, device, dtype, lstm_steps, weights)
        )
    tables = {"softmax with a cache": cache, "softmax that recomputes": again, "LSTM": recurrent}
    return {"equal_batch": equal, "largest_batch_of_the_cache": most, "tables": tables, "paper": PAPER[name]}


def with_cache(model: LanguageModel, batch: int, length: int, spots: Sequence[int], compile: bool = False) -> Figures:
    """A captured loop of flash decoding, and how fast it reads the cache at its end."""
    row = measure(model, batch, length, compile=compile, unroll=8, at=spots, steps=16)
    config = model.config.transformer
    read = 2 * (length - 8) * config.dim * model.head.weight.element_size() * config.depth * batch  # type: ignore[union-attr]
    row["terabytes_of_cache_per_second_at_the_end"] = read / row["milliseconds_at"][-1] / 1e9
    return row


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def recompute(model: LanguageModel, batch: int, length: int) -> Figures:
    """Forward over the prefix for each new pixel, like the paper's baseline; timed at some lengths, integrated."""
    device = model.device.type
    spots, times = [1, length // 4, length // 2, 3 * length // 4, length], []
    seeds = torch.arange(batch, device=device)
    for n in spots:
        tokens = torch.randint(256, (batch, n), device=device)
        for _ in range(2):  # the first is not counted
            wait(device)
            begun = time.perf_counter()
            outputs = model.head(model.transformer(model.embedding(tokens))[:, -1])  # type: ignore[misc]
            logistic_mixture.draw(outputs, seeds, torch.full_like(seeds, n))
            wait(device)
            spent = time.perf_counter() - begun
        times.append(spent)
    total = float(torch.trapezoid(torch.tensor(times), torch.tensor(spots, dtype=torch.float32)))
    return {
        "batch": batch,
        "length": length,
        "sequences_per_second": batch / total,
        "milliseconds_per_step": 1000 * total / length,
        "milliseconds_at": [1000 * spent for spent in times],
        "timed": f"prefixes of {spots} tokens, integrated",
        "preparation_seconds": 0.0,
    }


class Lstm(nn.Module):
    """Layers of width 512: 2.1 million weights each, 3 for 8 layers of the transformer, 6 for 16."""

    def __init__(self, layers: int, width: int = 512):
        super().__init__()
        self.embedding = nn.Embedding(START + 1, width)
        self.gates = nn.ModuleList(nn.Linear(2 * width, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, 30)


def cell(gates: Tensor, memory: Tensor, hidden: Tensor) -> None:
    """The work of an LSTM layer except its matrix product."""
    i, f, g, o = gates.float().chunk(4, -1)
    memory.copy_(f.sigmoid() * memory + i.sigmoid() * g.tanh())
    hidden.copy_(o.sigmoid() * memory.tanh())


def pick(outputs: Tensor, seeds: Tensor, position: Tensor, token: Tensor) -> None:
    position.add_(1)
    token.copy_(logistic_mixture.draw(outputs, seeds, position))


@torch.no_grad()
def lstm(name: str, batch: int, device: str, dtype: torch.dtype, steps: int, weights: int) -> Figures:
    """Captured; the elementwise parts are compiled once for all batches and layers."""
    length, layers, width = MODELS[name]["length"], max(1, 3 * MODELS[name]["depth"] // 8), 512
    begun = time.perf_counter()
    model = Lstm(layers).to(device, dtype)
    h = [torch.zeros(batch, width, device=device, dtype=dtype) for _ in range(layers)]
    c = [torch.zeros(batch, width, device=device) for _ in range(layers)]
    token = torch.full((batch,), START, device=device)
    seeds, position = torch.arange(batch, device=device), torch.zeros(batch, dtype=torch.int64, device=device)
    fast_cell, fast_pick = torch.compile(cell, dynamic=True), torch.compile(pick, dynamic=True)

    def step() -> None:
        x = model.embedding(token)
        for gates, hidden, memory in zip(model.gates, h, c, strict=True):
            fast_cell(gates(torch.cat((x, hidden), -1)), memory, hidden)
            x = hidden
        fast_pick(model.head(x), seeds, position, token)

    for _ in range(3):
        step()
    run: Callable[[], object] = step
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    wait(device)
    prepared, begun = time.perf_counter() - begun, time.perf_counter()
    for _ in range(steps):
        run()
    wait(device)
    total = (time.perf_counter() - begun) * length / steps
    return {
        "batch": batch,
        "length": length,
        "sequences_per_second": batch / total,
        "milliseconds_per_step": 1000 * total / length,
        "timed": f"{steps} steps, which all cost the same",
        "preparation_seconds": prepared,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_of_the_transformer": weights,
    }
