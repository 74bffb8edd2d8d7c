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
from tests.mechanisms.peers import fla_naive

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
        return Call._make([*own, LinearState(*(x.detach().clone().requires_grad_() for x in self.start))])

    def to(self, dtype: torch.dtype) -> "Call":
        low = [None if x is None else x.to(dtype) for x in self[:5]]
        wide = torch.promote_types(dtype, torch.float32)
        return Call._make([*low, LinearState(*(x.to(wide) for x in self.start))])

    def tokens(self, rows: Any, part: Any, states: Any = None) -> "Call":
        """Some rows over some tokens."""
        states = rows if states is None else states
        cut = [None if x is None else x[rows, part] for x in self[:5]]
        return Call._make([*cut, LinearState(*(x[states] for x in self.start))])


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


def run(x: Call, rule: Any, normalize: bool = False, **options: Any) -> tuple[Tensor, LinearState]:
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
    if got.numel() > 0:
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


@rules
@pytest.mark.parametrize("kind", ["whole", "padded", "packed"])
def test_gradients_of_first_and_second_order(rule: str, gate: str, kind: str) -> None:
    x = call_of(rule, gate, 1 if kind == "packed" else 2, 5, 1, 2, 2, rows=3 if kind == "packed" else None)
    options: dict[str, Any] = {}
    if kind == "padded":
        options["lengths"] = torch.tensor([3, 5])
    if kind == "packed":
        options["cu_seqlens"] = torch.tensor([0, 3, 3, 5])
    x = x.with_gradients()
    given = [i for i, y in enumerate(x[:5]) if y is not None]

    def work(s: Tensor, z: Tensor, *tokens: Tensor) -> tuple[Tensor, ...]:
        own: list[Any] = [None] * 5
        for i, y in zip(given, tokens, strict=True):
            own[i] = y
        o, end = run(Call._make([*own, LinearState(s, z)]), rule, True, eps=1e-2, **options)
        return o, *end

    leaves = [*x.start, *(y for y in x[:5] if y is not None)]
    assert torch.autograd.gradcheck(work, leaves, fast_mode=kind != "whole")
    assert torch.autograd.gradgradcheck(work, leaves, fast_mode=True)
    of_func = torch.func.grad(lambda *x: sum(y.square().sum() for y in work(*x)), tuple(range(len(leaves))))(*leaves)
    of_op = torch.autograd.grad([y.square().sum() for y in work(*leaves)], leaves)
    for a, b in zip(of_func, of_op, strict=True):
        close(a, b)


@rules
@pytest.mark.parametrize("normalize", [False, True])
def test_the_plain_expression_equals_the_operator_over_several_chunks(rule: str, gate: str, normalize: bool) -> None:
    x = call_of(rule, gate, length=71)
    x = x._replace(q=x.q.abs(), k=x.k.abs()) if normalize else x
    want, got = run(x, rule, normalize), torch.func.vjp(lambda q: run(x._replace(q=q), rule, normalize), x.q)[0]
    same(got, want)


@few
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    extra=st.integers(0, 5),
    rule=st.sampled_from(RULES),
    filling=st.sampled_from([torch.nan, 3.0, -1e30]),
)
def test_padding_is_invisible(lengths: list[int], extra: int, rule: tuple[str, str], filling: float) -> None:
    batch, length = len(lengths), max(1, max(lengths) + extra)
    x = call_of(*rule, batch, length)
    padding = torch.arange(length) >= torch.tensor(lengths)[:, None]
    for y in x[:5]:
        if y is not None:
            y[padding] = filling
    x = x.with_gradients()
    got = run(x, rule[0], lengths=torch.tensor(lengths))
    assert not got[0][padding].any()
    do = torch.ones_like(got[0])
    do[padding] = torch.nan  # nor does it matter what comes back for padded outputs
    made = torch.autograd.grad((got[0], got[1].s), x.leaves()[:-1], (do, torch.ones_like(got[1].s)))
    for g in made[:-1]:
        assert not g[padding].any()
    assert all(g.isfinite().all() for g in made)
    for b, n in enumerate(lengths):
        own = x.tokens(slice(b, b + 1), slice(0, n))
        alone = loop(own) if n else (got[0][b : b + 1, :0], own.start)
        same((got[0][b : b + 1, :n], LinearState(*(y[b : b + 1] for y in got[1]))), alone)


