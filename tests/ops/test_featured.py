"""Kernels that compute features where they use them, against the dense definition in float64, and mechanisms on them.

Interpreted tests need their own process, as in test_linear_triton.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from subquad.ops.linear import featured, normalised
from subquad.ops.linear.featured import KINDS, Inputs, Spec, Weights, featured_attention
from subquad.ops.linear.normalised import normalised_attention
from tests.ops.own_process import compiled, interpreted

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.ops.linear import featured_triton, normalised_triton

    for module in (featured_triton, normalised_triton):
        config = module.config
        small = lambda *a, config=config: config(*a)._replace(chunk=16, features=16)  # noqa: E731
        monkeypatch.setattr(module, "config", small)
        monkeypatch.setattr(module, "PROGRAMS", 12)
    monkeypatch.setattr(featured_triton, "LEAST", 1)


def visible(rows: int, queries: int, keys: int, lengths: Tensor | None, causal: bool) -> Tensor:
    """Who sees whom, [B, 1, T, S]."""
    n = torch.full((rows,), keys) if lengths is None else lengths
    seen = (torch.arange(keys) < n[:, None])[:, None, None].expand(rows, 1, queries, keys)
    return seen.tril() if causal else seen


def dense(x: Inputs, spec: Spec) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in x[:3])  # [B, H, T, K]
    seen = visible(len(q), q.shape[2], k.shape[2], x.lengths, spec.causal)
    if x.sigma is not None:
        q, k = (t / t.norm(dim=-1, keepdim=True) * x.sigma[:, None] for t in (q, k))
    kappa = torch.zeros_like(k[..., 0])
    short = (spec.scale * k).square().sum(-1) / 2
    q, k = (t @ x.directions.mT * spec.scale for t in (q, k))
    if spec.kind == "softmax":
        kappa = k.amax(-1) - short
        q, k = ((t - t.amax(-1, keepdim=True)).exp() + spec.eps for t in (q, k))
    elif spec.kind == "relu":
        q, k = (t.clamp(min=0) + spec.eps for t in (q, k))
    else:
        q, k = (torch.cat((t.sin(), t.cos()), -1) / x.directions.shape[1] ** 0.5 for t in (q, k))
    exponent = kappa[:, :, None].masked_fill(~seen, -1e300)
    weights = q @ k.mT * (exponent - exponent.amax(-1, keepdim=True).detach()).exp() * seen
    d, least = weights.sum(-1), x.least.transpose(1, 2)
    held = torch.where(d < 0, -torch.maximum(-d, least), torch.maximum(d, least))
    d = held if KINDS[spec.kind].signed else d + least
    return (weights / d[..., None] @ v).transpose(1, 2)


def draw(
    kind: str, causal: bool, t: int, s: int, k: int, v: int, count: int, lengths: list[int] | None
) -> tuple[Inputs, Spec, list[Tensor]]:
    torch.manual_seed(t + k)
    sizes = (2, t, 1, k), (2, s, 1, k), (2, s, 1, v), (1, count, k)
    q, key, val, w = (torch.randn(size, dtype=torch.float64) for size in sizes)
    sigma = torch.rand(1, k, dtype=torch.float64) + 0.5 if KINDS[kind].unit else None
    least = torch.full((2, t, 1), 0.05 if KINDS[kind].signed else 1e-30, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (1.5 * q, 1.5 * key, val, sigma) if x is not None]
    n = None if lengths is None else torch.tensor(lengths)
    spec = Spec(kind, 1.0 if KINDS[kind].unit else 0.5, 0.0 if KINDS[kind].signed else 1 / 1024, causal)
    return Inputs(leaves[0], leaves[1], leaves[2], w, least, sigma, n), spec, leaves


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case",
    [
        {"causal": True, "t": 32, "s": 32, "k": 16, "v": 16, "count": 20},
        {"causal": True, "t": 20, "s": 20, "k": 12, "v": 20, "count": 16, "lengths": [20, 9]},
        {"causal": False, "t": 9, "s": 40, "k": 20, "v": 12, "count": 20, "lengths": [17, 40]},
    ],
    ids=lambda case: " ".join(f"{k}={v}" for k, v in case.items()),
)
def test_features_in_the_kernels_equal_the_definition(kind: str, case: dict[str, Any]) -> None:
    x, spec, leaves = draw(kind, **{"lengths": None} | case)
    ours, exact = featured_attention(x, spec).o, dense(x, spec)
    weight = torch.randn_like(exact)
    if x.lengths is not None and spec.causal:  # what queries in the padding give, nobody reads
        inside = (torch.arange(x.q.shape[1]) < x.lengths[:, None])[..., None, None]
        ours, exact, weight = ours * inside, exact * inside, weight * inside
    got, want = (torch.autograd.grad(o, leaves, weight) for o in (ours, exact))
    for a, b in zip((ours, *got), (exact, *want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@interpreted
@pytest.mark.parametrize("how", ["usual", "wild", "rising", "falling"])
@pytest.mark.parametrize("causal", [True, False])
def test_normalisers_are_exact_for_any_logits(how: str, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 20, 1, width, dtype=torch.float64) for width in (20, 20, 24))
    time = torch.arange(20)[:, None, None] / 20
    k = {"usual": k, "wild": 300 * k, "rising": k + 900 * time, "falling": k - 900 * time}[how]
    lengths = None if causal else torch.tensor([20, 7])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seen = visible(2, 20, 20, lengths, causal).transpose(1, 2).mT[..., None]  # [B, T, S, 1, 1]
    rho = k[:, None].masked_fill(~seen, -1e300).softmax(2) * seen
    exact = torch.einsum("bthk,btshk,bshv->bthv", q.softmax(-1), rho, v)
    ours, _ = normalised_attention(normalised.Inputs(q, k, v, lengths), causal)
    weight = torch.randn_like(exact)
    got, want = (torch.autograd.grad(o, leaves, weight) for o in (ours, exact))
    for a, b in zip((ours, *got), (exact, *want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


MIXES: list[tuple[str, dict[str, Any]]] = [
    ("performer", {"features": 12, "kernel": "hyperbolic"}),
    ("performer", {"features": 20, "kernel": "relu"}),
    ("rfa", {"features": 20, "tau": 0.8}),
    ("efficient", {}),
]


@interpreted
@pytest.mark.parametrize(("name", "options"), MIXES)
def test_mechanisms_are_the_same_on_kernels(name: str, options: dict[str, Any]) -> None:
    """Training, a prompt in two parts, and steps, with padding, in float32."""
    found = []
    for impl in ("torch", "triton"):
        torch.manual_seed(1)
        mix = subquad.build(name, dim=32, heads=2, causal=True, impl=impl, **options)
        x, n = torch.randn(2, 20, 32, requires_grad=True), torch.tensor([20, 7])
        y = mix(x, lengths=n)
        grads = torch.autograd.grad((y * torch.linspace(-1, 1, 32)).sum(), [x, *mix.parameters()])
        made = [y, *grads]
        with torch.no_grad():
            part, state = mix.prefill(x[:, :11], lengths=n.clamp(max=11))
            more, state = mix.prefill(x[:, 11:], state=state)
            kept = [t.clone() for t in state]
            first, after = mix.step(x[:, 0], state)
            assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True)), "step is pure unless asked"
            second, last = mix.step(x[:, 1], after, inplace=True)
            assert last.s is after.s
        found.append([*made, part, more, first, second, *last])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@interpreted
@pytest.mark.parametrize(("name", "options"), MIXES)
def test_contexts_are_the_same_on_kernels(name: str, options: dict[str, Any]) -> None:
    found = []
    for impl in ("torch", "triton"):
        torch.manual_seed(1)
        mix = subquad.build(name, dim=32, heads=2, impl=impl, **options)
        x, context = torch.randn(3, 9, 32, requires_grad=True), torch.randn(3, 20, 32, requires_grad=True)
        y = mix(x, context=context, context_lengths=torch.tensor([20, 5, 0]))
        loss = (y * torch.linspace(-1, 1, 32)).sum() + mix(x).square().sum()
        found.append([y, *torch.autograd.grad(loss, [x, context])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@interpreted
@pytest.mark.parametrize("name", ["performer", "rfa", "efficient"])
def test_error_in_16_bits_is_at_most_twice_that_of_torch(name: str) -> None:
    results, dtype = [], torch.bfloat16
    for impl, kind in (("torch", torch.float64), ("torch", dtype), ("triton", dtype)):
        torch.manual_seed(2)
        small = {} if name == "efficient" else {"features": 32}
        mix = subquad.build(name, dim=32, heads=1, causal=True, impl=impl, **small).to(dtype).to(kind)
        x = torch.randn(1, 40, 32).to(dtype).to(kind).requires_grad_()
        y = mix(x)
        results.append((y, *torch.autograd.grad(y.sum(), x)))
    for exact, theirs, ours in zip(*([t.detach().double() for t in r] for r in results), strict=True):
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + 1e-6 * exact.norm()


@interpreted
@pytest.mark.parametrize("size", [0.0, 1e3])
def test_tokens_of_any_size_are_finite(size: float) -> None:
    for name, options in MIXES:
        mix = subquad.build(name, dim=32, heads=2, causal=True, impl="triton", **options)
        x = (size * torch.randn(1, 20, 32)).requires_grad_()
        y = mix(x)
        y.sum().backward()
        assert torch.isfinite(y).all()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all(), name


@interpreted
def test_the_operators_are_well_formed() -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    x, spec, _ = draw("softmax", True, 9, 9, 16, 16, 16, None)
    torch.library.opcheck(torch.ops.subquad.featured_attention.default, (*x, *spec, True), test_utils=checks)
    x, spec, _ = draw("gaussian", False, 9, 7, 16, 16, 16, [7, 3])
    torch.library.opcheck(torch.ops.subquad.featured_attention.default, (*x, *spec, False), test_utils=checks)
    given = normalised.Inputs(*x[:3], x.lengths)
    torch.library.opcheck(torch.ops.subquad.normalised_attention.default, (*given, False, False), test_utils=checks)


@interpreted
def test_compiles_without_a_graph_break() -> None:
    for name, options in MIXES[-2:]:
        mix = subquad.build(name, dim=32, heads=2, causal=True, impl="triton", **options)
        x = torch.randn(1, 20, 32)
        torch.testing.assert_close(torch.compile(mix, fullgraph=True, backend="aot_eager")(x), mix(x))


def test_what_the_kernels_leave_to_torch() -> None:
    q, w = torch.randn(1, 4, 2, 16), torch.randn(2, 8, 16)
    assert not featured.fuses("auto", q, q, q, w, False)  # a CPU
    assert not featured.fuses("torch", q, q, q, w, False)
    assert not featured.fuses("triton", q, q, q, w.requires_grad_(), False)
    assert not normalised.fuses("triton", q.double(), q.double(), q.double())
    assert not normalised.fuses("triton", q, q, q.half())


@compiled
@pytest.mark.parametrize("room", [232448, 101376])  # an H200's, and what an RTX 4090 has
def test_tiles_fit_into_the_shared_memory_of_a_device(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from subquad.ops.linear import featured_triton, normalised_triton

    for width in (16, 64, 80, 128, 256):
        for size in (2, 4):
            tile = featured_triton.block_of(width, size)
            for kernel in ("back_q", "back_k"):
                cfg = featured_triton.config(kernel, width, width, 256, size, room, True)
                needed = featured_triton.shared(kernel, cfg.chunk, cfg.features, tile, tile, size, True)
                assert needed <= room or (kernel, size, width) == ("back_q", 4, 256)
            tile = featured_triton.block_of(width, size)
            for causal in (True, False):
                chunk, block, *_ = normalised_triton.config("back_k", width, width, size, room, causal)
                assert normalised_triton.shared(chunk, tile, block, size, causal) <= room


@compiled
@pytest.mark.parametrize("name", ["performer", "rfa", "efficient"])
def test_compiles_for_hopper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real compiler accepts the largest kernels; registers and shared memory are within a multiprocessor's."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops.launch import Plan
    from subquad.ops.linear import featured_triton, normalised_triton

    monkeypatch.undo()
    pointers = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
    built = []

    def build(fn: Any, tensors: tuple[Tensor, ...], plan: Plan) -> None:
        if fn.__name__ not in ("read", "back_k"):
            return
        values = dict(zip(fn.arg_names, (*tensors, *plan.numbers), strict=False))
        signature, constants = {}, {}
        for i, argument in enumerate(fn.arg_names):
            if argument in plan.constants:
                signature[argument], constants[(i,)] = "constexpr", plan.constants[argument]
            else:
                value = values[argument]
                number = "fp32" if isinstance(value, float) else "i32"
                signature[argument] = pointers[value.dtype] if isinstance(value, Tensor) else number
        source = ASTSource(fn=fn, signature=signature, constexprs=constants)
        options = {"num_warps": plan.warps, "num_stages": plan.stages, "maxnreg": plan.registers}
        built.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))

    for module in (featured_triton, normalised_triton):
        monkeypatch.setattr(module, "launch", build)
        monkeypatch.setattr(module, "shared_memory", lambda _: 227 * 1024)
    q = torch.empty(1, 128, 2, 64, dtype=torch.bfloat16)
    number = torch.empty(1, 128, 2)
    if name == "efficient":
        normalised_triton.forward(normalised.Inputs(q, q, q), True, q, None)
        normalised_triton.backward(q, normalised.Inputs(q, q, q), True)
    else:
        unit = name == "rfa"
        x = Inputs(q, q, q, torch.empty(2, 128, 64, dtype=torch.bfloat16), number, number if unit else None)
        index = number.to(torch.int32)
        known = Weights(number) if unit else Weights(number, number, index, number, index, number, number, number)
        spec = Spec("gaussian" if unit else "softmax")
        featured_triton.forward(x, spec, known, q, None)
        featured_triton.backward(q, q, x, spec, known)
    assert len(built) == 2
    assert all(kernel.asm["cubin"] and kernel.metadata.shared <= 227 * 1024 for kernel in built)
