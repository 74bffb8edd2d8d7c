"""The fused kernels against the dense definition in float64, through Triton's interpreter, and compiled for sm_90.

The interpreter is chosen when triton is first imported, so its tests run in a process of their own: `test_kernels.py`
runs this file again with TRITON_INTERPRET set.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.ops.linear import fused, linear_attention
from subquad.ops.linear.operators import attend, fused_step
from subquad.ops.linear.spec import Inputs, Spec
from tests.ops.own_process import compiled, interpreted

pytest.importorskip("triton")

MAPS = {"elu+1": lambda x: F.elu(x) + 1, "relu": F.relu, "exp": torch.exp, "identity": lambda x: x}
BASE: dict[str, Any] = {
    "causal": True, "feature_map": "elu+1", "signed": False, "normalize": True, "eps": 1e-6,
    "lengths": None, "cu_seqlens": None, "log_gate": None, "s0": None, "z0": None,
}  # fmt: skip


def fused_attention(q: Tensor, k: Tensor, v: Tensor, **opt: Any) -> tuple[Tensor, ...]:
    tensors = {name: opt.pop(name) for name in Inputs._fields if name in opt}
    return attend(Inputs(q, k, v, **tensors), Spec(**opt), "triton")


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MIN_SEGMENT", 32)
    monkeypatch.setattr(fused, "PROGRAMS", 1 << 20)


def test_segments_are_longer_where_many_programs_walk_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "PROGRAMS", 64)
    monkeypatch.setattr(fused, "WALKS", 8)
    few, many = (torch.empty(1, 512, heads, 1) for heads in (7, 8))
    segments = [fused.segment_of(x, x, causal) for x in (few, many) for causal in (True, False)]
    assert segments == [64, 32, 512, 32]


def one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    s0: Tensor | None,
    z0: Tensor | None,
    keys: int,
    opt: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition for one sequence: q [T, H, K], k [S, H, K], v [S, H, V], of which `keys` keys are real."""
    t, s = q.shape[0], k.shape[0]
    keep = torch.arange(s) < keys
    q, k = MAPS[opt["feature_map"]](q), MAPS[opt["feature_map"]](k) * keep[:, None, None]
    age = torch.zeros(t, q.shape[1], dtype=q.dtype) if gate is None else torch.cumsum(gate * keep[:, None], 0)
    a = torch.einsum("thk,shk->hts", q, k)
    if opt["causal"]:
        a = a * (age.T[:, :, None] - age.T[:, None, :]).tril().exp().tril()
    num, den = torch.einsum("hts,shv->thv", a, v), a.sum(-1).T
    late = (age[-1:] - age).exp()[..., None] if opt["causal"] else torch.ones(s, q.shape[1], 1, dtype=q.dtype)
    state, norm = torch.einsum("shk,shv->hkv", k * late, v), (k * late).sum(0)
    if s0 is not None and z0 is not None:
        num = num + torch.einsum("thk,hkv->thv", q, s0) * age.exp()[..., None]
        den = den + torch.einsum("thk,hk->th", q, z0) * age.exp()
        last = age.exp()[-1] if opt["causal"] and t else torch.ones(q.shape[1], dtype=q.dtype)
        state, norm = state + s0 * last[:, None, None], norm + z0 * last[:, None]
    if opt["normalize"]:
        den = torch.where(den < 0, -1.0, 1.0) * den.abs().clamp(min=opt["eps"]) if opt["signed"] else den + opt["eps"]
        num = num / den[..., None]
    real = keys if s == t else t
    return num * (torch.arange(t) < real)[:, None, None], state, norm