@few
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=5).filter(any),
    rule=st.sampled_from(RULES),
    normalize=st.booleans(),
)
def test_a_pack_equals_its_sequences(lengths: list[int], rule: tuple[str, str], normalize: bool) -> None:
    ends = [0, *itertools.accumulate(lengths)]
    x = call_of(*rule, 1, ends[-1], rows=len(lengths))
    x = x._replace(q=x.q.abs(), k=x.k.abs()).with_gradients()
    got = run(x, rule[0], normalize, cu_seqlens=torch.tensor(ends))
    parts = []
    for n, (a, b) in enumerate(itertools.pairwise(ends)):
        own = x.tokens(slice(None), slice(a, b), slice(n, n + 1))
        parts.append(loop(own, normalize) if a < b else (x.v[:, :0], own.start))
    want = (
        torch.cat([o for o, _ in parts], 1),
        LinearState(*(torch.cat(y) for y in zip(*(s for _, s in parts), strict=True))),
    )
    same(got, want)
    for a_, b_ in zip(grads(got, x.leaves()), grads(want, x.leaves()), strict=True):
        close(a_, b_)


@few
@given(cut=st.integers(1, 149), rule=st.sampled_from(RULES), normalize=st.booleans())
def test_two_halves_with_the_state_carried_equal_the_whole(cut: int, rule: tuple[str, str], normalize: bool) -> None:
    x = call_of(*rule, length=150)
    x = x._replace(q=x.q.abs(), k=x.k.abs())
    whole = run(x, rule[0], normalize)
    a, middle = run(x.tokens(slice(None), slice(0, cut)), rule[0], normalize)
    b, end = run(x.tokens(slice(None), slice(cut, None))._replace(start=middle), rule[0], normalize)
    same((torch.cat((a, b), 1), end), whole)


def one_step(x: Call, t: int, now: LinearState, rule: str, **options: Any) -> tuple[Tensor, LinearState]:
    q, k, v, log_gate, beta = (None if y is None else y[:, t] for y in x[:5])
    assert q is not None
    assert k is not None
    assert v is not None
    return linear_attention_step(
        q, k, v, now, rule=rule, log_gate=log_gate, beta=beta, feature_map="identity", **options
    )  # fmt: skip


@rules
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
def test_steps_equal_the_whole(rule: str, gate: str, normalize: bool, inplace: bool) -> None:
    x = call_of(rule, gate, length=9)
    now, whole, rows = copy.deepcopy(x.start), run(x, rule, normalize), []
    for t in range(9):
        before = copy.deepcopy(now)
        o, after = one_step(x, t, now, rule, normalize=normalize, inplace=inplace)
        if inplace:
            assert after.s.data_ptr() == now.s.data_ptr()
            assert after.z.data_ptr() == now.z.data_ptr()
        else:
            assert torch.equal(now.s, before.s)
            assert torch.equal(now.z, before.z)
        rows.append(o)
        now = after
    same((torch.stack(rows, 1), now), whole)


@rules
def test_a_step_has_gradients(rule: str, gate: str) -> None:
    x = call_of(rule, gate, length=1).with_gradients()
    whole = run(x, rule)
    o, end = one_step(x, 0, x.start, rule, normalize=False)
    for a, b in zip(grads((o[:, None], end), x.leaves()), grads(whole, x.leaves()), strict=True):
        close(a, b)


