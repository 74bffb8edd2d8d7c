import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subquad.ops.sparse.cache import ROWS, SparseCache, SparseState
from subquad.ops.sparse.patterns import Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary

B, H, K = 2, 4, 3

PATTERNS: dict[str, list[Pattern]] = {
    "ring": [Local(5, 0)] * H,
    "no history": [Local(0)] * H,
    "dilated heads": [Local(3), Local(3), Dilated(3, 2), Dilated(2, 5)],
    "pinned": [Local(4) | Global(3)] * H,
    "pinned beyond the ring": [Local(1) | Global(9)] * H,
    "pinned alone": [Global(2)] * H,
    "open block": [Block(6)] * H,
    "open block and neighbour": [Block(4, 1)] * H,
    "summaries": [Block(6) | Summary(6, 2)] * H,
    "summaries per head": [Block(6) | Summary(6, 2, shift) for shift in (0, 0, 1, 2)],
    "summaries alone": [Summary(5, 2)] * H,
    "summaries for some": [Block(5), Block(5), Summary(5, 1), Summary(5, 1, 1)],
    "summaries and pinned": [Local(2) | Global(4) | Summary(5, 2)] * H,
    "two kinds of summary": [Block(4) | Summary(4, 1), Block(4) | Summary(4, 2), Block(6) | Summary(6, 1), Local(1)],
    "stride": [Local(4, 0) | Strided(4)] * H,
    "random": [Block(3, 1) | Global(3) | Random(2, 3, 1, head, apart=2, first=1) for head in range(H)],
    "dense": [Dense()] * H,
    "windows that look ahead too": [Local(2, 5), Dilated(2, 3), Block(5, 1, 2), Global(2)],
    "blocks drawn beside a window": [Random(2, 3), Random(1, 2) | Local(4), Local(4), Global(1)],
}
over_patterns = pytest.mark.parametrize("patterns", PATTERNS.values(), ids=PATTERNS.keys())


def tokens(T: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, B, T, H, K, generator=generator, dtype=torch.float64).unbind()  # type: ignore[return-value]


def dense(q: Tensor, k: Tensor, v: Tensor, patterns: list[Pattern]) -> Tensor:
    allowed = torch.stack([pattern.dense(q.shape[1], causal=True) for pattern in patterns])
    weights = (torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)).exp() * allowed
    return torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True).clamp(min=1e-300), v)


@over_patterns
@settings(deadline=None, max_examples=8, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 14), st.integers(0, 14)), min_size=1, max_size=9),
    capacity=st.integers(1, 60),
)
def test_any_split_of_ragged_rows_equals_dense(
    patterns: list[Pattern], sizes: list[tuple[int, int]], capacity: int
) -> None:
    q, k, v = tokens(130)
    want = dense(q, k, v, patterns)
    cache = SparseCache(patterns)
    state = cache.empty(B, H, K, capacity, q)
    for size in sizes:
        at, lengths = state.position.tolist(), torch.tensor(size)
        new_q, new_k, new_v = (torch.stack([t[b, at[b] : at[b] + max(size)] for b in range(B)]) for t in (q, k, v))
        for t in (new_k, new_v):  # what is beyond a row's length must not be seen, nor stored
            t.masked_fill_((torch.arange(max(size)) >= lengths[:, None])[..., None, None], 1e9)
        before = [t.clone() for t in state]
        o, new = cache.attend(new_q, new_k, new_v, state, lengths)
        assert all(torch.equal(old, kept) for old, kept in zip(before, state, strict=True))
        for b in range(B):
            torch.testing.assert_close(o[b, : size[b]], want[b, at[b] : at[b] + size[b]], rtol=1e-10, atol=1e-10)
        extended = cache.extend(state, new_k, new_v, lengths)
        assert torch.equal(extended.position, new.position)
        state = new


