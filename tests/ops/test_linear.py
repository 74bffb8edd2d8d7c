import copy
import itertools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from subquad.ops import LinearState, linear_attention, linear_attention_step
from subquad.ops.feature_maps import feature_map as find_map
from subquad.ops.linear import chunked

MAPS = ("elu+1", "relu", "exp", "identity", "quadratic")
few = settings(max_examples=8, deadline=None, derandomize=True)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(
    batch: int = 2,
    length: int = 7,
    heads: int = 2,
    key: int = 3,
    value: int = 4,
    keys: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    keys = length if keys is None else keys
    q = draw(batch, length, heads, key, seed=seed)
    return q, draw(batch, keys, heads, key, seed=seed + 1), draw(batch, keys, heads, value, seed=seed + 2)


def gates(batch: int, length: int, heads: int, seed: int = 5) -> Tensor:
    return -torch.rand(batch, length, heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def state(rows: int, heads: int, features: int, value: int, seed: int = 9) -> LinearState:
    return LinearState(draw(rows, heads, features, value, seed=seed), draw(rows, heads, features, seed=seed + 1).abs())


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    feature_map: str | Callable[[Tensor], Tensor] = "elu+1",
    normalize: bool = True,
    eps: float = 1e-6,
    log_gate: Tensor | None = None,
    initial_state: LinearState | None = None,
) -> tuple[Tensor, LinearState]:
    """The definition in float64: all scores at once, then the final state as a sum over all keys."""
    found = find_map(feature_map)
    q, k, v = found.apply(q.double()), found.apply(k.double()), v.double()
    score = torch.einsum("bthm,bshm->bhts", q, k)
    total = torch.zeros(q.shape[0], q.shape[2], q.shape[1] if causal else 1, dtype=torch.float64)
    rest = torch.zeros(k.shape[0], k.shape[2], k.shape[1], dtype=torch.float64)
    if causal:
        score = score.tril()
    if log_gate is not None:
        total = log_gate.double().cumsum(1).transpose(1, 2)  # [B, H, T]
        score = score * (total[..., :, None] - total[..., None, :]).tril().exp()
        rest = total[..., -1:] - total
    o, d = torch.einsum("bhts,bshv->bthv", score, v), score.sum(-1).transpose(1, 2)
    weight = rest.exp()
    s = torch.einsum("bshm,bhs,bshv->bhmv", k, weight, v)
    z = torch.einsum("bshm,bhs->bhm", k, weight)
    if initial_state is not None:
        s0, z0 = initial_state.s.double(), initial_state.z.double()
        reach = total.exp().transpose(1, 2)  # [B, T, H]
        o = o + torch.einsum("bthm,bhmv->bthv", q, s0) * reach[..., None]
        d = d + torch.einsum("bthm,bhm->bth", q, z0) * reach
        last = total[..., -1].exp()
        s, z = s + s0 * last[..., None, None], z + z0 * last[..., None]
    if normalize:
        d = torch.where(d < 0, d.clamp(max=-eps), d.clamp(min=eps)) if found.signed else d + eps
        o = o / d[..., None]
    return o, LinearState(s, z)


def grads(outputs: tuple[Tensor, LinearState], leaves: list[Tensor]) -> list[Tensor]:
    o, (s, z) = outputs
    loss = sum((x * draw(*x.shape, seed=20 + i)).sum() for i, x in enumerate((o, s, z)))
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def close(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    scale = want.detach().abs().max().clamp(min=1)
    assert got.shape == want.shape
    assert (got - want).abs().max() <= tolerance * scale


def same(got: tuple[Tensor, LinearState], want: tuple[Tensor, LinearState], tolerance: float = 1e-9) -> None:
    close(got[0], want[0], tolerance)
    close(got[1].s, want[1].s, tolerance)
    close(got[1].z, want[1].z, tolerance)


def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, LinearState]:
    return linear_attention(q, k, v, return_state=True, impl="torch", **options)


@pytest.fixture(params=["as it is", "short segments, small blocks"])
def _tuning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "as it is":
        monkeypatch.setattr(chunked, "_segment", lambda _: 64)
        monkeypatch.setattr(chunked, "BLOCK", 2)


@pytest.mark.usefixtures("_tuning")
@pytest.mark.parametrize("length", [1, 131])
@pytest.mark.parametrize(
    ("causal", "gated", "started"), [c for c in itertools.product((True, False), repeat=3) if c[0] or not c[1]]
)
@pytest.mark.parametrize(("name", "normalize"), [*((name, True) for name in MAPS), ("elu+1", False)])
def test_equals_the_dense_definition(
    length: int, causal: bool, gated: bool, started: bool, name: str, normalize: bool
) -> None:
    q, k, v = leaves = [x.requires_grad_() for x in inputs(length=length)]
    options: dict[str, Any] = {"causal": causal, "feature_map": name, "normalize": normalize}
    if gated:
        options["log_gate"] = gates(2, length, 2).requires_grad_()
        leaves.append(options["log_gate"])
    if started:
        start = state(2, 2, 6 if name == "quadratic" else 3, 4)
        options["initial_state"] = LinearState(start.s.requires_grad_(), start.z.requires_grad_())
        leaves.extend(options["initial_state"])
    got, want = call(q, k, v, **options), dense(q, k, v, **options)
    same(got, want)
    # a signed map may come close to a zero denominator, where every gradient is large
    for a, b in zip(grads(got, leaves), grads(want, leaves), strict=True):
        close(a, b, 1e-8)


@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("name", MAPS)
def test_cross_attention_has_its_own_number_of_queries(queries: int, name: str) -> None:
    q, k, v = leaves = [x.requires_grad_() for x in inputs(length=queries, keys=33)]
    options: dict[str, Any] = {"causal": False, "feature_map": name}
    got, want = call(q, k, v, **options), dense(q, k, v, **options)
    same(got, want)
    for a, b in zip(grads(got, leaves), grads(want, leaves), strict=True):
        close(a, b, 1e-8)


@pytest.mark.parametrize("kind", ["causal", "bidirectional", "padded", "packed", "packed both ways", "cross"])
@pytest.mark.parametrize("name", ["elu+1", "identity"])
def test_gradients_of_first_and_second_order(kind: str, name: str) -> None:
    causal = kind in ("causal", "padded", "packed")
    packed = kind.startswith("packed")
    q, k, v = inputs(1 if packed else 2, 5, 1, 2, 1, keys=4 if kind == "cross" else None)
    options: dict[str, Any] = {"causal": causal, "feature_map": name}
    if kind == "padded":
        options["lengths"] = torch.tensor([3, 5])
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 3, 3, 5])
    start = state(3 if packed else 2, 1, 2, 1)
    log_gate = gates(q.shape[0], 5, 1) if causal else None

    def run(
        q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, log_gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        o, end = call(q, k, v, initial_state=LinearState(s, z), log_gate=log_gate, **options)
        return o, end.s, end.z

    leaves = [x.requires_grad_() for x in (q, k, v, *start) + ((log_gate,) if log_gate is not None else ())]
    # the random projections of the fast mode are enough for a second map
    assert torch.autograd.gradcheck(run, leaves, fast_mode=name != "elu+1")
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)
    of_func = torch.func.grad(lambda *x: sum(y.square().sum() for y in run(*x)), tuple(range(len(leaves))))(*leaves)
    of_op = torch.autograd.grad([y.square().sum() for y in run(*leaves)], leaves)
    for a, b in zip(of_func, of_op, strict=True):
        close(a, b)


