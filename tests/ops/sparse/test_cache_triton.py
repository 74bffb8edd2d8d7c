"""The kernel of a step over a pattern against the torch path, through Triton's interpreter, and compiled for sm_90.

Interpreted tests need their own process, as in test_linear_triton.
"""

from typing import Any

import pytest
import torch

from subquad.ops.rotary import Turns, turns
from subquad.ops.sparse.cache import SparseCache
from subquad.ops.sparse.patterns import Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary
from subquad.ops.sparse.reads import Reads, reads_of
from tests.ops.own_process import compiled, interpreted
from tests.ops.sparse.test_cache import PATTERNS

pytest.importorskip("triton")

H, FAR = 4, 70
HEADS = {name: patterns for name, patterns in PATTERNS.items() if isinstance(SparseCache(patterns).reads, Reads)}
HEADS["draws of two heads"] = [Block(4, 1) | Random(3, 4, 2**41 + 5, head, apart=1) for head in (0, 0, 7, 7)]
HEADS["every key"] = [Local(3) | Dense()] * H


def start(cache: SparseCache, positions: list[int], capacity: int, k: int, v: int, dtype: torch.dtype) -> Any:
    """A state in which every slot that is in use holds a random key, and the others hold NaN."""
    generator = torch.Generator().manual_seed(sum(positions))
    empty = cache.empty(len(positions), H, k, capacity, torch.empty(0, dtype=dtype))
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    state = empty._replace(
        k=torch.full_like(empty.k, torch.nan), v=torch.full((*empty.k.shape[:3], v), torch.nan, dtype=dtype)
    )
    longest = max(positions)
    new_k, new_v = (torch.randn(len(positions), longest, H, width, **draw).to(dtype) for width in (k, v))
    return cache.extend(state, new_k, new_v, torch.tensor(positions))


def filled(t: torch.Tensor) -> torch.Tensor:
    return t.nan_to_num(0.0) if t.is_floating_point() else t


def clean(state: Any) -> Any:
    keys, values = (filled(t.double()) for t in state[:2])
    return state._replace(k=keys, v=values, position=state.position.clone())