@over_patterns
def test_one_long_prompt_then_steps_equals_dense(patterns: list[Pattern]) -> None:
    T = ROWS + 40
    q, k, v = tokens(T)
    want = dense(q, k, v, patterns)
    cache = SparseCache(patterns)
    empty = cache.empty(B, H, K, 1, q)
    o, continued = cache.attend(q[:, : T - 3], k[:, : T - 3], v[:, : T - 3], empty)
    torch.testing.assert_close(o, want[:, : T - 3], rtol=1e-10, atol=1e-10)
    for start in (continued, cache.extend(empty, k[:, : T - 3], v[:, : T - 3])):
        state = start
        for t in range(T - 3, T):
            o, state = cache.attend(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], state)
            torch.testing.assert_close(o[:, 0], want[:, t], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("ring", 6),
        ("dilated heads", 11),
        ("pinned", 5 + 3),
        ("open block", 6),
        ("open block and neighbour", 8),
        ("summaries", 6 + 2 * 17),
        ("summaries per head", 6 + 2 * 17),
        ("summaries alone", 2 * 20),
        ("stride", 100),
        ("random", 100),
    ],
)
def test_the_cache_is_as_large_as_the_reach(name: str, slots: int) -> None:
    cache = SparseCache(PATTERNS[name])
    assert cache.size(100) == slots
    q, k, v = tokens(100)
    state = cache.empty(B, H, K, 100, q)
    assert state.k.shape == (B, slots, H, K)
    for t in range(0, 100, 5):
        _, state = cache.attend(q[:, t : t + 5], k[:, t : t + 5], v[:, t : t + 5], state)
    assert state.k.shape == state.v.shape == (B, slots, H, K), "reallocated inside its capacity"


@pytest.mark.parametrize(
    ("patterns", "slots"),
    [
        (Local(15, 0), 16),
        (Local(15, 0) | Global(4), 16 + 4),
        (Block(10) | Summary(10, 2), 10 + 100 * 2),
        ([Local(3), Dilated(5, 4), Global(1)], 21 + 1),
        ([Block(5, 1, 2), Local(2, 5)], 10),
        (Strided(4), 1000),
        (Random(1, 4), 1000),
    ],
)
def test_the_longest_reach_of_all_heads_decides(patterns: Pattern | list[Pattern], slots: int) -> None:
    assert SparseCache(patterns).size(1000) == slots


def test_one_pattern_serves_all_heads() -> None:
    q, k, v = tokens(20)
    for pattern in (Local(4) | Global(2), Local(2, 0) | Strided(4)):
        one, each = SparseCache(pattern), SparseCache([pattern] * H)
        o, state = one.attend(q, k, v, one.empty(B, H, K, 20, q))
        assert torch.equal(o, each.attend(q, k, v, each.empty(B, H, K, 20, q))[0])
        assert state.k.shape[2] == H


def test_growth_is_rare_and_windows_never_grow() -> None:
    q, k, v = tokens(120)
    shapes = {}
    for name in ("ring", "summaries", "stride"):
        cache = SparseCache(PATTERNS[name])
        state = cache.empty(B, H, K, 1, q)
        seen = set()
        for t in range(120):
            _, state = cache.attend(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], state)
            seen.add(state.k.shape[1])
        shapes[name] = seen
    assert shapes["ring"] == {6}
    assert len(shapes["summaries"]) <= 5
    assert len(shapes["stride"]) <= 9


def test_gradients_flow_through_the_cache() -> None:
    patterns = PATTERNS["summaries per head"]
    q, k, v = inputs = [t.clone().requires_grad_() for t in tokens(20)]

    def through_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = SparseCache(patterns)
        state: SparseState = cache.empty(B, H, K, 20, q)
        outputs = []
        for start, stop in ((0, 9), (9, 10), (10, 20)):
            o, state = cache.attend(q[:, start:stop], k[:, start:stop], v[:, start:stop], state)
            outputs.append(o)
        return torch.cat(outputs, 1)

    weight = tokens(20, seed=3)[0]
    got = torch.autograd.grad((through_cache(q, k, v) * weight).sum(), inputs)
    want = torch.autograd.grad((dense(q, k, v, patterns) * weight).sum(), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_cached_keys_keep_their_type() -> None:
    q, k, v = (t.bfloat16() for t in tokens(12))
    for name in ("ring", "summaries", "stride"):
        cache = SparseCache(PATTERNS[name])
        o, state = cache.attend(q, k, v, cache.empty(B, H, K, 4, q))
        assert o.dtype == state.k.dtype == state.v.dtype == torch.bfloat16
        want = dense(q.double(), k.double(), v.double(), PATTERNS[name])
        assert float((o.double() - want).abs().max()) < 0.05