@few
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    extra=st.integers(0, 5),
    causal=st.booleans(),
    gated=st.booleans(),
    name=st.sampled_from(MAPS),
)
def test_padding_is_invisible(lengths: list[int], extra: int, causal: bool, gated: bool, name: str) -> None:
    batch, length = len(lengths), max(1, max(lengths) + extra)
    q, k, v = inputs(batch, length)
    start = state(batch, 2, 6 if name == "quadratic" else 3, 4)
    log_gate = gates(batch, length, 2) if causal and gated else None
    padding = torch.arange(length) >= torch.tensor(lengths)[:, None]
    for x in (q, k, v):
        x[padding] = torch.nan  # padding may hold anything
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options: dict[str, Any] = {"causal": causal, "feature_map": name}
    o, end = call(q, k, v, lengths=torch.tensor(lengths), log_gate=log_gate, initial_state=start, **options)
    assert not o[padding].any()
    if name != "quadratic":  # applied before the kernel, so that autograd itself meets the NaN
        for g in grads((o, end), leaves):
            assert not g[padding].any()
            assert g.isfinite().all()
    for b, n in enumerate(lengths):
        own = LinearState(start.s[b : b + 1], start.z[b : b + 1])
        if n == 0:
            close(end.s[b], own.s[0])
            continue
        gate = None if log_gate is None else log_gate[b : b + 1, :n]
        alone = dense(*(x[b : b + 1, :n] for x in (q, k, v)), log_gate=gate, initial_state=own, **options)
        same((o[b : b + 1, :n], LinearState(end.s[b : b + 1], end.z[b : b + 1])), alone)


