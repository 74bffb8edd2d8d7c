"""The kernels of `sampling.draw_next` and `logistic_mixture.draw`.

For the first, one program a row reads the scores once, or twice where all of them matter before. Noise is the hash of
`ops.uniform`. Legend: B rows, V tokens.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from subquad.ops.launch import EARLY, Plan, blocks_of, launch, tile_of
from subquad.ops.uniform_triton import stream_of, uniform

BLOCK, WARPS = 8192, 16  # scores of a row at a time
REGISTERS = 65536 // (32 * WARPS)  # a thread: with more, a program of that many warps does not fit a multiprocessor


@triton.jit
def _log1m(u):
    """log(1 - u), exact also where u is small: the error of the rounded 1 - u cancels."""
    w = 1.0 - u
    near = tl.where(w == 1.0, 1.0, 1.0 - w)
    return tl.where(w == 1.0, -u, tl.log(w) * tl.div_rn(u, near))


@triton.jit
def _gumbel(stream, at):
    return -tl.log(-_log1m(uniform(stream, at)))


@triton.jit
def _scores(
    x, exclude, seen, at, penalty, temperature,
    V: tl.constexpr, EXCLUDE: tl.constexpr, PENALTY: tl.constexpr, TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """sampling.adjust of a block of a row, without filters that need the whole row."""
    y = tl.load(x + at, mask=at < V, other=float("-inf")).to(tl.float32)
    if EXCLUDE:
        y = tl.where(tl.load(exclude + at, mask=at < V, other=0) != 0, float("-inf"), y)
    if PENALTY:
        there = tl.load(seen + at, mask=at < V, other=0) != 0
        y = tl.where(there, tl.where(y > 0.0, tl.div_rn(y, penalty), y * penalty), y)
    if TEMPERATURE:
        y = tl.div_rn(y, temperature)
    return y


@triton.jit
def next_token(
    x, raw, seeds, position, greedy, penalty, temperature, min_p, exclude, seen, stop, token, done, logprob,
    xb, lb, rb, eb, nb,
    V: tl.constexpr, BV: tl.constexpr, NOISE: tl.constexpr, GREEDY: tl.constexpr, EXCLUDE: tl.constexpr,
    PENALTY: tl.constexpr, TEMPERATURE: tl.constexpr, MINP: tl.constexpr, LOGPROB: tl.constexpr, STOP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The drawn token of a row, its log-probability by the raw logits, and whether the row has stopped."""
    b = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BV)
    x += b * xb
    exclude += b * eb
    seen += b * nb
    raw += b * lb
    by = tl.full((), 1.0, tl.float32)
    heat = tl.full((), 1.0, tl.float32)
    if PENALTY:
        by = tl.load(penalty + b * rb).to(tl.float32)
    if TEMPERATURE:
        heat = tl.load(temperature + b * rb).to(tl.float32)
    stream = tl.full((), 0, tl.uint32)
    if NOISE:
        stream = stream_of(tl.load(seeds + b), tl.load(position + b))
    loud = tl.full((), 1, tl.int1)
    if GREEDY:
        loud = tl.load(greedy + b * rb) == 0
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    least = tl.full((), float("-inf"), tl.float32)
    if MINP:
        for v0 in range(0, V, BV):
            y = _scores(x, exclude, seen, v0 + v, by, heat, V, EXCLUDE, PENALTY, TEMPERATURE)
            least = tl.maximum(least, tl.max(y, 0))
        least += tl.load(min_p + b * rb).to(tl.float32)
    best = tl.full((), float("-inf"), tl.float32)
    drawn = tl.full((), 0, tl.int32)
    high = tl.full((), float("-inf"), tl.float32)  # of the raw logits
    mass = tl.full((), 0.0, tl.float32)
    for v0 in range(0, V, BV):
        at = v0 + v
        y = _scores(x, exclude, seen, at, by, heat, V, EXCLUDE, PENALTY, TEMPERATURE)
        if MINP:
            y = tl.where(y < least, float("-inf"), y)
        if NOISE:
            y += tl.where(loud, _gumbel(stream, at), 0.0)
        top = tl.max(y, 0)
        first = tl.min(tl.where(y == top, at, V), 0)
        drawn = tl.where(top > best, first, drawn)
        best = tl.maximum(top, best)
        if LOGPROB:
            z = tl.load(raw + at, mask=at < V, other=float("-inf")).to(tl.float32)
            new = tl.maximum(high, tl.max(z, 0))
            mass = mass * tl.exp(high - new) + tl.sum(tl.exp(z - new), 0)
            high = new
    drawn = tl.minimum(drawn, V - 1).to(tl.int64)
    ended = tl.full((), 0, tl.int1)
    if STOP > 0:
        ended = tl.load(done + b) != 0
    if LOGPROB:
        score = tl.load(raw + drawn).to(tl.float32) - high - tl.log(mass)
        tl.store(logprob + b, tl.where(ended, 0.0, score))
    if STOP > 0:
        drawn = tl.where(ended, tl.load(token + b), drawn)
        for i in tl.static_range(STOP):
            ended = ended | (tl.load(stop + i) == drawn)
        tl.store(done + b, ended)
    tl.store(token + b, drawn)