@interpreted
@pytest.mark.parametrize("name", HEADS)
def test_steps_are_the_torch_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.ops.sparse import cache_triton

    if len(name) % 2:  # in several splits
        monkeypatch.setattr(cache_triton, "BLOCK", 512)
        monkeypatch.setattr(cache_triton, "FEW", 20)
    cache = SparseCache(HEADS[name])
    state = start(cache, [0, 5, 17, 62], FAR, 16, 12, torch.float32)
    want = clean(state)
    for inplace in (False, True):
        q, k, v = (torch.randn(4, H, width) for width in (16, 16, 12))
        before = [t.clone() for t in state]
        o, new = cache.step(q, k, v, state, 0.3, inplace, impl="triton")
        left = state if not inplace else new
        assert all(torch.equal(a, b) for a, b in zip(map(filled, before), map(filled, left), strict=True)) != inplace
        wanted, want = cache.step(q.double(), k.double(), v.double(), want, 0.3)
        torch.testing.assert_close(o.double(), wanted, rtol=0, atol=2e-6)
        for a, b in zip(clean(new), want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        state = new


@interpreted
def test_half_precision_and_views() -> None:
    cache = SparseCache(Local(9) | Global(2))
    state = start(cache, [30, 4], FAR, 20, 20, torch.bfloat16)
    wanted = clean(state)
    for _ in range(3):
        q, k, v = torch.randn(2, 3 * H, 20).bfloat16().chunk(3, dim=1)
        o, state = cache.step(q, k, v, state, inplace=True, impl="triton")
        want, wanted = cache.step(q.double(), k.double(), v.double(), wanted)
        assert o.dtype == torch.bfloat16
        torch.testing.assert_close(o.double(), want, rtol=0, atol=0.02)


@interpreted
@pytest.mark.parametrize("pattern", [Local(9, 0), Dense()])
def test_rotary_and_a_position_that_the_caller_moves(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.ops.sparse import cache_triton

    monkeypatch.setattr(cache_triton, "BLOCK", 512)
    monkeypatch.setattr(cache_triton, "FEW", 20)
    cache = SparseCache(pattern)
    state = start(cache, [30, 4], FAR, 16, 16, torch.float32)
    wanted, position = clean(state), state.position.clone()
    by = turns(position[:, None], 16)
    q, k, v = torch.randn(3, 2, H, 16)
    o, new = cache._step(q, k, v, state, None, True, "triton", moves=False, by=by)
    wide = Turns(by.cos.double(), by.sin.double())
    want, wanted = cache._step(q.double(), k.double(), v.double(), wanted, None, True, "torch", moves=False, by=wide)
    assert torch.equal(new.position, position)
    assert torch.equal(wanted.position, position)
    torch.testing.assert_close(o.double(), want, rtol=0, atol=2e-6)
    torch.testing.assert_close(filled(new.k).double(), wanted.k, rtol=0, atol=2e-6)


def test_what_the_kernel_cannot_read_is_refused() -> None:
    for pattern in (
        Block(4) | Block(6),
        Strided(4) | Dilated(2, 3),
        Strided(5) | Random(1, 4),
        Random(1, 4) | Random(1, 3),
    ):
        cache = SparseCache(pattern)
        assert isinstance(cache.reads, str)
        state = cache.empty(1, H, 16, 8, torch.empty(0))
        q = torch.randn(1, H, 16)
        with pytest.raises(ValueError, match='impl="triton"'):
            cache.step(q, q, q, state, impl="triton")
        cache.step(q, q, q, state)


@pytest.mark.parametrize(
    ("pattern", "size", "most"),
    [
        (Local(128, 0), 129, 128),
        (Local(64) | Global(3), 65 + 3, 67),
        (Local(9, 0) | Strided(10), 100, 9 + 11),
        (Block(8) | Summary(8, 2), 8 + 2 * 20, 48),
        (Block(4, 1) | Global(4) | Random(3, 4), 1000, 7 + 4 + 12),
        (Dense(), 50, 50),
    ],
)
def test_the_most_keys_that_a_token_reads(pattern: Pattern, size: int, most: int) -> None:
    reads = SparseCache(pattern).reads
    assert isinstance(reads, Reads)
    assert Reads.parse(str(reads)) == reads
    assert reads.most(size) == most


def test_reads_name_why_not() -> None:
    assert "blocks of two sizes" in str(reads_of(Block(4) | Block(6)))
    assert "which may hold a key twice" in str(reads_of(Strided(4) | Summary(4, 1)))


@compiled
@pytest.mark.parametrize("case", ["window", "log", "draws", "bias", "split"])
def test_compiles_for_hopper(case: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from subquad.ops.sparse.cache_triton import step

    constants: dict[str, Any] = {
        "K": 64,
        "V": 64,
        "BK": 64,
        "BV": 64,
        "BC": 64 if case == "bias" else 128,
        "SPLITS": 1,
        "ROUND": 1,
    }
    constants |= {
        "EVERYTHING": case == "draws",
        "LOG": case == "log",
        "COMBS": case == "log",
        "DRAWS": 0,
        "BIAS": False,
        "TURN": case == "window",
        "MOVES": case != "split",
        "EARLY": True,
    }
    more: dict[str, dict[str, Any]] = {
        "draws": {"DRAWS": 3, "ROUND": 4},
        "bias": {"BIAS": True},
        "split": {"SPLITS": 8},
    }
    constants |= more.get(case, {})
    types = dict.fromkeys(("q", "k", "v", "keys", "values", "u", "w", "far"), "*bf16")
    types |= {"cos": "*fp32", "sin": "*fp32"}
    types |= {"position": "*i64", "reads": "*i32", "high": "*fp32", "mass": "*fp32", "scale": "fp32"}
    types["o"] = "*fp32" if case == "split" else "*bf16"
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in step.arg_names}
    constexprs = {(step.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=step, signature=signature, constexprs=constexprs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})
    assert built.asm["cubin"]
    assert built.metadata.shared <= 99 * 1024