def dense(q: Tensor, k: Tensor, v: Tensor, **opt: Any) -> tuple[Tensor, ...]:
    gate, s0, z0 = opt["log_gate"], opt["s0"], opt["z0"]
    pick = lambda x, i: None if x is None else x[i]  # noqa: E731
    if opt["cu_seqlens"] is not None:
        spans = list(itertools.pairwise(opt["cu_seqlens"].tolist()))
        parts = [
            one(
                q[0, a:b],
                k[0, a:b],
                v[0, a:b],
                None if gate is None else gate[0, a:b],
                pick(s0, i),
                pick(z0, i),
                b - a,
                opt,
            )
            for i, (a, b) in enumerate(spans)
        ]
        return torch.cat([p[0] for p in parts])[None], *(torch.stack([p[j] for p in parts]) for j in (1, 2))
    sizes = [k.shape[1]] * len(q) if opt["lengths"] is None else opt["lengths"].tolist()
    parts = [one(q[i], k[i], v[i], pick(gate, i), pick(s0, i), pick(z0, i), n, opt) for i, n in enumerate(sizes)]
    return tuple(torch.stack([p[j] for p in parts]) for j in range(3))


def draw(b: int, t: int, s: int, h: int, k: int, v: int, n: int, gate: bool, init: bool) -> list[Tensor | None]:
    torch.manual_seed(b * t + k)
    out: list[Tensor | None] = [torch.randn(b, x, h, w).double() for x, w in ((t, k), (s, k), (s, v))]
    out.append(-torch.rand(b, t, h).double() * 0.3 if gate else None)
    out += [torch.randn(n, h, k, v).double(), torch.rand(n, h, k).double() * 3] if init else [None, None]
    return [None if x is None else x.requires_grad_() for x in out]