def draw_next(
    scores: Tensor, logits: Tensor, rows: Any, adjusts: bool, seeds: Tensor, position: Tensor, seen: Tensor | None,
    token: Tensor, done: Tensor, stop: Tensor | None, logprob: Tensor | None,
) -> None:  # fmt: skip
    """`adjusts`: whether the settings of `rows` are still to be applied to the scores."""
    uses, (batch, values) = rows.uses, scores.shape
    exclude = rows.exclude if adjusts and uses.exclude else None
    constants = {
        "V": values, "BV": min(BLOCK, tile_of(values)), "NOISE": uses.noise, "GREEDY": uses.noise and uses.greedy,
        "EXCLUDE": exclude is not None, "PENALTY": adjusts and uses.penalty,
        "TEMPERATURE": adjusts and uses.temperature, "MINP": adjusts and uses.min_p,
        "LOGPROB": logprob is not None, "STOP": 0 if stop is None else len(stop), "EARLY": EARLY,
    }  # fmt: skip
    none = done if seen is None else seen
    tensors = (
        scores, logits, seeds, position, rows.greedy, rows.penalty, rows.temperature, rows.min_p,
        done if exclude is None else exclude, none, token if stop is None else stop, token, done,
        token if logprob is None else logprob,
    )  # fmt: skip
    of_row = 0 if len(rows.greedy) == 1 else 1
    strides = (scores.stride(0), logits.stride(0), of_row, 0 if exclude is None else of_row * values)
    numbers = (*strides, 0 if seen is None else seen.stride(0))
    warps = min(WARPS, max(1, constants["BV"] // 256))
    launch(next_token, tensors, Plan((batch,), numbers, constants, warps, registers=REGISTERS, early=EARLY))


@triton.jit
def mixture(
    x, seeds, position, y, B, least, half,
    C: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """BM rows of [weights, means, log-scales], C each: a component, then a logistic number, then its cell."""
    b = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    c = tl.arange(0, BC)
    stream = stream_of(tl.load(seeds + b, mask=b < B, other=0), tl.load(position + b, mask=b < B, other=0))
    there = (b < B)[:, None] & (c < C)[None, :]
    at = x + b[:, None] * (3 * C) + c[None, :]
    weights = tl.load(at, mask=there, other=float("-inf")).to(tl.float32) + _gumbel(stream[:, None], c[None, :])
    first = tl.min(tl.where(weights == tl.max(weights, 1)[:, None], c[None, :], C - 1), 1)
    mine = x + b * (3 * C) + first
    mean = tl.load(mine + C, mask=b < B, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.load(mine + 2 * C, mask=b < B, other=0.0).to(tl.float32), least)
    u = uniform(stream, tl.full((), C, tl.int32))
    value = mean + tl.exp(scale) * (tl.log(u) - _log1m(u))
    cell = tl.floor((value + 1.0) * half + 0.5)
    tl.store(y + b, tl.minimum(tl.maximum(cell, 0.0), LAST).to(tl.int64), mask=b < B)


def draw_from_mixture(outputs: Tensor, seeds: Tensor, position: Tensor, values: int, least: float) -> Tensor:
    batch, components = outputs.shape[0], outputs.shape[1] // 3
    drawn, wide = torch.empty_like(seeds), tile_of(components)
    rows = max(1, 512 // wide)
    constants = {"C": components, "BC": wide, "BM": rows, "LAST": values - 1}
    plan = Plan((blocks_of(batch, rows),), (batch, least, (values - 1) / 2), constants, warps=4)
    launch(mixture, (outputs, seeds, position, drawn), plan)
    return drawn
