"""Attention over an index: the index against its definition, and the kernels against their torch twin.

Interpreted tests need their own process, as in test_linear_triton.
"""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from subquad.ops import ordered
from subquad.ops.ordered import (
    Order,
    Rule,
    by_asking,
    by_blocks,
    by_lists,
    by_place,
    by_rank,
    ordered_attention,
    to_lists,
)
from tests.ops.own_process import compiled, interpreted
from tests.ops.test_buckets import chunks_by_rank, chunks_by_sorting, few, tokens_of

B, T, H, D = 2, 37, 2, 5


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "TILE", 16)


def visible(order: Order, ahead: bool) -> Tensor:
    """Who sees whom by the codes, [T, S], of an order of one row."""
    assert order.query_code is not None
    assert order.key_code is not None
    gap = order.query_code[0, 0, :, 0, None] - order.key_code[0, 0, :, 0]
    return (gap >= -int(ahead)) & (gap <= 1)


def covered(tokens: Tensor, others: Tensor, table: Tensor, size: int) -> Tensor:
    """Which pairs the tiles of a table compute, [tokens, others]; every token must be in one tile."""
    pairs, times = torch.zeros(size, size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64)
    for first, stop, lo, hi in table.tolist():
        assert stop - first <= 16
        times[tokens[first:stop].long()] += 1
        pairs[tokens[first:stop].long()[:, None], others[lo:hi].long()] = True
    assert (times == 1).all()
    return pairs


def check(order: Order, want: list[tuple[int, int]], size: int, real: list[bool], ahead: bool, causal: bool) -> None:
    seen = visible(order, ahead) & torch.tensor(real)[:, None]
    seen = seen.tril() if causal else seen
    assert seen.nonzero().tolist() == [list(pair) for pair in want]
    assert (covered(order.query[0], order.key[0], order.queries[0], size) >= seen).all()
    assert (covered(order.key[0], order.query[0], order.keys[0], size) >= seen.T).all()


@given(bucket=tokens_of, chunk=st.integers(1, 7), causal=st.booleans())
@few
def test_orders_pair_the_tokens_of_neighbouring_chunks(bucket: list[int], chunk: int, causal: bool) -> None:
    given, size = torch.tensor(bucket)[None, None, None], len(bucket)
    for order, at, ahead in (
        (by_rank(given, 4, chunk), chunks_by_rank(bucket, chunk), False),
        (by_place(given, 4, chunk, not causal), chunks_by_sorting(bucket, chunk), not causal),
    ):
        near = (-1, 0, 1) if ahead else (0, 1)
        want = [
            (i, j)
            for i, b in enumerate(bucket)
            for j, c in enumerate(bucket)
            if b == c >= 0 and at[i] - at[j] in near and (j <= i or ahead)
        ]
        check(order, want, size, [b >= 0 for b in bucket], ahead, causal=not ahead)


@given(data=st.data(), bucket=tokens_of, chunk=st.integers(1, 7))
@few
def test_asking_reads_the_newest_chunks_of_another_bucket(data: st.DataObject, bucket: list[int], chunk: int) -> None:
    asked = data.draw(st.lists(st.integers(-1, 3), min_size=len(bucket), max_size=len(bucket)))
    at, want = chunks_by_rank(bucket, chunk), []
    for i, b in enumerate(asked):
        known = [j for j in range(i + 1) if bucket[j] == b >= 0]
        want += [(i, j) for j in known if at[known[-1]] - at[j] in (0, 1)]
    keys, queries = (torch.tensor(t)[None, None, None] for t in (bucket, asked))
    check(by_asking(keys, queries, 4, chunk), want, len(bucket), [b >= 0 for b in asked], False, causal=True)


def cases() -> dict[str, tuple[Any, ...]]:
    """Orders with their rules, the number of keys, and whether keys are the queries."""
    torch.manual_seed(0)
    bucket = torch.randint(0, 4, (B, H, 3, T))
    bucket[1, :, :, 30:] = -1
    asked, hashed = torch.randint(0, 4, (B, H, 1, T)), {"apart": True, "unit": True}
    lists = torch.rand(2, B, H, 4, T).argsort(-1)[..., :19]
    lists[:, 1, :, :, 11:] = -1
    own = torch.arange(4 * 9).view(4, 9).masked_fill(torch.arange(9) > 6, -1).expand(B, H, 4, 9)
    return {
        "reformer": (by_rank(bucket, 4, 5), Rule(causal=True, **hashed), T, True),
        "its paper's": (by_place(bucket, 4, 6, False), Rule(causal=True, **hashed), T, True),
        "bidirectional": (by_place(bucket, 4, 6, True), Rule(ahead=True, **hashed), T, True),
        "routing": (by_rank(bucket[:, :, :1], 4, 20), Rule(causal=True, scale=0.3), T, True),
        "two projections": (by_asking(bucket[:, :, :1], asked, 4, 6), Rule(causal=True, scale=0.3), T, False),
        "balanced": (by_lists(*lists), Rule(scale=0.3), T, False),
        "balanced, causal": (by_lists(lists[0], lists[0]), Rule(causal=True, scale=0.3), T, True),
        "clustered": (to_lists(bucket[:, :, 0], own), Rule(once=True, scale=0.3), 36, False),
        "sinkhorn": (by_blocks((B, H), 1, T, False, bucket.device), Rule(causal=True, scale=0.3), 2 * T, False),
    }