@few
@given(
    lengths=st.lists(st.integers(0, 80), min_size=1, max_size=6).filter(any),
    causal=st.booleans(),
    gated=st.booleans(),
    started=st.booleans(),
    name=st.sampled_from(MAPS),
)
def test_a_pack_equals_its_sequences(lengths: list[int], causal: bool, gated: bool, started: bool, name: str) -> None:
    ends = [0, *itertools.accumulate(lengths)]
    total, rows = ends[-1], len(lengths)
    q, k, v = leaves = [x.requires_grad_() for x in inputs(1, total)]
    log_gate = gates(1, total, 2).requires_grad_() if causal and gated else None
    start = state(rows, 2, 6 if name == "quadratic" else 3, 4) if started else None
    leaves = leaves + ([] if log_gate is None else [log_gate])
    if start is not None:
        leaves = leaves + [x.requires_grad_() for x in start]
    options: dict[str, Any] = {"causal": causal, "feature_map": name}
    got = call(q, k, v, cu_seqlens=torch.tensor(ends), log_gate=log_gate, initial_state=start, **options)
    parts = []
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        own = None if start is None else LinearState(start.s[i : i + 1], start.z[i : i + 1])
        if a == b:
            features = 6 if name == "quadratic" else 3
            parts.append(
                (
                    q.new_zeros(1, 0, 2, 4),
                    own or LinearState(q.new_zeros(1, 2, features, 4), q.new_zeros(1, 2, features)),
                )
            )
            continue
        gate = None if log_gate is None else log_gate[:, a:b]
        parts.append(dense(q[:, a:b], k[:, a:b], v[:, a:b], log_gate=gate, initial_state=own, **options))
    want = (
        torch.cat([o for o, _ in parts], 1),
        LinearState(torch.cat([end.s for _, end in parts]), torch.cat([end.z for _, end in parts])),
    )
    same(got, want)
    for a_, b_ in zip(grads(got, leaves), grads(want, leaves), strict=True):
        close(a_, b_, 1e-8)


@few
@given(cut=st.integers(1, 89), gated=st.booleans(), name=st.sampled_from(MAPS))
def test_two_halves_with_the_state_carried_equal_the_whole(cut: int, gated: bool, name: str) -> None:
    q, k, v = inputs(length=90)
    log_gate = gates(2, 90, 2) if gated else None
    whole = call(q, k, v, feature_map=name, log_gate=log_gate)
    first, second = slice(0, cut), slice(cut, None)
    gate = [None if log_gate is None else log_gate[:, part] for part in (first, second)]
    a, middle = call(q[:, first], k[:, first], v[:, first], feature_map=name, log_gate=gate[0])
    b, end = call(q[:, second], k[:, second], v[:, second], feature_map=name, log_gate=gate[1], initial_state=middle)
    same((torch.cat((a, b), 1), end), whole)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
