"""The Triton path of sparse attention: exact in Triton's interpreter, and compiled for a Hopper GPU without one.

Interpreted tests need their own process, as in test_linear_triton; where no Triton is installed, everything here is
skipped.
"""

from itertools import product
from math import inf
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from subquad.ops.sparse import kernels, sparse_attention, triton_path
from subquad.ops.sparse.patterns import Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary
from subquad.ops.sparse.spec import Inputs, Spec
from subquad.ops.sparse.triton_path import CONFIGS, Config, passes
from tests.ops.own_process import INTERPRETED, compiled, interpreted
from tests.ops.sparse.test_sparse import dense, inputs, unions

CASES: list[tuple[Pattern, bool]] = [
    (Local(9, 0), True),
    (Local(20, 3) | Global(3), False),
    (Local(7, 0) | Strided(7), True),
    (Local(2) | Strided(2), False),
    (Block(8) | Summary(8, 2), True),
    (Block(6, 0, 1) | Summary(5, 2, 1), False),
    (Local(2) | Global(2) | Random(2, 4, 1), False),
    (Global(3) | Random(2, 8, 1) | Random(1, 12), True),
    (Dilated(3, 4) | Local(2) | Strided(9), True),
    (Summary(4, 1) | Dense(), False),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a short sequence has interior ones."""
    if not INTERPRETED:
        return
    for kind, size in list(CONFIGS):
        monkeypatch.setitem(CONFIGS, (kind, size), Config(16, 16, 4, 1))
    monkeypatch.setattr(triton_path, "SPLIT", 32)


def agree(
    pattern: Pattern | list[Pattern],
    causal: bool,
    T: int,
    S: int,
    heads: tuple[int, int],
    ragged: bool,
    with_lse: bool,
    D: int = 8,
) -> None:
    q, k, v = inputs(2 if ragged else 1, T, S, *heads, D, seed=T)
    lengths = torch.tensor([T, max(1, T // 2)]) if ragged else None
    key_lengths = torch.tensor([S, max(1, S // 2)]) if ragged and not causal else None
    low = [x.detach().float().requires_grad_() for x in (q, k, v)]
    result = sparse_attention(
        low[0],
        low[1],
        low[2],
        pattern,
        causal=causal,
        lengths=lengths,
        key_lengths=key_lengths,
        return_lse=True,
        impl="triton",
    )
    want, want_lse = dense(q, k, v, pattern, causal, lengths, key_lengths)
    torch.testing.assert_close(result[0].double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result[1].double(), want_lse, rtol=1e-5, atol=1e-5)
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    wl = torch.randn(want_lse.shape, generator=generator, dtype=torch.float64) * with_lse
    loss, want_loss = (
        (o * w.to(o.dtype)).sum() + (lse.masked_fill(lse == -inf, 0) * wl.to(o.dtype)).sum()
        for o, lse in (result, (want, want_lse))
    )
    if not with_lse:
        loss = (sparse_attention(*low, pattern, causal=causal, lengths=lengths, impl="triton") * w.float()).sum()  # type: ignore[call-overload]
    for a, b in zip(torch.autograd.grad(loss, low), torch.autograd.grad(want_loss, (q, k, v)), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@interpreted
def test_a_call_is_one_graph_for_the_compiler() -> None:
    x = [torch.randn(1, 20, 2, 16) for _ in range(3)]
    patterns: list[Pattern] = [Local(4, 0) | Global(2), Local(6, 0)]
    attend: Any = torch.compile(sparse_attention, fullgraph=True, backend="eager")
    wanted = sparse_attention(x[0], x[1], x[2], patterns, causal=True, impl="triton")
    assert torch.equal(attend(*x, patterns, causal=True, impl="triton"), wanted)


@interpreted
@pytest.mark.parametrize(("pattern", "causal"), CASES, ids=repr)
def test_interpreted_values_and_gradients(pattern: Pattern, causal: bool) -> None:
    agree(pattern, causal, 37, 37, (2, 1) if causal else (1, 1), ragged=False, with_lse=True)


@interpreted
@pytest.mark.parametrize(("pattern", "causal"), [CASES[0], CASES[6]], ids=repr)
def test_interpreted_padding(pattern: Pattern, causal: bool) -> None:
    agree(pattern, causal, 25, 25, (1, 1), ragged=True, with_lse=True)


@interpreted
@given(unions(), st.integers(1, 30), st.integers(1, 30), st.booleans())
@settings(deadline=None, max_examples=8, derandomize=True)
def test_interpreted_unions(pattern: Pattern, T: int, S: int, causal: bool) -> None:
    agree(pattern, causal, T, T if causal else S, (1, 1), ragged=False, with_lse=True, D=5)


@interpreted
@pytest.mark.parametrize("pattern", [Block(8) | Summary(8, 2), Block(6) | Summary(6, 3, 1)], ids=repr)
@pytest.mark.parametrize("T", [5, 50])
def test_interpreted_far_part_of_a_summary(pattern: Pattern, T: int) -> None:
    assert passes(pattern.to_json(), True, True).far == 1
    agree(pattern, True, T, T, (1, 1), ragged=False, with_lse=False)


@interpreted
@pytest.mark.parametrize(
    ("others", "shifts", "heads", "ragged"),
    [
        (Block(8), (0, 3), (2, 2), True),
        (Local(0), (2, 2, 0, 0), (4, 2), False),
        (Local(3) | Global(3) | Random(1, 4), (1, 2), (2, 1), False),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_interpreted_heads_summarise_their_own_columns(
    others: Pattern, shifts: tuple[int, ...], heads: tuple[int, int], ragged: bool, causal: bool
) -> None:
    agree([others | Summary(8, 2, shift) for shift in shifts], causal, 21, 21, heads, ragged, with_lse=True)


@interpreted
def test_interpreted_heads_with_different_shifts_share_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Mock()
    for name in ("_run_forward", "_run_dq", "_run_dkv", "_run_far"):
        launches.attach_mock(Mock(wraps=getattr(triton_path, name)), name)
        monkeypatch.setattr(triton_path, name, getattr(launches, name))
    q, k, v = (x.detach().float().requires_grad_() for x in inputs(1, 20, 20, 4, 4, 8))
    patterns = [Block(8) | Summary(8, 2, shift) for shift in (0, 1, 2, 3)]
    sparse_attention(q, k, v, patterns, causal=True, impl="triton").sum().backward()
    assert [name for name, _, _ in launches.mock_calls] == [
        "_run_forward", "_run_far", "_run_dq", "_run_dkv", "_run_far"
    ]  # fmt: skip


@interpreted
@pytest.mark.parametrize(("others", "T"), [(Block(8), 48), (Block(8, 1), 20), (Local(5, 2), 31)], ids=repr)
def test_interpreted_all_columns_at_once(monkeypatch: pytest.MonkeyPatch, others: Pattern, T: int) -> None:
    """Without causality a summary is dense attention to its columns, if none is missing."""
    monkeypatch.setattr(triton_path, "MANY", 2)
    apart = Mock(wraps=triton_path._run_far)
    monkeypatch.setattr(triton_path, "_run_far", apart)
    agree(others | Summary(8, 2), False, T, 48, (2, 2), ragged=False, with_lse=False)
    assert [call.kwargs["back"] for call in apart.mock_calls] == [False, False, False, True]
    agree([others | Summary(8, 2, shift) for shift in (3, 0, 1)], False, T, 48, (3, 3), ragged=False, with_lse=False)
    for keys, ragged in ((47, False), (48, True)):
        apart.reset_mock()
        agree(others | Summary(8, 2), False, T, keys, (2, 2), ragged=ragged, with_lse=ragged)
        assert not apart.mock_calls


@interpreted
@pytest.mark.parametrize("T", [1, 39])
def test_interpreted_far_part_where_heads_differ(T: int) -> None:
    agree([Block(8) | Summary(8, 2, shift) for shift in (3, 0, 1)], True, T, T, (3, 3), ragged=False, with_lse=False)


@interpreted
@pytest.mark.parametrize("causal", [True, False])
def test_interpreted_heads_draw_their_own_blocks(causal: bool) -> None:
    heads = [Local(1) | Random(1, 4, head=h) for h in (0, 3, 1, 1)]
    agree(heads, causal, 25, 25, (4, 2), ragged=not causal, with_lse=True)
    agree([*heads[:2], Local(1), Random(1, 4) | Random(1, 4, head=2)], causal, 13, 13, (4, 4), False, with_lse=False)


@interpreted
def test_interpreted_padding_may_hold_anything() -> None:
    q, k, v = (x.detach().float() for x in inputs(1, 24, 24, 1, 1, 8))
    for pattern, causal in ((Local(4, 0) | Strided(5), True), (Local(3) | Global(2), False)):
        want = sparse_attention(q[:, :13], k[:, :13], v[:, :13], pattern, causal=causal)
        bad = [torch.cat([x[:, :13], torch.full_like(x[:, 13:], inf)], 1) for x in (q, k, v)]
        n = torch.tensor([13])
        o = sparse_attention(bad[0], bad[1], bad[2], pattern, causal=causal, lengths=n, impl="triton")
        torch.testing.assert_close(o[:, :13], want, rtol=1e-5, atol=1e-5)
        assert bool((o[:, 13:] == 0).all())


POINTERS = {
    **dict.fromkeys(("q", "k", "v", "o", "do", "dq", "dk", "dv", "far", "far_k", "far_v"), "*bf16"),
    **dict.fromkeys(("lse", "dlse", "stats"), "*fp32"),
    **dict.fromkeys(("table", "starts", "readers", "firsts"), "*i32"),
    **dict.fromkeys(("lengths", "key_lengths"), "*i64"),
}


@compiled
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("kind", ["forward", "dq", "dkv"])
def test_compiles_for_hopper_on_tensor_cores_with_pipelined_loads(kind: str, shifted: bool) -> None:
    kernel = getattr(kernels, f"_{kind}")
    pattern = Block(128) | Summary(128, 32) if shifted else Local(128, 0) | Strided(128)
    work = passes(pattern.to_json(), True, True, shifted)
    config = CONFIGS[kind, 128]
    constants = {
        "A": work.atoms,
        "PARTS": work.queries,
        "KEYS": 0,
        "CAUSAL": True,
        "STEP": 1,
        "CONTINUE": False,
        "SPLITS": False,
        "FAR": 128 if shifted else -1,
        "LENGTHS": False,
        "FIRSTS": shifted,
        "DLSE": False,
        "H": 16,
        "SHARE": 1,
        "D": 64,
        "BD": 64,
        "BM": config.queries,
        "BN": config.keys,
        "PRECISION": "tf32",
        **dict.fromkeys(("q_stride", "k_stride", "v_stride", "do_stride"), 1024),
    }
    names = [p.name for p in kernel.params]
    signature = {
        n: "constexpr" if n in constants else POINTERS.get(n, "fp32" if n.startswith("scale") else "i32") for n in names
    }
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, n in enumerate(names)
        if n in POINTERS or n.endswith(("_batch", "_head", "_piece"))
    }
    source = ASTSource(
        kernel, signature, {(names.index(n),): value for n, value in constants.items() if n in names}, aligned
    )
    binary = compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": config.warps, "num_stages": config.stages},
    )
    ptx = binary.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async" in ptx
    assert binary.metadata.shared <= 227 * 1024


@compiled
def test_nothing_compiled_depends_on_the_length() -> None:
    # strides of tokens and heads keep their divisor at any length; Triton must not specialise on other integers
    for kernel in (kernels._forward, kernels._dq, kernels._dkv, kernels._far):
        for p in kernel.params:
            if not (p.is_constexpr or p.name in POINTERS or p.name.startswith("scale") or p.do_not_specialize):
                assert p.name.split("_")[0] in ("q", "k", "v", "o", "do", "dq", "dk")


def test_passes_of_the_named_patterns() -> None:
    strided = passes((Local(128, 0) | Strided(128)).to_json(), True, True)
    assert (strided.queries, strided.keys, strided.lattices) == ((0,), (0,), ((1, 128),))
    fixed = passes((Block(128) | Summary(128, 32)).to_json(), True, True)
    assert (fixed.far, fixed.queries, fixed.keys, fixed.summaries) == (1, (0, 1), (0, 1), ())
    both_ways = passes((Block(128) | Summary(128, 32)).to_json(), False, True)
    assert (both_ways.far, both_ways.queries, both_ways.keys, both_ways.summaries) == (0, (1,), (1,), ())
    longformer = passes((Local(256) | Global(64)).to_json(), False, True)
    assert (longformer.rows, longformer.columns, longformer.queries) == (64, 64, (0, 1))
    assert passes((Local(256) | Global(64)).to_json(), True, True).rows == 0


def test_what_a_call_looks_up_is_copied_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in the middle of a call cannot be captured."""
    q, n, made = torch.zeros(1, 20, 2, 8), torch.tensor([17]), Mock(wraps=torch.tensor)
    monkeypatch.setattr(torch, "tensor", made)
    triton_path._on_device.cache_clear()
    x, (random, summary) = Inputs(q, q, q, n, n), (p.to_json() for p in (Random(2, 4, seed=11), Summary(11, 2)))
    for _ in range(3):
        triton_path._call(x, Spec(random, (0, 5), (), False, 1.0, False, "triton"))
        firsts = triton_path._call(x, Spec(summary, (), (0, 4), False, 1.0, False, "triton")).firsts
    assert firsts is not None
    assert (firsts.tolist(), firsts.dtype) == ([9, 1], torch.int32)
    assert [values for (values,), _ in made.call_args_list] == [(0, 5), (9, 1)]


def test_random_tables_list_each_pair_once_from_both_sides() -> None:
    drawn = (Random(2, 4, 1), Random(3, 6, 2), Random(1, 4, 7))
    draws = (0, 5)
    for causal, lengths in ((True, None), (False, None), (False, torch.tensor([50, 23]))):
        tables = triton_path._tables(drawn, draws, 50, 50, causal, lengths, torch.device("cpu"))
        for b, h in product(range(len(tables[0])), range(len(draws))):
            table, starts, readers = (x[b, h] for x in tables)
            n = 50 if lengths is None else int(lengths[b])
            want = torch.zeros(50, 50, dtype=torch.bool)
            for atom in drawn:
                i, j = torch.arange(50)[:, None], torch.arange(50)
                want |= atom.mask(i, j, causal=causal, length=n, head=draws[h])
            by_rows, by_columns = (torch.zeros(25, 25, dtype=torch.int64) for _ in range(2))
            for row in range(25):
                for block in table[row].tolist():
                    if block >= 0:
                        by_rows[row, block] += 1
            for block in range(25):
                for row in readers[starts[block] : starts[block + 1]].tolist():
                    by_columns[row, block] += 1
            assert torch.equal(by_rows, by_columns)
            blocks = want.view(25, 2, 25, 2).any(3).any(1)
            # causal cuts pairs inside a block of keys that is listed, never a block of a listed pair
            assert torch.equal(by_rows[:, : blocks.shape[1]], blocks.long())
