"""The rules that multiply the state by a matrix, held to a loop over tokens in float64 that is written here."""

import copy
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from subquad.ops import LinearState, linear_attention, linear_attention_step
from subquad.ops.linear import rule_chunked

few = settings(max_examples=8, deadline=None, derandomize=True)

# the rule and the kind of its gate
GATED, DELTA = ("gated", "channel"), ("delta", "none")
RULES = (GATED, DELTA, ("gated_delta", "head"), ("gated_delta", "channel"))
rules = pytest.mark.parametrize(("rule", "gate"), RULES, ids=lambda x: x)


class Call(NamedTuple):
    q: Tensor  # [B, T, H, K]
    k: Tensor
    v: Tensor  # [B, T, H, V]
    log_gate: Tensor | None  # [B, T, H] or [B, T, H, K]
    beta: Tensor | None  # [B, T, H]
    start: LinearState

    def leaves(self) -> list[Tensor]:
        return [x for x in (*self[:5], *self.start) if x is not None]

    def with_gradients(self) -> "Call":
        own = [None if x is None else x.detach().clone().requires_grad_() for x in self[:5]]
        return Call(*own, LinearState(*(x.detach().clone().requires_grad_() for x in self.start)))  # type: ignore[arg-type]

    def to(self, dtype: torch.dtype) -> "Call":
        low = [None if x is None else x.to(dtype) for x in self[:5]]
        wide = torch.promote_types(dtype, torch.float32)
        return Call(*low, LinearState(*(x.to(wide) for x in self.start)))  # type: ignore[arg-type]

    def tokens(self, rows: Any, part: Any, states: Any = None) -> "Call":
        """Some rows over some tokens."""
        states = rows if states is None else states
        cut = [None if x is None else x[rows, part] for x in self[:5]]
        return Call(*cut, LinearState(*(x[states] for x in self.start)))  # type: ignore[arg-type]


def call_of(
    rule: str, gate: str, batch: int = 2, length: int = 7, heads: int = 2, key: int = 3, value: int = 5,
    rows: int | None = None, seed: int = 0,
) -> Call:  # fmt: skip
    """Random inputs with keys of length 1; `rows` states."""
    generator, rows = torch.Generator().manual_seed(seed), batch if rows is None else rows

    def draw(*shape: int, positive: bool = False) -> Tensor:
        make = torch.rand if positive else torch.randn
        return make(shape, generator=generator, dtype=torch.float64)

    q, k, v = (draw(batch, length, heads, width) for width in (key, key, value))
    log_gate = None if gate == "none" else -draw(batch, length, heads, key, positive=True)
    log_gate = log_gate[..., 0].clone() if log_gate is not None and gate == "head" else log_gate
    beta = draw(batch, length, heads, positive=True) if "delta" in rule else None
    start = LinearState(draw(rows, heads, key, value), 1 + draw(rows, heads, key, positive=True))
    return Call(q, F.normalize(k, dim=-1), v, log_gate, beta, start)


def loop(x: Call, normalize: bool = False, eps: float = 1e-6) -> tuple[Tensor, LinearState]:
    """The rule, token by token."""
    s, z, o = x.start.s, x.start.z, []
    for t in range(x.v.shape[1]):
        q, k, v = x.q[:, t], x.k[:, t], x.v[:, t]
        if x.log_gate is not None:
            fade = x.log_gate[:, t].exp()
            fade = fade[..., None] if fade.dim() == 2 else fade  # [B, H, 1 or K]
            s, z = fade[..., None] * s, fade * z
        rest_v, rest_1 = v, torch.ones_like(v[..., 0])
        if x.beta is not None:
            b = x.beta[:, t]
            rest_v = b[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, s))
            rest_1 = b * (1 - torch.einsum("bhk,bhk->bh", k, z))
        s, z = s + k[..., :, None] * rest_v[..., None, :], z + k * rest_1[..., None]
        y = torch.einsum("bhk,bhkv->bhv", q, s)
        if normalize:
            d = torch.einsum("bhk,bhk->bh", q, z)[..., None]
            y = y / torch.where(d < 0, d.clamp(max=-eps), d.clamp(min=eps))
        o.append(y)
    return torch.stack(o, 1), LinearState(s, z if normalize else x.start.z)


def run(x: Call, rule: str, normalize: bool = False, **options: Any) -> tuple[Tensor, LinearState]:
    return linear_attention(
        *x[:3], rule=rule, log_gate=x.log_gate, beta=x.beta, initial_state=x.start, return_state=True,
        feature_map="identity", normalize=normalize, impl="torch", **options,
    )  # fmt: skip


def grads(made: tuple[Tensor, LinearState], leaves: list[Tensor]) -> list[Tensor]:
    weights = torch.Generator().manual_seed(1)
    parts = (made[0], *made[1])
    loss = sum((y * torch.randn(y.shape, generator=weights, dtype=torch.float64).to(y.dtype)).sum() for y in parts)
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def close(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= tolerance * want.detach().abs().max().clamp(min=1)


def same(got: tuple[Tensor, LinearState], want: tuple[Tensor, LinearState], tolerance: float = 1e-9) -> None:
    for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        close(a, b, tolerance)


@pytest.fixture(params=["one segment", "many segments"])
def _tuning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "one segment":
        monkeypatch.setattr(rule_chunked, "SEGMENT", 64)


@pytest.mark.usefixtures("_tuning")
@rules
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 131])
def test_equals_the_loop_over_tokens(rule: str, gate: str, normalize: bool, length: int) -> None:
    x = call_of(rule, gate, length=length)
    if normalize:  # a signed denominator near zero would make every gradient large
        x = x._replace(q=x.q.abs(), k=x.k.abs())
    x = x.with_gradients()
    got, want = run(x, rule, normalize), loop(x, normalize)
    same(got, want)
    for a, b in zip(grads(got, x.leaves()), grads(want, x.leaves()), strict=True):
        close(a, b)
