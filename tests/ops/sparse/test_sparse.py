"""Sparse attention against the masked dense softmax in float64: any union, any length, any sharing of heads."""

from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.ops.sparse import api, sparse_attention, tiles
from subquad.ops.sparse.patterns import Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary
from subquad.ops.sparse.spec import ordered_atoms
from subquad.ops.sparse.tiles import Job, Tiles, cut

PATTERNS: list[Pattern] = [
    Local(5, 0),
    Local(3) | Global(4),
    Local(7, 0) | Strided(7),
    Block(8) | Summary(8, 2),
    Local(4) | Global(3) | Random(2, 4, seed=1, apart=2),
    Dilated(3, 4) | Local(2),
    Strided(3) | Strided(5),
    Block(5, 1, 1) | Summary(6, 2, 1) | Dilated(2, 3),
    Random(2, 5, seed=3) | Random(1, 3),
    Dense() | Local(2),
    Global(60),
]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    causal: bool,
    lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition: every score, then the softmax over the pairs of the pattern."""
    (B, T, H, D), S = q.shape, k.shape[1]
    heads = [pattern] * H if isinstance(pattern, Pattern) else pattern
    k, v = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v))
    mask = torch.zeros(B, H, T, S, dtype=torch.bool)
    for b in range(B):
        t = T if lengths is None else min(T, int(lengths[b]))
        n = key_lengths if key_lengths is not None else lengths
        s = S if n is None else min(S, int(n[b]))
        for h in range(H):
            mask[b, h, :t, :s] = heads[h].dense(t, s, causal=causal)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (D**-0.5 if scale is None else scale)
    scores = torch.where(mask, scores, -1e300)
    seen = mask.any(-1, keepdim=True)
    o = torch.einsum("bhts,bshd->bthd", torch.softmax(scores, -1) * seen, v)
    lse = torch.where(seen[..., 0], torch.logsumexp(scores, -1), -inf)
    return o, lse.transpose(1, 2)


def inputs(B: int, T: int, S: int, H: int, Hkv: int, D: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, T, H, D), (B, S, Hkv, D), (B, S, Hkv, D))
    q, k, v = (torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes)
    return q, k, v


def agree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    causal: bool,
    lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
) -> None:
    """Values, log-sum-exp and the gradients through both."""
    want, want_lse = dense(q, k, v, pattern, causal, lengths, key_lengths, scale)
    o, lse = sparse_attention(
        q,
        k,
        v,
        pattern,
        causal=causal,
        lengths=lengths,
        key_lengths=key_lengths,
        scale=scale,
        return_lse=True,
        impl="torch",
    )
    torch.testing.assert_close(o, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-12)
    wo, wl = torch.randn_like(o), torch.randn_like(lse)

    def loss(o: Tensor, lse: Tensor) -> Tensor:
        return (o * wo).sum() + (wl * lse.masked_fill(lse == -inf, 0)).sum()

    got = torch.autograd.grad(loss(o, lse), (q, k, v))
    for a, b in zip(got, torch.autograd.grad(loss(want, want_lse), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


atoms = st.one_of(
    st.builds(Local, st.integers(0, 12), st.integers(0, 12)),
    st.builds(Dilated, st.integers(0, 4), st.integers(1, 7)),
    st.builds(Strided, st.integers(1, 11)),
    st.builds(Block, st.integers(1, 40), st.integers(0, 2), st.integers(0, 2)),
    st.integers(1, 12).flatmap(
        lambda size: st.integers(1, size).flatmap(
            lambda c: st.builds(Summary, st.just(size), st.just(c), st.integers(0, size // c - 1))
        )
    ),
    st.builds(Global, st.integers(1, 9)),
    st.builds(
        Random,
        st.integers(1, 3),
        st.integers(1, 7),
        st.integers(0, 3),
        apart=st.integers(0, 2),
        first=st.integers(0, 1),
        last=st.integers(0, 1),
    ),
    st.just(Dense()),
)


@st.composite
def unions(draw: st.DrawFn) -> Pattern:
    pattern, *others = draw(st.lists(atoms, min_size=1, max_size=4))
    for atom in others:
        pattern = pattern | atom
    return pattern


@given(unions(), st.integers(1, 45), st.booleans(), st.booleans(), st.sampled_from([(1, 1), (4, 2), (3, 1)]))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_any_union_is_the_dense_softmax(
    pattern: Pattern, T: int, causal: bool, ragged: bool, heads: tuple[int, int]
) -> None:
    lengths = torch.tensor([max(1, 2 * T // 3), T]) if ragged else None
    agree(*inputs(2, T, T, *heads, 3, seed=T), pattern, causal, lengths)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_many_tiles(pattern: Pattern, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # small tiles and chunks, so that a short sequence has interior tiles, edges and several chunks
    monkeypatch.setattr(tiles, "TILE", 8)
    monkeypatch.setattr(tiles, "BUDGET", 600)
    agree(*inputs(2, 71, 71, 2, 1, 3), pattern, causal, torch.tensor([71, 38]))


@pytest.mark.parametrize(
    "pattern", [Local(3), Local(8, 1), Local(1, 9), Local(4) | Global(2), Block(4, 1, 1)], ids=repr
)
def test_every_border(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lengths, so that interior tiles share one mask, and lengths that end anywhere in the last tile."""
    monkeypatch.setattr(tiles, "TILE", 8)
    for T in range(23, 42):
        agree(*inputs(1, T, T, 1, 1, 3, seed=T), pattern, causal=False)


