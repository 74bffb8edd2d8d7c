"""Scores that are not a plain product: relative positions and additive attention, and the mechanisms with them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad.ops.additive import additive_attention
from subquad.ops.relative import relative_attention

from . import mechanism_times
from .bench import DEVICE, Case, Verdict, deterministic, draw, poison

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def compare(fn: Callable[[list[Tensor], Any], Tensor], parts: list[Tensor], names: str) -> Verdict:
    """Values and all gradients of fn(parts, impl), where torch.empty and free memory hold NaN."""

    def run(given: list[Tensor], impl: str) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in given]
        o = fn(leaves, impl)
        return [o.detach(), *torch.autograd.grad(o, leaves, weight.to(o.dtype))]

    found = Verdict()
    weight = torch.randn_like(fn(parts, "torch"), dtype=torch.float32).to(parts[0].dtype)
    with deterministic():
        exact, plain = run([t.double() for t in parts], "torch"), run(parts, "torch")
        poison()
        ours = run(parts, "triton")
    for name, a, p, e in zip(names, ours, plain, exact, strict=True):
        found.compare(name, a, p, e, floor=3e-6 if a.dtype == F32 else 1e-4)
    return found


def relative(
    sizes: tuple[int, int, int, int, int],
    around: tuple[int, int, int],
    dtype: torch.dtype,
    ends: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> Verdict:
    """Sizes B, T, S, H, D; around: how many keys before and after a query count, and the first query's position."""
    (batch, length, keys, heads, width), (before, after, offset) = sizes, around
    parts = [draw(batch, n, heads, width, dtype=dtype) for n in (length, keys, keys)]
    parts += [draw(before + after + 1, heads, width, dtype=dtype), *draw(2, heads, width, dtype=dtype)]
    given = None if ends is None else (torch.tensor(ends[0], device=DEVICE), torch.tensor(ends[1], device=DEVICE))
    first = torch.zeros(batch, device=DEVICE) if given is None else given[0]
    last = torch.full((batch,), keys, device=DEVICE) if given is None else given[1]
    at = torch.arange(length, device=DEVICE) + offset
    seen = torch.maximum(at - before, first[:, None]) < torch.minimum(at + after + 1, last[:, None])

    def fn(t: list[Tensor], impl: Any) -> Tensor:
        o = relative_attention(*t, before=before, offset=offset, ends=given, impl=impl)
        return o.masked_fill(~seen[..., None, None], 0)

    return compare(fn, parts, "oqkvruw")


def additive(
    sizes: tuple[int, int, int, int, int, int], counted: str, dtype: torch.dtype, size: float = 1.0
) -> Verdict:
    """Sizes B, T, S, H, U, V."""
    batch, length, keys, heads, units, width = sizes
    parts = [draw(batch, length, heads, units) * size, draw(batch, keys, heads, units) * size]
    parts += [draw(batch, keys, heads, width), draw(heads, units) / units**0.5]
    parts = [t.to(dtype) for t in parts]
    if counted == "causal":
        counts = (torch.arange(1, length + 1, device=DEVICE) + keys - length).expand(batch, length)
    else:
        rows = 1 if counted == "lengths" else length
        counts = torch.randint(1, keys + 1, (batch, rows), device=DEVICE).expand(batch, length)
    return compare(lambda t, impl: additive_attention(t[0], t[1], t[2], counts, t[3], impl=impl), parts, "oqkvs")


@torch.no_grad()
def mechanism(name: str) -> Verdict:
    """Prefill and steps, and rows of other lengths, against forward in float64."""
    mix, found = subquad.build(name, dim=128, heads=2, causal=True).to(DEVICE), Verdict()
    wide = copy.deepcopy(mix).double()
    x = draw(3, 200, 128)
    y, state = mix.prefill(x[:, :150])
    made = [y]
    for t in range(150, 200):
        y, state = mix.step(x[:, t], state, inplace=t % 2 == 0)
        made.append(y[:, None])
    found.within("steps", torch.cat(made, 1), wide(x.double()), 2e-5)
    lengths = torch.tensor([200, 77, 3], device=DEVICE)
    found.within("lengths", mix(x, lengths=lengths), wide(x.double(), lengths=lengths), 2e-5)
    return found


RELATIVE: list[tuple[Any, ...]] = [
    ((2, 700, 700, 3, 64), (200, 0, 0), B16), ((1, 1000, 1000, 2, 64), (512, 512, 0), B16),
    ((2, 333, 333, 2, 64), (100, 7, 0), F16, ((0, 0), (333, 50))), ((1, 300, 300, 2, 64), (100, 0, 0), F32),
    ((2, 130, 330, 2, 64), (200, 0, 200), B16, ((200, 50), (330, 330))), ((1, 500, 500, 2, 40), (64, 3, 0), B16),
    ((1, 400, 400, 2, 128), (130, 0, 0), B16), ((1, 400, 400, 1, 256), (130, 0, 0), B16),
    ((1, 300, 300, 1, 128), (70, 20, 0), F32), ((1, 200, 200, 1, 96), (70, 0, 0), F16),
    ((1, 5, 5, 2, 16), (900, 0, 0), B16), ((4, 3000, 3000, 8, 64), (512, 0, 0), B16),
]  # fmt: skip
ADDITIVE: list[tuple[Any, ...]] = [
    ((2, 300, 300, 2, 64, 64), "causal", B16), ((1, 600, 600, 2, 64, 64), "lengths", B16),
    ((2, 300, 300, 2, 64, 64), "causal", F16), ((2, 300, 300, 2, 64, 64), "any", F32),
    ((1, 200, 500, 1, 3, 16), "causal", F32), ((1, 150, 150, 2, 100, 40), "any", B16),
    ((1, 300, 300, 1, 64, 256), "causal", B16), ((1, 300, 300, 2, 64, 64), "causal", B16, 10.0),
    ((1, 200, 200, 1, 64, 64), "any", F32, 30.0), ((1, 1, 300, 2, 64, 64), "any", B16),
    ((4, 1100, 1100, 8, 64, 64), "causal", B16),
]  # fmt: skip
CHECKS = [
    *(Case("scores", relative, given) for given in RELATIVE),
    *(Case("scores", additive, given) for given in ADDITIVE),
    *(Case("scores", mechanism, (name,)) for name in ("additive", "transformer_xl", "compressed", "fixed")),
]
NAMES = ("transformer_xl", "compressed", "fixed", "mixed", "synthesizer", "gmlp")
TIMES = [
    Case("scores", mechanism_times.training, (name, length, causal))
    for length, names in ((4096, ("additive",)), (16384, NAMES), (65536, NAMES[:3]))
    for causal in (True, False)
    for name in names
]