def largest_block(work: Callable[[], object]) -> int:
    """The most bytes that one operation takes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    return max(event.self_cpu_memory_usage for event in profile.events())


@rules
def test_a_step_in_place_makes_no_second_state(rule: str, gate: str) -> None:
    x = call_of(rule, gate, length=1, key=32, value=32).to(torch.float32)
    state = x.start.s.numel() * 4
    assert largest_block(lambda: one_step(x, 0, x.start, rule, normalize=True, inplace=True)) <= state / 4
    assert largest_block(lambda: one_step(x, 0, x.start, rule, normalize=True)) >= state


@rules
def test_memory_is_linear(rule: str, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_chunked, "SEGMENT", 64)

    def largest(length: int, rows: int = 1, **options: Tensor) -> int:
        x = call_of(rule, gate, 1, length, 1, 4, 4, rows=rows).to(torch.float32).with_gradients()
        return largest_block(lambda: run(x, rule, **options)[0].sum().backward())

    assert largest(512) <= 4.5 * largest(128)
    short, long = (largest(n, rows=2, cu_seqlens=torch.tensor([0, 10, n])) for n in (128, 512))
    assert long <= 4.5 * short


@rules
def test_a_hundred_thousand_tokens(rule: str, gate: str) -> None:
    """In float64 the chunks are exact, as the tests above show, so that float32 is held to them."""
    x = call_of(rule, gate, 1, 100_000, 1, 4, 4)
    if x.log_gate is not None:
        x.log_gate.mul_(1e-3)
    want = run(x, rule)
    x = x.to(torch.float32).with_gradients()
    got = run(x, rule)
    same((got[0].double(), LinearState(*(y.double() for y in got[1]))), want, 1e-5)
    assert all(g.isfinite().all() for g in grads(got, x.leaves()))


@rules
def test_a_gate_of_minus_infinity_forgets_everything(rule: str, gate: str) -> None:
    if gate == "none":
        pytest.skip("this rule has no gate")
    x = call_of(rule, gate, length=100)
    assert x.log_gate is not None
    x.log_gate[:, 50] = -torch.inf
    x.log_gate[:, 80] = -1e4
    x = x.with_gradients()
    got, want = run(x, rule), loop(x)
    same(got, want)
    empty = x.tokens(slice(None), slice(80, None))._replace(start=LinearState(*map(torch.zeros_like, x.start)))
    close(got[0][:, 80:], loop(empty)[0])
    for a, b in zip(grads(got, x.leaves()), grads(want, x.leaves()), strict=True):
        close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [-1e4, -30.0, -20000.0])
@rules
def test_strong_gates_keep_the_precision_of_the_weak_ones_after_them(
    rule: str, gate: str, size: float, dtype: torch.dtype
) -> None:
    if gate == "none":
        pytest.skip("this rule has no gate")
    x = call_of(rule, gate, length=128)
    assert x.log_gate is not None
    x.log_gate.mul_(0.01)
    x.log_gate[:, 3:40:7] = size
    if gate == "channel":
        x.log_gate[:, 4:40:7, :, 0] = size
    gates = x.log_gate.float()
    low = x.to(dtype)._replace(log_gate=gates)
    want = loop(low.to(torch.float64)._replace(log_gate=gates.double()))
    close(run(low, rule)[0].double(), want[0], 1e-5 if dtype == torch.float32 else 1e-2)


@rules
@pytest.mark.parametrize("decay", ["near 1", "near 0 now and then", "near 0"])
def test_bfloat16_is_finite_and_within_twice_the_plain_error(rule: str, gate: str, decay: str) -> None:
    """The hardest case of a delta rule: the same key over and over, with β = 1."""
    if gate == "none" and decay != "near 1":
        pytest.skip("this rule has no gate")
    x = call_of(rule, gate, 1, 1100 if decay == "near 1" else 260, 1, 8, 8)
    x = x._replace(k=x.k[:, :1].expand_as(x.k), beta=None if x.beta is None else torch.ones_like(x.beta))
    if x.log_gate is not None:
        x.log_gate.fill_(-30.0 if decay == "near 0" else -1e-6)
        if decay == "near 0 now and then":
            x.log_gate[:, 20::100], x.log_gate[:, 50::100], x.log_gate[:, 99::100] = -torch.inf, -1e4, -30.0
    low = x.to(torch.bfloat16).with_gradients()
    exact = low.to(torch.float64).with_gradients()
    want = loop(exact)
    wanted = [want[0], want[1].s, *grads(want, exact.leaves())]
    plain_start = low._replace(start=LinearState(*(y.bfloat16() for y in low.start)))
    made = []
    for o, end in (run(low, rule), loop(plain_start)):
        made.append([o, end.s, *grads((o, end), low.leaves())])
    for i, (ours, plain, truth) in enumerate(zip(*made, wanted, strict=True)):
        assert ours.isfinite().all()
        mine, yardstick = ((y.double() - truth).abs().mean() for y in (ours, plain))
        # the gradients of gates are differences of float32 numbers, so that one of exp(-30) is lost in their rounding
        rounding = 1e-6 if i == 5 and x.log_gate is not None else 0
        assert mine <= 2 * yardstick + rounding


@rules
def test_threads_share_the_heads_and_change_nothing(rule: str, gate: str) -> None:
    x = call_of(rule, gate, 3, 300, 4).to(torch.float32).with_gradients()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made = run(x, rule)
            results.append([made[0], *grads(made, x.leaves())])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-5)


@rules
def test_strides_do_not_matter(rule: str, gate: str) -> None:
    x = call_of(rule, gate, length=70).with_gradients()
    other = x.with_gradients()
    turned = [None if y is None else y.transpose(0, 2).contiguous().transpose(0, 2) for y in other[:5]]
    a, b = run(Call._make([*turned, other.start]), rule), run(x, rule)
    same(a, b, 0)
    for g, h in zip(grads(a, other.leaves()), grads(b, x.leaves()), strict=True):
        close(g, h, 0)


@rules
def test_checkpointing_and_autocast(rule: str, gate: str) -> None:
    x = call_of(rule, gate, length=80).to(torch.float32).with_gradients()
    want = grads(run(x, rule), x.leaves())

    def work(*tokens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        o, end = run(Call._make([*tokens[:5], LinearState._make(tokens[5:])]), rule)
        return o, *end

    o, s, z = checkpoint(work, *x[:5], *x.start, use_reentrant=False)
    for a, b in zip(grads((o, LinearState(s, z)), x.leaves()), want, strict=True):
        assert torch.equal(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(x, rule)[0]
        step = one_step(x, 0, x.start, rule)[0]
        made = grads(run(x, rule), x.leaves())
    assert torch.equal(inside, run(x, rule)[0])
    assert torch.equal(step, one_step(x, 0, x.start, rule)[0])
    for a, b in zip(made, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it loads its compiler
@rules
def test_compiles_without_a_graph_break(rule: str, gate: str) -> None:
    torch._dynamo.reset()
    x = call_of(rule, gate, length=80).to(torch.float32).with_gradients()
    lengths = torch.tensor([80, 17])

    def work(x: Call) -> Tensor:
        o, end = run(x, rule, lengths=lengths)
        step, end = one_step(x, 0, end, rule, normalize=False)
        return o.square().sum() + step.square().sum() + end.s.sum()

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    got, want = compiled(x), work(x)
    close(got, want, 1e-5)
    leaves = x.leaves()[:-1]  # z does not matter without normalize
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        close(a, b, 1e-4)


@rules
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_registered_operators_are_sound(rule: str, gate: str, kind: str) -> None:
    x = call_of(rule, gate, 1, 80).with_gradients()
    lengths, cu = (torch.tensor([70]), None) if kind == "padded" else (None, torch.tensor([0, 80]))
    given = (*x[:5], lengths, cu, x.start.s)
    forward, backward = torch.ops.subquad.linear_attention_rule, torch.ops.subquad.linear_attention_rule_backward
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(forward.default, (*given, False, "torch", True), test_utils=tests)
    done = [y.detach() for y in forward(*given, False, "torch", True)]
    detached = [None if y is None else y.detach() for y in given]
    arguments = (torch.ones_like(done[0]), torch.ones_like(done[1]), *detached, "torch", *done)
    torch.library.opcheck(backward.default, arguments, test_utils=tests[:2])


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_equals_the_equations_of_onnx(rule: Any, gate: str) -> None:
    """LinearAttention of opset 27: S of [d_k, d_v], o_t = scale q_tᵀ S_t, two query heads to each key head."""
    x, scale, share = call_of("gated_delta", gate, length=7, heads=4), 0.3, 2
    q, k, v = x.q, x.k[:, :, ::share], x.v[:, :, ::share]
    assert x.log_gate is not None
    assert x.beta is not None
    g, beta, s0 = x.log_gate[:, :, ::share], x.beta[:, :, ::share], x.start.s[:, ::share]
    want, ends = torch.zeros_like(x.v), torch.zeros_like(s0)
    for b, h in itertools.product(range(2), range(2)):
        s = s0[b, h]
        for t in range(7):
            now, value = k[b, t, h], v[b, t, h]
            decay = g[b, t, h].exp().reshape(-1, 1) if "gated" in rule else 1.0  # by which rows of S fade
            if rule in ("linear", "gated"):
                s = decay * s + torch.outer(now, value)
            else:
                s = decay * s + beta[b, t, h] * torch.outer(now, value - (decay * s).T @ now)
            for query in range(share * h, share * h + share):
                want[b, t, query] = scale * (q[b, t, query] @ s)
        ends[b, h] = s

    def each(t: Tensor, dim: int = 2) -> Tensor:
        return t.repeat_interleave(share, dim)

    given: dict[str, Any] = {"log_gate": each(g)} if "gated" in rule else {}
    given |= {"beta": each(beta)} if "delta" in rule else {}
    start = LinearState(each(s0, 1), x.start.z.new_zeros(x.start.z.shape))
    o, state = linear_attention(
        scale * q, each(k), each(v), rule=rule, feature_map="identity", normalize=False, initial_state=start,
        return_state=True, **given,
    )  # fmt: skip
    close(o, want)
    close(state.s, each(ends, 1))


Q = torch.zeros(2, 5, 2, 4)
B = torch.zeros(2, 5, 2)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("rule='lru'", {"rule": "lru"}),
        ("rule='gated' without log_gate", {"rule": "gated"}),
        ("rule='delta' without beta", {"rule": "delta"}),
        ("rule='gated_delta' without log_gate", {"rule": "gated_delta", "beta": B}),
        ("rule='gated_delta' without beta", {"rule": "gated_delta", "log_gate": B}),
        ("log_gate with rule='linear': .*one of the rules gated, gated_delta", {"rule": "linear", "log_gate": B}),
        ("log_gate with rule='delta'", {"rule": "delta", "log_gate": B, "beta": B}),
        ("beta with rule='gated': .*one of the rules delta, gated_delta", {"rule": "gated", "log_gate": B, "beta": B}),
        ("beta with rule='linear'", {"beta": B}),
        ("rule='delta' with causal=False", {"rule": "delta", "beta": B, "causal": False}),
        ("log_gate is .*or \\(2, 5, 2, 4\\)", {"log_gate": Q[..., :3]}),
        ("log_gate is", {"log_gate": Q.long()}),
        ("log_gate has values above 0 or NaN", {"log_gate": Q + 0.1}),
        ("log_gate has values above 0 or NaN", {"log_gate": Q + torch.nan}),
        ("log_gate has values above 0", {"log_gate": Q + 0.1, "lengths": torch.tensor([0, 1])}),
        ("beta is", {"rule": "delta", "beta": B[:, :4]}),
        ("beta is", {"rule": "delta", "beta": B.long()}),
        ("beta has values outside", {"rule": "delta", "beta": B - 0.1}),
        ("beta has values outside", {"rule": "delta", "beta": B + 2.1}),
        ("beta has values outside .* or NaN", {"rule": "delta", "beta": B + torch.nan}),
        ("beta has values outside", {"rule": "delta", "beta": B + 2.1, "lengths": torch.tensor([0, 1])}),
        ("state.s", {"rule": "delta", "beta": B, "initial_state": LinearState(Q[:1, :2], Q[:1, :2, :, 0])}),
        ('impl="triton" for linear_attention', {"rule": "delta", "beta": B.double(), "impl": "triton"}),
    ],
)
def test_wrong_arguments_are_named(message: str, options: dict[str, Any]) -> None:
    tokens = (Q.double(),) * 3 if options.get("impl") else (Q, Q, Q)
    with pytest.raises(ValueError, match=message):
        linear_attention(*tokens, **options)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("rule='delta' without beta", {"rule": "delta"}),
        ("log_gate with rule='delta'", {"rule": "delta", "log_gate": B[:, 0], "beta": B[:, 0]}),
        ("log_gate is", {"log_gate": Q[:, 0, :, :3]}),
        ("log_gate has values above 0", {"log_gate": Q[:, 0] + 1}),
        ("beta is", {"rule": "delta", "beta": B[:, 0, :1]}),
        ("beta has values outside", {"rule": "delta", "beta": B[:, 0] + 3}),
    ],
)
def test_wrong_arguments_of_a_step_are_named(message: str, options: dict[str, Any]) -> None:
    state = LinearState(torch.zeros(2, 2, 4, 4), torch.zeros(2, 2, 4))
    with pytest.raises(ValueError, match=message):
        linear_attention_step(Q[:, 0], Q[:, 0], Q[:, 0], state, **options)


@rules
def test_equals_the_naive_reference_of_flash_linear_attention(rule: str, gate: str) -> None:
    """Values, last states and all gradients, to 1e-5: their references compute in float32.

    Compared with version 0.6.0: `naive_recurrent_gla`, `delta_rule_recurrence`, `naive_recurrent_gated_delta_rule` and
    `naive_recurrent_kda`.
    """
    x = call_of(rule, gate, length=150, key=16, value=24).to(torch.float32).with_gradients()
    q, k, v, g, beta, (s0, _) = x
    q = q * 4  # theirs divides by the square root of K
    if (rule, gate) == GATED:
        o, s = fla_naive("gla").naive_recurrent_gla(q, k, v, g, s0, True)
    elif (rule, gate) == DELTA:
        assert beta is not None
        turned = (y.transpose(1, 2) for y in (q, k, v, beta))
        o, s = fla_naive("delta_rule").delta_rule_recurrence(*turned, s0, True)
        o = o.transpose(1, 2)
    elif gate == "head":
        naive = fla_naive("gated_delta_rule").naive_recurrent_gated_delta_rule
        o, s = naive(q, k, v, beta, g, initial_state=s0, output_final_state=True)
    else:
        o, s = fla_naive("kda").naive_recurrent_kda(q, k, v, g, beta, initial_state=s0, output_final_state=True)
    theirs, ours = (o, LinearState(s, x.start.z)), run(x, rule)
    same(ours, theirs, 1e-5)
    for a, b in zip(grads(ours, x.leaves()), grads(theirs, x.leaves()), strict=True):
        close(a, b, 1e-5)