@pytest.mark.parametrize("other", [Summary(2, 1), Strided(2), Random(1, 2), Local(1)], ids=repr)
def test_every_query_may_be_a_global_row(other: Pattern) -> None:
    for tokens in (2, 3, 4):
        agree(*inputs(2, 3, 5, 2, 1, 3), Global(tokens) | other, causal=False)


def test_default_tiles_across_several_tiles() -> None:
    agree(*inputs(1, 300, 300, 1, 1, 4), Local(40, 0) | Strided(40) | Summary(64, 3), True)


@given(unions(), st.integers(1, 30), st.integers(1, 30), st.booleans())
@settings(deadline=None, max_examples=25, derandomize=True)
def test_cross_lengths(pattern: Pattern, T: int, S: int, ragged: bool) -> None:
    lengths = torch.tensor([T, max(1, T // 2)]) if ragged else None
    key_lengths = torch.tensor([max(1, S // 3), S]) if ragged else None
    agree(*inputs(2, T, S, 2, 2, 3), pattern, False, lengths, key_lengths)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_one_pattern_per_head(heads: tuple[int, int]) -> None:
    x = inputs(2, 33, 33, *heads, 3)
    agree(*x, [Local(3, 0), Strided(4), Local(3, 0), Block(5) | Summary(5, 1)], True, torch.tensor([33, 20]))
    agree(*x, (Strided(4) | Local(2), Strided(4) | Local(2), Local(2), Local(2) | Strided(4)), False)


@given(
    st.integers(1, 12).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size))),
    st.lists(st.integers(0, 11), min_size=4, max_size=4),
    st.sampled_from([None, Local(3, 1), Block(4), Block(8, 1), Global(5) | Local(2), Strided(3), Random(1, 4)]),
    st.integers(1, 50),
    st.booleans(),
    st.booleans(),
    st.sampled_from([4, 2, 1]),
)
@settings(deadline=None, max_examples=40, derandomize=True)
def test_heads_that_shift_a_summary(
    size: tuple[int, int], shifts: list[int], other: Pattern | None, T: int, causal: bool, ragged: bool, kv: int
) -> None:
    own: list[Pattern] = [Summary(*size, shift % (size[0] // size[1])) for shift in shifts]
    patterns = own if other is None else [other | one for one in own]
    lengths = torch.tensor([T, max(1, T // 3)]) if ragged else None
    agree(*inputs(2, T, T, 4, kv, 3, seed=T), patterns, causal, lengths)


@pytest.mark.parametrize("causal", [True, False])
def test_blocks_and_their_summaries_in_whole_tiles(causal: bool) -> None:
    patterns = [Block(32) | Summary(32, 8, shift) for shift in (0, 3, 1, 1)]
    agree(*inputs(1, 150, 150, 4, 4, 3), patterns, causal)
    agree(*inputs(2, 150, 150, 4, 2, 3), patterns, causal, torch.tensor([150, 70]))


@pytest.mark.parametrize("triton", [True, False])
def test_heads_that_differ_in_a_shift_are_one_group(triton: bool) -> None:
    shifts = (0, 0, 1, 1, 2, 2, 3, 3)
    patterns: list[Pattern] = [Block(8) | Summary(8, 2, shift) for shift in shifts]
    (group,) = api._groups(tuple(p.to_json() for p in patterns), 8, 8, triton)
    assert (group.shifts, group.heads, group.kv) == (shifts, tuple(range(8)), tuple(range(8)))
    # key heads stay shared where the shift is, and one shift for all stays part of the pattern
    assert api._groups(tuple(p.to_json() for p in patterns), 8, 4, triton)[0].kv == (0, 1, 2, 3)
    assert api._groups(tuple(p.to_json() for p in patterns), 8, 2, triton)[0].kv == (0, 0, 0, 0, 1, 1, 1, 1)
    (group,) = api._groups((patterns[2].to_json(),) * 8, 8, 8, triton)
    assert (group.pattern, group.shifts) == (patterns[2].to_json(), ())
    # two summaries are different patterns
    both = tuple((Summary(4, 1) | Summary(8, 2, shift)).to_json() for shift in (0, 1))
    assert len(api._groups(both, 2, 2, triton)) == 2


def test_scale_zero_is_the_mean_and_lse_counts() -> None:
    q, k, v = inputs(1, 9, 9, 1, 1, 2)
    o, lse = sparse_attention(q, k, v, Local(2, 0), causal=True, scale=0.0, return_lse=True)
    torch.testing.assert_close(o[0, 5, 0], v[0, 3:6, 0].mean(0))
    torch.testing.assert_close(lse[0, :, 0].exp(), torch.tensor([1.0, 2, 3, 3, 3, 3, 3, 3, 3], dtype=torch.float64))


def test_padding_is_invisible_and_blind_queries_are_zero() -> None:
    q, k, v = inputs(2, 21, 21, 2, 2, 4)
    lengths = torch.tensor([21, 13])
    pattern = Local(2) | Global(2) | Random(1, 4)
    with torch.no_grad():
        k[1, 13:], v[1, 13:], q[1, 13:] = 1e6, inf, 1e6
        o, lse = sparse_attention(q, k, v, pattern, lengths=lengths, return_lse=True)
        alone = sparse_attention(q[1:, :13], k[1:, :13], v[1:, :13], pattern)
    torch.testing.assert_close(o[1:, :13], alone)
    assert bool((o[1, 13:] == 0).all())
    assert bool((lse[1, 13:] == -inf).all())
    # the first block of a causal Random has nothing before it
    o, lse = sparse_attention(*inputs(1, 8, 8, 1, 1, 2), Random(1, 4), causal=True, return_lse=True)
    assert bool((o[:, :4] == 0).all())
    assert bool((lse[:, :4] == -inf).all())
    (o.sum() + lse.masked_fill(lse == -inf, 0).sum()).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", [Local(16, 0) | Strided(16), Block(16) | Summary(16, 4), Local(8) | Global(4)])
def test_low_precision_is_within_twice_the_plain_expression(pattern: Pattern, dtype: torch.dtype) -> None:
    q, k, v = inputs(1, 150, 150, 2, 2, 16)
    low, plain = ([x.detach().to(dtype).requires_grad_() for x in (q, k, v)] for _ in range(2))
    exact = [x.detach().double().requires_grad_() for x in low]
    mask = pattern.dense(150, causal=True)
    o = sparse_attention(low[0], low[1], low[2], pattern, causal=True)
    want = dense(exact[0], exact[1], exact[2], pattern, True)[0]
    scores = torch.einsum("bthd,bshd->bhts", plain[0], plain[1]) / 4
    simple = torch.einsum("bhts,bshd->bthd", torch.softmax(scores.masked_fill(~mask, -inf), -1), plain[2])
    w = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert o.dtype == dtype
    for out in (o, want, simple):
        out.backward(w.to(out.dtype))
    pairs = [(o, want, simple)]
    pairs += [(a.grad, b.grad, c.grad) for a, b, c in zip(low, exact, plain, strict=True)]  # type: ignore[misc]
    for ours, reference, theirs in pairs:
        error, allowed = ((x.double() - reference).norm() for x in (ours, theirs))
        assert error <= 2 * allowed + 1e-6 * reference.norm()


def test_large_scores_stay_finite() -> None:
    q, k, v = (x.detach().float() for x in inputs(1, 40, 40, 1, 1, 4))
    q = (q * 1e4).requires_grad_()
    o = sparse_attention(q, k * 1e4, v, Local(3, 0) | Strided(8), causal=True)
    o.sum().backward()
    assert q.grad is not None
    assert bool(o.isfinite().all())
    assert bool(q.grad.isfinite().all())


def test_gradcheck() -> None:
    q, k, v = inputs(1, 11, 11, 2, 1, 2)
    pattern = Local(2) | Strided(4) | Global(1)
    assert torch.autograd.gradcheck(lambda q, k, v: sparse_attention(q, k, v, pattern, return_lse=True), (q, k, v))


def test_operator_traces_and_compiles() -> None:
    q, k, v = inputs(1, 13, 13, 2, 1, 2)
    pattern = Local(2, 0) | Strided(4)
    for args in ((None, None), (torch.tensor([9]), None)):
        torch.library.opcheck(
            torch.ops.subquad.sparse.default, (q, k, v, *args, pattern.to_json(), [], [], True, 1.0, True, "torch")
        )
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, k, v: sparse_attention(q, k, v, pattern, causal=True), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(q, k, v), sparse_attention(q, k, v, pattern, causal=True))


def _tile_elements(pattern: Pattern, T: int, causal: bool) -> int:
    """Scores that the plan computes for one head."""
    return sum(_scores(some) for some in cut(_job(pattern, T, causal)))


def _job(pattern: Pattern, T: int, causal: bool) -> Job:
    atoms = ordered_atoms(pattern.to_json(), causal)
    first_columns = {a: [a.l - a.c * (a.shift + 1)] for a in atoms if isinstance(a, Summary)}
    return Job(atoms, first_columns, T, T, causal, None, 64, torch.device("cpu"))


def _scores(some: Tiles) -> int:
    return some.queries.numel() * some.keys.shape[-1]


@pytest.mark.parametrize(
    "pattern",
    [Local(128, 0) | Strided(128), Block(128) | Summary(128, 32), Local(511, 0), Local(256, 256) | Global(64)],
    ids=repr,
)
def test_work_follows_the_pattern(pattern: Pattern) -> None:
    for T in (4096, 8192):
        causal = not any(isinstance(a, Global) for a in pattern.atoms)
        assert _tile_elements(pattern, T, causal) <= 2.6 * pattern.pairs(T, causal=causal)


def test_tiles_alive_at_once_are_bounded() -> None:
    for T in (2048, 8192):
        for some in cut(_job(Strided(2) | Summary(4, 1) | Global(8), T, True)):
            # the budget, or else a single tile of queries
            assert _scores(some) <= max(tiles.BUDGET, tiles.TILE * T)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": (1, 6, 2, 3)}, "causal=True needs as many keys"),
        ({"k": (1, 5, 3, 3), "v": (1, 5, 3, 3)}, "multiple of Hkv"),
        ({"v": (1, 5, 2, 4)}, r"v \(1, 5, 2, 4\)"),
        ({"q": (5, 2, 3)}, r"q has shape \(5, 2, 3\)"),
        ({"q": (1, 0, 2, 3), "k": (1, 0, 2, 3), "v": (1, 0, 2, 3)}, "no empty dimension"),
        ({"pattern": [Local(2)]}, "one for each of the 2 query heads"),
        ({"pattern": "local"}, "pattern"),
        ({"lengths": torch.tensor([1, 2])}, "one integer a row"),
        ({"lengths": torch.tensor([1.0])}, "accepted are integers"),
        ({"key_lengths": torch.tensor([3])}, "cross-attention"),
        ({"impl": "cuda"}, "impl='cuda'"),
        ({"impl": "triton"}, 'impl="triton"'),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], says: str) -> None:
    call: dict[str, Any] = {"q": (1, 5, 2, 3), "k": (1, 5, 2, 3), "v": (1, 5, 2, 3), "pattern": Local(2)} | change
    if change.get("k") == (1, 6, 2, 3):
        call["v"] = (1, 6, 2, 3)
    x = {n: torch.zeros(call.pop(n), dtype=torch.float64) for n in ("q", "k", "v")}
    with pytest.raises(ValueError, match=says):
        sparse_attention(x["q"], x["k"], x["v"], **call, causal=True)


def test_types_must_agree() -> None:
    q, k, v = inputs(1, 4, 4, 1, 1, 2)
    with pytest.raises(ValueError, match="one floating point type"):
        sparse_attention(q.float(), k, v, Local(1))