def test_steps_equal_the_whole(name: str, gated: bool, normalize: bool, inplace: bool) -> None:
    q, k, v = inputs(length=9)
    log_gate = gates(2, 9, 2) if gated else None
    now = state(2, 2, 6 if name == "quadratic" else 3, 4)
    whole = call(q, k, v, feature_map=name, normalize=normalize, log_gate=log_gate, initial_state=now)
    rows = []
    for t in range(9):
        before = copy.deepcopy(now)
        gate = None if log_gate is None else log_gate[:, t]
        o, after = linear_attention_step(
            q[:, t], k[:, t], v[:, t], now, feature_map=name, normalize=normalize, log_gate=gate, inplace=inplace
        )
        if inplace:
            assert after.s.data_ptr() == now.s.data_ptr()
            assert after.z.data_ptr() == now.z.data_ptr()
        else:
            assert torch.equal(now.s, before.s)
            assert torch.equal(now.z, before.z)
        rows.append(o)
        now = after
    same((torch.stack(rows, 1), now), whole)


def test_a_step_has_gradients() -> None:
    q, k, v = (x[:, 0].clone().requires_grad_() for x in inputs(length=1))
    start = state(2, 2, 3, 4)
    gate = gates(2, 1, 2)[:, 0].clone().requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        o, end = linear_attention_step(q, k, v, LinearState(s, z), log_gate=gate)
        return o, end.s, end.z

    assert torch.autograd.gradcheck(run, (q, k, v, start.s.requires_grad_(), start.z.requires_grad_(), gate))


def test_key_lengths_leave_the_queries_alone() -> None:
    q, k, v = inputs(length=6)
    n = torch.tensor([2, 5])
    o = linear_attention(q, k, v, causal=False, key_lengths=n)
    for b in range(2):
        close(o[b : b + 1], dense(q[b : b + 1], k[b : b + 1, : n[b]], v[b : b + 1, : n[b]], causal=False)[0])
    q = inputs(length=9)[0]
    for feature_map in ("relu", "quadratic", torch.exp):
        options: dict[str, Any] = {"causal": False, "feature_map": feature_map}
        assert torch.equal(
            linear_attention(q, k, v, key_lengths=n, **options), linear_attention(q, k, v, lengths=n, **options)
        )


def test_a_callable_map_may_change_the_width() -> None:
    q, k, v = inputs(length=70)

    def wide(x: Tensor) -> Tensor:
        return torch.cat((x, x.sin(), x.cos()), -1)

    same(call(q, k, v, feature_map=wide), dense(q, k, v, feature_map=wide))


def test_a_gate_of_minus_infinity_forgets_everything() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(length=100))
    start = state(2, 2, 3, 4)
    log_gate = gates(2, 100, 2)
    log_gate[:, 50] = -torch.inf
    log_gate[:, 80] = -1e4
    log_gate.requires_grad_()
    o, end = call(q, k, v, log_gate=log_gate, initial_state=start)
    close(o[:, 50:80], dense(q[:, 50:80], k[:, 50:80], v[:, 50:80], log_gate=log_gate[:, 50:80].clamp(min=-1e3))[0])
    same((o[:, 80:], end), dense(q[:, 80:], k[:, 80:], v[:, 80:], log_gate=log_gate[:, 80:].clamp(min=-1e3)))
    for g in grads((o, end), [q, k, v, log_gate]):
        assert g.isfinite().all()
    step, _ = linear_attention_step(q[:, 50], k[:, 50], v[:, 50], start, log_gate=log_gate[:, 50])
    close(step, v[:, 50], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [-1e4, -30.0, -20000.0])