def compare(
    b: int, t: int, h: int, k: int, v: int, s: int | None = None, gate: bool = False, init: bool = False, **more: Any
) -> None:
    """Outputs, states and the gradients of every input, to the last digits of float64."""
    for name in ("lengths", "cu_seqlens"):
        if more.get(name) is not None:
            more[name] = torch.tensor(more[name], dtype=torch.int32)
    n = b if more.get("cu_seqlens") is None else len(more["cu_seqlens"]) - 1
    tensors = draw(b, t, s or t, h, k, v, n, gate, init)
    q, key, val, g, s0, z0 = tensors
    opt = BASE | more | {"log_gate": g, "s0": s0, "z0": z0}
    leaves = [x for x in tensors if x is not None]
    ours, exact = fused_attention(q, key, val, **opt), dense(q, key, val, **opt)
    weights = [torch.randn_like(x) for x in exact]
    grads = [torch.autograd.grad(x, leaves, weights) for x in (ours, exact)]
    for x, y in zip((*ours, *grads[0]), (*exact, *grads[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        {"t": 1, "init": True, "gate": True},
        {"t": 40, "h": 2, "k": 20, "v": 24, "init": True},
        {"t": 70, "gate": True, "init": True},
        {"t": 70, "b": 2, "gate": True, "lengths": [70, 37]},
        {"t": 40, "b": 2, "lengths": [0, 33]},
        {"t": 60, "gate": True, "init": True, "cu_seqlens": [0, 40, 40, 41, 60]},
        {"t": 70, "causal": False, "init": True},
        {"t": 50, "s": 70, "b": 2, "causal": False, "lengths": [70, 33]},
        {"t": 50, "b": 2, "causal": False, "lengths": [0, 33], "feature_map": "exp"},
        {"t": 60, "causal": False, "init": True, "cu_seqlens": [0, 40, 40, 41, 60]},
        {"t": 40, "feature_map": "identity", "signed": True, "eps": 1e-2},
        {"t": 40, "feature_map": "relu", "normalize": False, "gate": True},
        {"t": 40, "feature_map": "exp", "normalize": False},
        {"t": 40, "k": 80, "v": 48, "gate": True, "init": True},  # blocks of K and of V
        {"t": 40, "k": 33, "v": 70, "gate": True, "feature_map": "identity", "normalize": False},
        {"t": 70, "b": 2, "k": 64, "gate": True, "lengths": [70, 37], "feature_map": "identity", "signed": True},
        {"t": 40, "k": 80, "v": 48},
        {"t": 40, "k": 48, "v": 80, "causal": False},
    ],
    ids=lambda case: " ".join(f"{k}={v}" for k, v in case.items()),
)
def test_equals_the_definition(case: dict[str, Any]) -> None:
    compare(**({"b": 1, "h": 1, "k": 16, "v": 16} | case))


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        {"t": 33, "gate": True, "init": True},
        {"t": 33, "gate": True, "normalize": False},
        {"t": 32},
        {"t": 33, "b": 2, "causal": False, "init": True, "lengths": [33, 20]},
    ],
    ids=lambda case: " ".join(f"{k}={v}" for k, v in case.items()),
)
def test_sequences_of_one_segment(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MIN_SEGMENT", 64)
    compare(**({"b": 1, "h": 1, "k": 16, "v": 16} | case))


@interpreted
@pytest.mark.parametrize("segment", [32, 128])
@pytest.mark.parametrize("cuts", [None, [0, 40, 40, 41, 60]])
def test_gates_without_gradients_of_the_last_state(
    cuts: list[int] | None, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nothing pulls at z, and its gradient is zero."""
    monkeypatch.setattr(fused, "MIN_SEGMENT", segment)
    n = 1 if cuts is None else len(cuts) - 1
    leaves = draw(1, 60, 60, 1, 16, 16, n, True, True)
    q, k, v, g, s0, z0 = leaves
    packed = None if cuts is None else torch.tensor(cuts, dtype=torch.int32)
    opt = BASE | {"normalize": False, "log_gate": g, "s0": s0, "z0": z0, "cu_seqlens": packed}
    ours, exact = (fn(q, k, v, **opt)[0] for fn in (fused_attention, dense))
    w = torch.randn_like(exact)
    found = torch.autograd.grad(ours, leaves, w)
    wanted = torch.autograd.grad(exact, leaves, w, allow_unused=True)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, rtol=1e-9, atol=1e-9)


@interpreted
def test_calls_with_other_types_are_of_another_kind() -> None:
    """A feature map of the caller's may give q and k another type than v has."""
    from subquad.ops.linear.launches_triton import Call
    from subquad.ops.linear.spec import Inputs, Spec

    q, k, v = (torch.randn(1, 20, 1, 16) for _ in range(3))
    spec, halves = Spec(True, "identity", False, True, 1e-6), (torch.float32, torch.float16, torch.bfloat16)
    given = [(q, k.to(kind), v.to(other)) for kind in halves for other in halves]
    assert len({Call(Inputs(*x), spec).kind for x in given}) == len(given)


@interpreted
@pytest.mark.parametrize("keys", [20, 33])
def test_padded_keys_through_the_dispatcher(keys: int) -> None:
    """key_lengths pads the keys alone, also where there happen to be as many queries."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 20, 1, 16), torch.randn(2, keys, 1, 16), torch.randn(2, keys, 1, 16)
    padded: dict[str, Any] = {"causal": False, "key_lengths": torch.tensor([keys, 7])}
    o = linear_attention(q, k, v, **padded, impl="triton")
    torch.testing.assert_close(o, linear_attention(q, k, v, **padded, impl="torch"), rtol=1e-4, atol=1e-5)
    alone = linear_attention(q[1:], k[1:, :7], v[1:, :7], causal=False, impl="torch")
    torch.testing.assert_close(o[1:], alone, rtol=1e-4, atol=1e-5)


@interpreted
@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=3).filter(lambda sizes: sum(sizes) > 0), st.booleans())
def test_any_packing(sizes: list[int], causal: bool) -> None:
    compare(1, sum(sizes), 1, 16, 16, cu_seqlens=[0, *itertools.accumulate(sizes)], causal=causal)


@interpreted
def test_gradcheck() -> None:
    leaves = [x for x in draw(1, 9, 9, 1, 4, 3, 1, True, True) if x is not None]

    def fn(*x: Tensor) -> tuple[Tensor, ...]:
        return fused_attention(*x[:3], **BASE | {"log_gate": x[3], "s0": x[4], "z0": x[5]})

    assert torch.autograd.gradcheck(fn, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(fn, leaves, fast_mode=True)


@interpreted
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_error_at_most_twice_that_of_the_plain_expression(
    dtype: torch.dtype, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "MIN_SEGMENT", 64)  # a chunk of two bytes a number is that long
    torch.manual_seed(0)
    leaves = [torch.randn(1, 70, 1, 16).to(dtype).requires_grad_() for _ in range(3)]
    if gated:
        leaves.append((-0.3 * torch.rand(1, 70, 1)).to(dtype).requires_grad_())
    exact = [x.detach().double().requires_grad_() for x in leaves]
    ours, rough, true = (
        fn(*x[:3], **BASE | ({"log_gate": x[3]} if gated else {}))
        for fn, x in ((fused_attention, leaves), (dense, leaves), (dense, exact))
    )
    assert [x.dtype for x in ours] == [dtype, torch.float32, torch.float32]
    w = torch.randn_like(ours[0])
    grads = [
        torch.autograd.grad(o[0], x, w.to(o[0].dtype)) for o, x in ((ours, leaves), (rough, leaves), (true, exact))
    ]
    for x, y, z in zip((*ours, *grads[0]), (*rough, *grads[1]), (*true, *grads[2]), strict=True):
        assert (x.double() - z).norm() <= 2 * (y.double() - z).norm() + 1e-7 * z.norm()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("feature_map", ["elu+1", "relu", "identity"])
def test_large_inputs_stay_finite(dtype: torch.dtype, feature_map: str) -> None:
    torch.manual_seed(0)
    x = [((torch.rand(1, 40, 1, 16) * 2 - 1) * 1e4).to(dtype).requires_grad_() for _ in range(3)]
    signed = feature_map == "identity"
    out = fused_attention(*x, **BASE | {"feature_map": feature_map, "signed": signed})
    for y in (*out, *torch.autograd.grad(out[0].float().sum(), x)):
        assert torch.isfinite(y).all()


@interpreted
def test_closed_gates_forget_exactly() -> None:
    torch.manual_seed(0)
    x = [torch.randn(1, 70, 1, 16, requires_grad=True) for _ in range(3)]
    gate = torch.zeros(1, 70, 1)
    gate[:, 20] = -1e4
    gate[:, 50:] = -1e4
    gate.requires_grad_()
    out = fused_attention(*x, **BASE | {"log_gate": gate})
    fresh = fused_attention(*(y[:, 20:50] for y in x), **BASE)
    torch.testing.assert_close(out[0][:, 20:50], fresh[0], rtol=2e-4, atol=1e-5)
    torch.testing.assert_close(out[0][:, 50:], x[2][:, 50:], rtol=1e-4, atol=1e-5)
    for y in torch.autograd.grad(out[0].square().sum(), [*x, gate]):
        assert torch.isfinite(y).all()


@interpreted
@pytest.mark.parametrize("steep", [0.1, 2.0, 10.0])
def test_gradients_of_gates_are_exact_to_the_type(steep: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding does not add up over a segment, and sums that have decayed to almost nothing stay finite."""
    monkeypatch.setattr(fused, "MIN_SEGMENT", 128)
    torch.manual_seed(0)
    x = [torch.randn(1, 300, 1, 16).half().requires_grad_() for _ in range(3)]
    gate = (-steep * torch.rand(1, 300, 1)).requires_grad_()
    exact = [y.detach().double().requires_grad_() for y in (*x, gate)]
    options = BASE | {"feature_map": "identity", "signed": True, "normalize": False}
    o = fused_attention(*x, **options | {"log_gate": gate})[0]
    true = dense(*exact[:3], **options | {"log_gate": exact[3]})[0]
    w = torch.randn_like(o)
    found = torch.autograd.grad(o, (*x, gate), w)
    wanted = torch.autograd.grad(true, exact, w.double())
    for y, z in zip(found, wanted, strict=True):
        assert (y.double() - z).norm() <= 1e-3 * z.norm()


@interpreted
def test_a_call_is_one_graph_for_the_compiler() -> None:
    x = [torch.randn(1, 20, 1, 16) for _ in range(3)]
    compiled_attention = torch.compile(linear_attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled_attention(*x, impl="triton"), linear_attention(*x, impl="triton"))


@interpreted
def test_views_of_one_projection_are_read_in_place() -> None:
    qkv = torch.randn(2, 40, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    views, copies = qkv.unbind(2), [x.contiguous() for x in qkv.unbind(2)]
    for x, y in zip(fused_attention(*views, **BASE), fused_attention(*copies, **BASE), strict=True):
        assert torch.equal(x, y)


@interpreted
@pytest.mark.parametrize("gated", [False, True])
def test_step_continues_the_sequence(gated: bool) -> None:
    q, k, v, g, s0, z0 = (None if x is None else x.detach() for x in draw(2, 3, 3, 2, 20, 24, 2, gated, True))
    assert q is not None
    assert k is not None
    assert v is not None
    assert s0 is not None
    assert z0 is not None
    whole = dense(q, k, v, **BASE | {"log_gate": g, "s0": s0, "z0": z0})
    spec = Spec(feature_map="elu+1", signed=False, normalize=True, eps=1e-6)
    s, z = s0.clone(), z0.clone()
    for t in range(3):
        args = (q[:, t], k[:, t], v[:, t])
        gate = None if g is None else g[:, t]
        kept = s.clone()
        o, s1, z1 = fused_step(*args, gate, None, s, z, spec, inplace=False)
        assert torch.equal(s, kept), "step is pure unless asked"
        o2, s2, z2 = fused_step(*args, gate, None, s, z, spec, inplace=True)
        assert s2 is s
        assert z2 is z
        torch.testing.assert_close((o2, s, z), (o, s1, z1))
        torch.testing.assert_close(o, whole[0][:, t])
    torch.testing.assert_close((s, z), whole[1:])


@interpreted
def test_the_operators_are_well_formed() -> None:
    q, k, v, g, s0, z0 = draw(1, 9, 9, 1, 16, 16, 1, True, True)
    options = ("elu+1", False, True, 1e-6)
    last = (*options, "triton", True)
    ops = torch.ops.subquad
    torch.library.opcheck(ops.linear_attention.default, (q, k, v, g, None, None, s0, z0, True, *last))
    torch.library.opcheck(ops.linear_attention.default, (q, k, v, None, None, None, None, None, False, *last))
    row = [None if x is None else x.detach()[:, 0] for x in (q, k, v, g, None)]
    state = [x.detach() for x in (s0, z0) if x is not None]
    torch.library.opcheck(ops.linear_attention_step.default, (*row, *state, True, *options))
    torch.library.opcheck(ops.linear_attention_step_.default, (*row, *state, True, *options))


@interpreted
def test_compiles_without_a_graph_break_and_recomputes_under_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v, *_ = draw(1, 20, 20, 1, 16, 16, 1, False, False)

    def loss(*x: Tensor) -> Tensor:
        o, s, z = fused_attention(*x, **BASE)
        return o.square().sum() + s.sum() + z.square().sum()

    leaves = [x for x in (q, k, v) if x is not None]
    plain = torch.autograd.grad(loss(*leaves), leaves)
    graph = torch.compile(loss, fullgraph=True, backend="aot_eager")
    again = torch.autograd.grad(checkpoint(loss, *leaves, use_reentrant=False), leaves)
    for x, y, z in zip(plain, torch.autograd.grad(graph(*leaves), leaves), again, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, z)


@interpreted
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_q_k_and_v_lie_side_by_side_as_they_do(causal: bool) -> None:
    whole = torch.randn(2, 70, 2 * 3 * 20, dtype=torch.float64)
    parts = [part.view(2, 70, 2, 20) for part in whole.split(40, -1)]
    results = []
    for some in (parts, [part.contiguous() for part in parts]):
        leaves = [part.detach().requires_grad_() for part in some]
        o = fused_attention(*leaves, **BASE | {"causal": causal})[0]
        results.append(torch.autograd.grad(o, leaves, o.detach().cos()))
    beside, alone = results
    assert [g.stride(1) for g in beside] == [120] * 3
    assert {g.untyped_storage().data_ptr() for g in beside} == {beside[0].untyped_storage().data_ptr()}
    for a, b in zip(beside, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@interpreted
def test_unknown_feature_map_is_refused() -> None:
    x = torch.randn(1, 4, 1, 16)
    with pytest.raises(ValueError, match="feature_map='tanh'"):
        fused_attention(x, x, x, **BASE | {"feature_map": "tanh"})


@compiled
@pytest.mark.parametrize("kernel", ["forward", "backward_q", "backward_kv"])
def test_small_heads_compute_operands_once(kernel: str) -> None:
    exponentials = [_compiled(kernel, False, 32, once).asm["ptx"].count("ex2.approx") for once in (False, True)]
    assert exponentials[1] < exponentials[0]


@compiled
@pytest.mark.parametrize(
    ("kernel", "gated"),
    [
        ("states", True),
        ("scan", True),
        ("step", False),
        ("step", True),
        ("backward_q", False),
        ("backward_kv", False),
        ("walk_s", True),
        ("walk_r", True),
        ("gradients", True),
    ]
    + [("forward", gated) for gated in (False, True)],
)
def test_compiles_for_hopper(kernel: str, gated: bool) -> None:
    """The real compiler accepts every kernel; registers and shared memory are within a multiprocessor's."""
    compiled = _compiled(kernel, gated, 64, False)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 227 * 1024


def _compiled(kernel: str, gated: bool, width: int, once: bool) -> Any:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops.linear import kernels_triton, launches_triton

    walks = launches_triton.WALKS
    fn = walks[kernel].kernel if kernel in walks else getattr(kernels_triton, kernel)
    cfg = launches_triton.config(kernel, True, width, width, 2, many=width < 64)
    half = {"q", "k", "v", "o", "do", "dq", "dk", "dv", "x", "y", "kept", "before", "after"}
    numbers = {"eps": "fp32"} | dict.fromkeys(("cu", "owner", "lengths"), "*i32")
    constants = {
        "K": width, "V": width, "C": cfg.chunk, "BK": width, "BV": width, "MAP": "elu+1", "CAUSAL": True,
        "SIGNED": False,
        "NORM": True, "GATED": gated, "PACKED": gated, "LENGTHS": False, "INIT": True, "SPLIT": True, "SAVE": True,
        "FINAL": True, "START": False, "GATE": 1, "DELTA": gated,
        "EVEN": not gated, "REVERSE": gated, "U": 16, "BE": 128, "INPLACE": True,
        "H": 16, "QT": 1024, "KT": 1024, "VT": 1024, "OT": 1024, "XT": 1024, "YT": 1024, "DK": True, "DV": True,
        "GQ": 3072, "GK": 3072, "GV": 3072, "ONCE": once, "BACK": kernel == "walk_r", "WITH_Z": True,
        "DOT": tl.bfloat16, "ACC": tl.float32, "PREC": "ieee",
    }  # fmt: skip
    scalars = {"T", "L", "NS", "H", "SLOTS"}
    signature, constexprs = {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constants and fn.params[i].is_constexpr:
            signature[name] = "constexpr"
            constexprs[(i,)] = constants[name]
        elif name in numbers:
            signature[name] = numbers[name]
        elif name in scalars or (len(name) == 2 and name[1] in "bth" and name[0] in "qkvgoszbxy"):
            signature[name] = "i32"
        else:
            signature[name] = "*bf16" if name in half else "*fp32"
    source = ASTSource(fn=fn, signature=signature, constexprs=constexprs)
    options = {"num_warps": cfg.warps, "num_stages": cfg.stages, "maxnreg": cfg.registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