@interpreted
@pytest.mark.parametrize("name", list(cases()))
def test_interpreted_kernels_are_the_definition(name: str) -> None:
    agree(name)


def agree(name: str) -> None:
    order, rule, size, shared = cases()[name]
    q, k, v = (torch.randn(B, n, H, D, dtype=torch.float64) for n in (T, size, size))
    given = [q, v] if shared else [q, k, v]
    weights, results = torch.randn(q.shape, dtype=torch.float64), []
    for impl, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        inputs = [t.to(dtype).requires_grad_() for t in given]
        o = ordered_attention(inputs[0], None if shared else inputs[1], inputs[-1], order, rule, impl=impl)
        results.append([o, *torch.autograd.grad((o * weights.to(dtype)).sum(), inputs)])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("name", ["reformer", "balanced", "clustered"])
def test_a_gpu_with_less_shared_memory_takes_each_tile_as_two(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.ops import ordered_triton

    monkeypatch.setattr(ordered, "TILE", 32)
    halved = ordered_triton.Config(16, 16, 4, 1)
    monkeypatch.setattr(ordered_triton, "config", lambda *_: halved)
    agree(name)


@interpreted
@pytest.mark.parametrize("name", ["routing", "reformer", "balanced"])
def test_interpreted_values_of_another_type(name: str) -> None:
    """Under autocast, keys that went through a norm are in single precision, and values are not."""
    order, rule, _, shared = cases()[name]
    q, k, v = (torch.randn(B, T, H, D).to(dtype).requires_grad_() for dtype in (torch.float32,) * 2 + (torch.float16,))
    ours, plain = (
        ordered_attention(q, None if shared else k, v, order, rule, impl=impl) for impl in ("triton", "torch")
    )
    assert ours.dtype == plain.dtype == torch.float16
    torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-2)
    inputs = [q, v] if shared else [q, k, v]
    for a, b in zip(*(torch.autograd.grad(o.float().square().sum(), inputs) for o in (ours, plain)), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_twin_drops_what_sees_nothing() -> None:
    q, v = torch.randn(1, 3, 1, 4), torch.randn(1, 3, 1, 4)
    alone = by_rank(torch.tensor([0, 1, 2])[None, None, None], 3, 4)
    torch.testing.assert_close(ordered_attention(q, None, v, alone, Rule(causal=True, apart=True)), v)
    missing = by_asking(torch.tensor([[[[0, 0, 0]]]]), torch.tensor([[[[1, 1, 0]]]]), 2, 4)
    assert (ordered_attention(q, q, v, missing, Rule(causal=True))[0, :2] == 0).all()


@compiled
@pytest.mark.parametrize(("dtype", "width", "lists"), [("bf16", 64, False), ("bf16", 128, True), ("fp32", 128, False)])
@pytest.mark.parametrize("kernel", ["forward", "dq_of", "dkv_of"])
def test_compiles_for_hopper(kernel: str, dtype: str, width: int, lists: bool) -> None:
    """A product may still read the rows of the iteration before: they need two buffers. Rows that something else reads
    as well get one from Triton 3.6, and the next copy overtakes the product."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops import ordered_triton

    fn = getattr(ordered_triton, kernel)
    how = ordered_triton.fits(width * (2 if dtype == "bf16" else 6), 64, 227 * 1024)
    sides = (how.inner, 64) if kernel == "dkv_of" else (64, how.inner)
    flags = {"CODES": not lists, "AHEAD": 0, "CAUSAL": True, "APART": not lists, "UNIT": not lists, "LISTS": lists}
    flags |= {} if kernel == "dkv_of" else {"LOW": lists}
    strides = {f"{x}_stride": 8 * width for x in ("q", "k", "v", "do") if f"{x}_stride" in fn.arg_names}
    constants = {
        **strides, **flags, "H": 8, "R": 4, "D": width, "BD": width, "BM": sides[0], "BN": sides[1],
        "PRECISION": "tf32x3",
    }  # fmt: skip
    integers = ("query", "key", "query_code", "key_code", "table")
    types = dict.fromkeys(integers, "*i32") | dict.fromkeys(("q", "k", "v", "o", "low", "do"), f"*{dtype}")
    types |= dict.fromkeys(("lengths", "lse", "delta", "share", "before", "into"), "*fp32") | {"scale": "fp32"}
    types |= {f"{x}_{y}": "*fp32" for x in "kv" for y in ("before", "into")}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in fn.arg_names}
    constexprs = {(fn.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(fn.arg_names) if name in types or "_" in name}
    source = ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=aligned)
    options = {"num_warps": how.warps, "num_stages": how.stages, "maxnreg": how.registers}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.asm["cubin"]
    assert built.metadata.shared <= 227 * 1024
    if dtype == "bf16":
        assert "async_copy" in built.asm["ttgir"]
        assert re.search(rf"memdesc<2x\d+x{width}xbf16", built.asm["ttgir"])
        assert not re.search(rf"memdesc<1x\d+x{width}xbf16", built.asm["ttgir"])


def test_smaller_devices_get_smaller_tiles() -> None:
    pytest.importorskip("triton")
    from subquad.ops.ordered_triton import fits

    wide = [fits(512, 64, room * 1024) for room in (227, 99, 64)]
    assert [how.inner for how in wide] == sorted((how.inner for how in wide), reverse=True)
    assert wide[-1].stages == 1
    assert fits(128, 64, 99 * 1024) == fits(128, 64, 227 * 1024)
    assert [fits(768, 64, room * 1024).tile for room in (227, 99)] == [64, 32]