def test_strong_gates_keep_the_precision_of_the_weak_ones_after_them(dtype: torch.dtype, size: float) -> None:
    q, k, v = (x.to(dtype) for x in inputs(length=64))
    log_gate = gates(2, 64, 2) * 0.01
    log_gate[:, 3:40:7] = size
    got, _ = call(q, k, v, log_gate=log_gate.to(torch.float32))
    want, _ = dense(q, k, v, log_gate=log_gate.to(torch.float32).double().clamp(min=-1e3))
    close(got.double(), want, 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["elu+1", "relu", "identity"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [1e4, 1.0, 1e-4, 0.0])
def test_finite_input_gives_finite_results(dtype: torch.dtype, name: str, causal: bool, size: float) -> None:
    q, k, v = ((x.clamp(-1, 1) * size).to(dtype).requires_grad_() for x in inputs(length=150, key=16))
    o, end = call(q, k, v, causal=causal, feature_map=name)
    assert o.dtype == dtype
    assert end.s.dtype == end.z.dtype == torch.float32
    assert o.isfinite().all()
    if name != "identity" and size <= 1:  # a signed denominator near zero has gradients beyond float16
        assert all(g.isfinite().all() for g in torch.autograd.grad(o.float().sum(), (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["elu+1", "relu"])
def test_half_precision_is_within_twice_the_plain_error(dtype: torch.dtype, causal: bool, name: str) -> None:
    low = [(x * 0.5).to(dtype).requires_grad_() for x in inputs(1, 100, 2, 16, 16)]
    weight = draw(1, 100, 2, 16, seed=30)

    def errors(f: Callable[..., Tensor]) -> list[float]:
        exact = [x.detach().double().requires_grad_() for x in low]
        want = dense(*exact, causal=causal, feature_map=name)[0]
        wanted = [want, *torch.autograd.grad((want * weight).sum(), exact)]
        got = f(*low)
        grown = [got, *torch.autograd.grad((got * weight.to(dtype)).sum(), low)]
        return [(a.double() - b).abs().mean().item() for a, b in zip(grown, wanted, strict=True)]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        phi = find_map(name).apply
        score = torch.einsum("bthm,bshm->bhts", phi(q), phi(k))
        score = score.tril() if causal else score
        return torch.einsum("bhts,bshv->bthv", score / (score.sum(-1, keepdim=True) + 1e-6), v)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, causal=causal, feature_map=name)

    for mine, yardstick in zip(errors(ours), errors(plain), strict=True):
        assert mine <= 2 * yardstick


@pytest.mark.parametrize("causal", [True, False])
def test_threads_share_the_heads_and_change_nothing(causal: bool) -> None:
    q, k, v = (x.float().requires_grad_() for x in inputs(3, 300, 4))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            o = linear_attention(q, k, v, causal=causal)
            results.append((o, *torch.autograd.grad(o.square().sum(), (q, k, v))))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            close(a, b, 1e-6)


def test_a_hundred_thousand_tokens() -> None:
    q, k, v = inputs(1, 100_000, 1, 2, 3)
    o, end = call(q.float(), k.float(), v.float())
    phi = find_map("elu+1").apply
    s = (phi(k)[..., None] * v[..., None, :]).cumsum(1)  # [B, T, H, K, V]
    z = phi(k).cumsum(1)
    want = (phi(q)[..., None] * s).sum(-2) / (phi(q) * z).sum(-1, keepdim=True)
    close(o.double(), want, 1e-5)
    close(end.s.double(), s[:, -1], 1e-5)


@pytest.mark.parametrize("options", [{}, {"gated": True}, {"causal": False}, {"packed": True}])
def test_memory_is_linear(options: dict[str, bool]) -> None:
    def largest(length: int) -> int:
        q, k, v = (x.float().requires_grad_() for x in inputs(1, length, 1, 4, 4))
        gate = gates(1, length, 1).float() if options.get("gated") else None
        cu = torch.tensor([0, 10, length]) if options.get("packed") else None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            o = linear_attention(q, k, v, causal=options.get("causal", True), log_gate=gate, cu_seqlens=cu)
            o.sum().backward()
        return max(event.self_cpu_memory_usage for event in profile.events())

    assert largest(2048) <= 4.5 * largest(512)


def test_packed_and_padded_agree_with_themselves_in_float32() -> None:
    q, k, v = (x.float() for x in inputs(2, 60))
    n = torch.tensor([60, 23])
    o = linear_attention(q, k, v, lengths=n)
    pack = [torch.cat((x[:1], x[1:, :23]), 1) for x in (q, k, v)]
    p = linear_attention(*pack, cu_seqlens=torch.tensor([0, 60, 83], dtype=torch.int32))
    close(p, torch.cat((o[:1], o[1:, :23]), 1), 1e-5)


@pytest.mark.parametrize("layout", ["heads first", "one projection"])
def test_strides_do_not_matter(layout: str) -> None:
    q, k, v = inputs(length=70, value=3)
    if layout == "heads first":
        other = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    else:
        other = [x.requires_grad_() for x in torch.stack((q, k, v), 3).unbind(3)]
    leaves = [x.clone().contiguous().requires_grad_() for x in (q, k, v)]
    a, b = call(*other), call(*leaves)
    same(a, b, 0)
    for x, y in zip(grads(a, other), grads(b, leaves), strict=True):
        close(x, y, 0)


def test_checkpointing_and_autocast() -> None:
    q, k, v = (x.float().requires_grad_() for x in inputs(length=40))
    want = torch.autograd.grad(linear_attention(q, k, v).square().sum(), (q, k, v))
    o = checkpoint(lambda *x: linear_attention(*x), q, k, v, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(o.square().sum(), (q, k, v)), want, strict=True):
        assert torch.equal(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_attention(q, k, v), linear_attention(q, k, v))
        inside = linear_attention(q, k, v)
        start = LinearState(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3))
        step = linear_attention_step(q[:, 0], k[:, 0], v[:, 0], start)[0]
    assert torch.equal(inside, linear_attention(q, k, v))
    assert torch.equal(step, linear_attention_step(q[:, 0], k[:, 0], v[:, 0], start)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it loads its compiler
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("gated", [True, False])
def test_compiles_without_a_graph_break(backend: str, gated: bool) -> None:
    if backend == "inductor" and not (shutil.which("g++") and gated):
        pytest.skip("needs a C++ compiler, and one case is enough")
    torch._dynamo.reset()
    q, k, v = (x.float().requires_grad_() for x in inputs(length=40))
    log_gate = gates(2, 40, 2).float().requires_grad_() if gated else None
    start = LinearState(*(x.float() for x in state(2, 2, 3, 4)))
    lengths = torch.tensor([40, 17])

    def run(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None) -> Tensor:
        o, end = linear_attention(
            q * 2, k, v, log_gate=log_gate, lengths=lengths, initial_state=start, return_state=True
        )
        step, end = linear_attention_step(q[:, 0], k[:, 0], v[:, 0], end)
        return o.square().sum() + step.square().sum() + end.s.sum()

    leaves = (q, k, v) if log_gate is None else (q, k, v, log_gate)
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    got, want = compiled(q, k, v, log_gate), run(q, k, v, log_gate)
    close(got, want, 1e-5)
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        close(a, b, 1e-4)


def test_registered_operators_are_sound() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(length=40))
    for causal, lengths, cu in ((True, torch.tensor([3, 40]), None), (False, None, None)):
        arguments = (q, k, v, None, lengths, cu, None, None, causal, "elu+1", False, True, 1e-6, "torch", True)
        torch.library.opcheck(
            torch.ops.subquad.linear_attention.default,
            arguments,
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


Q = torch.zeros(2, 5, 2, 4)
G = torch.zeros(2, 5, 2)


@pytest.mark.parametrize(
    ("message", "arguments", "options"),
    [
        ("q has shape", (Q[0], Q, Q), {}),
        ("q has shape", (Q[:, :0], Q[:, :0], Q[:, :0]), {}),
        ("k has shape", (Q, Q[..., :3], Q), {}),
        ("k has shape", (Q, Q[:1], Q[:1]), {}),
        ("v has shape", (Q, Q, Q[:, :4]), {}),
        ("v has shape", (Q, Q, Q[:, :, :1]), {}),
        ("one floating point type", (Q, Q, Q.double()), {}),
        ("one floating point type", (Q.long(), Q.long(), Q.long()), {}),
        ("causal=True with 5 queries and 3 keys", (Q, Q[:, :3], Q[:, :3]), {}),
        ("did you mean 'elu\\+1'", (Q, Q, Q), {"feature_map": "elu"}),
        ("feature_map gave", (Q, Q, Q), {"feature_map": lambda x: x[0]}),
        ("eps=-1", (Q, Q, Q), {"eps": -1}),
        ("eps=0 .*above 0", (Q, Q, Q), {"eps": 0, "feature_map": "relu"}),
        ("eps=1e-60 .*at least 1e-30", (Q, Q, Q), {"eps": 1e-60, "feature_map": "relu"}),  # 0 in float32
        ("lengths ranges from 1 to 6", (Q, Q, Q), {"lengths": torch.tensor([6, 1])}),
        ("lengths ranges from -1 to 1", (Q, Q, Q), {"lengths": torch.tensor([-1, 1])}),
        ("lengths has shape", (Q, Q, Q), {"lengths": torch.tensor([1])}),
        ("lengths has dtype", (Q, Q, Q), {"lengths": torch.tensor([1.0, 2.0])}),
        ("key_lengths", (Q, Q, Q), {"key_lengths": torch.tensor([1, 2])}),
        ("key_lengths ranges", (Q, Q, Q), {"causal": False, "key_lengths": torch.tensor([1, 9])}),
        ("cu_seqlens with q", (Q, Q, Q), {"cu_seqlens": torch.tensor([0, 5])}),
        ("cu_seqlens=", (Q[:1], Q[:1], Q[:1]), {"cu_seqlens": torch.tensor([0, 4])}),
        ("cu_seqlens=", (Q[:1], Q[:1], Q[:1]), {"cu_seqlens": torch.tensor([0, 4, 3, 5])}),
        ("cu_seqlens is", (Q[:1], Q[:1], Q[:1]), {"cu_seqlens": torch.tensor([0.0, 5.0])}),
        ("together", (Q[:1], Q[:1], Q[:1]), {"cu_seqlens": torch.tensor([0, 5]), "lengths": torch.tensor([5])}),
        ("log_gate with causal=False", (Q, Q, Q), {"causal": False, "log_gate": G}),
        ("log_gate is", (Q, Q, Q), {"log_gate": G[:, :4]}),
        ("log_gate has values above 0", (Q, Q, Q), {"log_gate": G + 0.1}),
        ("log_gate has values above 0 or NaN", (Q, Q, Q), {"log_gate": G + torch.nan}),
        ("state.s", (Q, Q, Q), {"initial_state": LinearState(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4))}),
        ("state.z", (Q, Q, Q), {"initial_state": LinearState(torch.zeros(2, 2, 4, 4), torch.zeros(2, 2, 3))}),
        (
            "state.s is torch.float16",
            (Q, Q, Q),
            {"initial_state": LinearState(torch.zeros(2, 2, 4, 4).half(), torch.zeros(2, 2, 4).half())},
        ),
        ("impl='fast'", (Q, Q, Q), {"impl": "fast"}),
        ('impl="triton" for linear_attention', (Q.double(), Q.double(), Q.double()), {"impl": "triton"}),
    ],
)
def test_wrong_arguments_are_named(message: str, arguments: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        linear_attention(*arguments, **options)


X = torch.zeros(2, 2, 4)
S = LinearState(torch.zeros(2, 2, 4, 4), torch.zeros(2, 2, 4))


@pytest.mark.parametrize(
    ("message", "arguments", "options"),
    [
        ("q_t has shape", (Q, Q, Q, S), {}),
        ("k_t has shape", (X, X[..., :3], X, S), {}),
        ("v_t has shape", (X, X, X[:1], S), {}),
        ("one floating point type", (X, X, X.half(), S), {}),
        ("state.s", (X[:1], X[:1], X[:1], S), {}),
        ("state=None", (X, X, X, None), {}),
        ("log_gate is", (X, X, X, S), {"log_gate": torch.zeros(2)}),
        ("log_gate has", (X, X, X, S), {"log_gate": torch.ones(2, 2)}),
        ("eps", (X, X, X, S), {"eps": -1.0}),
        ("feature_map", (X, X, X, S), {"feature_map": "gelu"}),
    ],
)
def test_wrong_arguments_of_a_step_are_named(message: str, arguments: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        linear_attention_step(*arguments, **options)


def test_torch_func_sees_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subquad.ops.linear.plain.CHUNK", 4)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 11, 2, 3, dtype=torch.float64) for _ in range(3))
    for gate in (None, -torch.rand(2, 11, 2, dtype=torch.float64)):

        def loss(q: Tensor, gate: Tensor | None = gate) -> Tensor:
            return linear_attention(q, k, v, log_gate=gate, causal=True).square().sum()

        leaf = q.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(leaf), leaf)
        torch.testing.assert_close(torch.func.grad(loss)(q), wanted)
