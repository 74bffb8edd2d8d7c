"""How far a mechanism is from the exact softmax attention that it approximates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from subquad.checks import checked
from subquad.mechanisms import MECHANISMS, build
from subquad.mechanisms.base import Mixer
from subquad.mechanisms.checking import check_tokens
from subquad.ops.dense import hide_future

if TYPE_CHECKING:
    from rich.table import Table


@checked
@torch.no_grad()
def approximation_error(mix: Mixer, x: Tensor) -> Tensor:
    """‖A v − softmax(q·k/√K) v‖ / ‖softmax(q·k/√K) v‖ per head [H], with A the mechanism's own weights on x [B, T, D].

    Dense on both sides, so for T of a few thousand at most. ValueError for mechanisms that do not approximate softmax.
    """
    check_tokens(mix, x)
    projected = mix._qkv(x)
    if projected is None:
        raise ValueError(f"{type(mix).__name__} approximates no softmax attention of queries, keys and values")
    q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in projected)
    scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    if mix.options.causal:
        scores = hide_future(scores)
    exact = torch.einsum("bhts,bshv->bhtv", scores.softmax(-1), v)
    ours = torch.einsum("bhts,bshv->bhtv", mix.pattern(x).to(v.dtype), v)
    over = (0, 2, 3)
    return (ours - exact).square().sum(over).sqrt() / exact.square().sum(over).sqrt()


def error_table(name: str, lengths: tuple[int, ...] = (64, 256, 1024)) -> Table:
    """The error at default options on random tokens, untrained: dim 64, 4 heads."""
    from rich.table import Table

    cls = MECHANISMS[name]
    table = Table(title="Distance to exact softmax attention, untrained, random tokens, per head", title_justify="left")
    table.add_column("T")
    table.add_column("relative error")
    for length in lengths:
        torch.manual_seed(0)
        fixed = {"max_length": max(lengths)} if cls.traits.fixed_length else {}
        mix = build(name, dim=64, heads=4, causal=not cls.traits.bidirectional, **fixed).eval()
        error = approximation_error(mix, torch.randn(1, length, 64))
        table.add_row(str(length), "  ".join(f"{e:.3f}" for e in error.tolist()))
    return table
