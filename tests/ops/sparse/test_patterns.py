import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.ops.sparse.patterns import (
    Block,
    Dense,
    Dilated,
    Global,
    Local,
    Pattern,
    Random,
    Strided,
    Summary,
    Union,
)

DEFINITIONS: dict[Pattern, Callable[[int, int], bool]] = {  # the words of the module's docstring, one pair at a time
    Local(3): lambda i, j: abs(i - j) <= 3,
    Local(2, 5): lambda i, j: i - 2 <= j <= i + 5,
    Dilated(2, 3): lambda i, j: j in {i + 3 * m for m in range(-2, 3)},
    Strided(4): lambda i, j: (i - j) % 4 == 0,
    Block(5): lambda i, j: i // 5 == j // 5,
    Block(5, 1, 2): lambda i, j: i // 5 - 1 <= j // 5 <= i // 5 + 2,
    Summary(5, 2): lambda _, j: j % 5 in (3, 4),
    Summary(5, 2, 1): lambda _, j: j % 5 in (1, 2),
    Global(2): lambda i, j: i < 2 or j < 2,
    Dense(): lambda *_: True,
    Local(1) | Strided(6) | Global(1): lambda i, j: abs(i - j) <= 1 or (i - j) % 6 == 0 or i < 1 or j < 1,
}


@st.composite
def atoms(draw: st.DrawFn) -> Pattern:
    small, size = st.integers(0, 4), st.integers(1, 6)
    block = draw(size)
    c = draw(st.integers(1, block))
    return draw(
        st.one_of(
            st.builds(Local, st.integers(0, 9), st.integers(0, 9)),
            st.builds(Dilated, small, size),
            st.builds(Strided, size),
            st.builds(Block, size, small, small),
            st.just(Summary(block, c, draw(st.integers(0, block // c - 1)))),
            st.builds(Global, st.integers(1, 8)),
            st.builds(Random, st.integers(1, 3), size, st.integers(0, 2**40), small, small, small, small),
            st.just(Dense()),
        )
    )


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    pattern, *rest = draw(st.lists(atoms(), min_size=1, max_size=3))
    for atom in rest:
        pattern = pattern | atom
    return pattern


some = settings(deadline=None, max_examples=60, derandomize=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", DEFINITIONS, ids=repr)
def test_dense_is_the_definition(pattern: Pattern, causal: bool) -> None:
    T, S = 23, 17
    for columns in (T, S):
        expected = [[DEFINITIONS[pattern](i, j) and not (causal and j > i) for j in range(columns)] for i in range(T)]
        assert pattern.dense(T, columns, causal=causal).tolist() == expected


@some
@given(patterns(), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_keys_and_pairs_agree_with_dense(pattern: Pattern, T: int, S: int, causal: bool) -> None:
    dense = pattern.dense(T, S, causal=causal)
    keys = pattern.keys(torch.arange(T), S, causal=causal)
    assert [sorted(j for j in row if j >= 0) for row in keys.tolist()] == [
        row.nonzero()[:, 0].tolist() for row in dense
    ]
    assert pattern.pairs(T, S, causal=causal) == int(dense.sum())


def test_pairs_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subquad.ops.sparse.patterns.COUNTED", 30)
    for pattern in (Local(3), Strided(5) | Local(2, 0), Global(2) | Block(4)):
        for causal in (False, True):
            assert pattern.pairs(37, causal=causal) == int(pattern.dense(37, causal=causal).sum())


def test_a_matrix_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"T=1000000 cannot work: accepted is T·S of at most 2\*\*36"):
        Local(3).dense(10**6)
    assert Local(3).pairs(10**6) == 7 * 10**6 - 12


@some
@given(patterns(), st.integers(1, 60), st.data())
def test_causal_patterns_are_prefix_stable(pattern: Pattern, T: int, data: st.DataObject) -> None:
    t = data.draw(st.integers(1, T))
    dense = pattern.dense(T, causal=True)
    assert not dense.triu(1).any()
    assert torch.equal(dense[:t, :t], pattern.dense(t, causal=True))


@some
@given(patterns())
def test_repr_and_json_come_back(pattern: Pattern) -> None:
    assert eval(repr(pattern)) == pattern
    assert Pattern.from_json(pattern.to_json()) == pattern == type(pattern).from_json(pattern.to_json())


def test_readable() -> None:
    assert repr(Local(256) | Global(64)) == "Local(256, 256) | Global(64)"
    assert repr(Random(3, 64) | Summary(128, 32)) == "Random(3, 64) | Summary(128, 32)"


def test_union_is_a_set() -> None:
    a: Pattern = Local(3)
    b: Pattern = Strided(4)
    c: Pattern = Global(1)
    assert a | b == b | a
    assert hash(a | b) == hash(b | a)
    assert (a | b) | c == a | (b | c) == c | b | a | b
    assert a | a == a
    assert len((a | b | a | c).atoms) == 3
    assert a != b
    assert (a | b) != a
    assert isinstance(a | b, Union)
    with pytest.raises(TypeError):
        a | 3


def test_sets_of_the_sparse_transformer() -> None:
    length, T, i = 8, 64, 50
    assert int(Local(length, 0).dense(T, causal=True)[i].sum()) == length + 1
    assert Strided(length).dense(T, causal=True)[i].nonzero()[:, 0].tolist() == [2, 10, 18, 26, 34, 42, 50]
    assert Block(length).dense(T, causal=True)[i].nonzero()[:, 0].tolist() == [48, 49, 50]
    assert Summary(length, 2).dense(T, causal=True)[i].nonzero()[:, 0].tolist() == [
        j for j in range(i) if j % length >= length - 2
    ]
    tiles = torch.stack([Summary(length, 2, shift).dense(T) for shift in range(4)]).int().sum(0)
    assert torch.equal(tiles, torch.ones_like(tiles)), "the sub-blocks of different heads tile the block"


def hops(*factors: Pattern, T: int, causal: bool) -> torch.Tensor:
    """Pairs (i, j) such that j reaches i through one layer per factor, each with its residual connection."""
    reached = torch.eye(T)
    for factor in factors:
        reached = ((factor.dense(T, causal=causal).float() + torch.eye(T)) @ reached > 0).float()
    return reached > 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [1, 7, 64, 100, 289])
def test_two_factors_cover_every_pair(T: int, causal: bool) -> None:
    every = Dense().dense(T, causal=causal)
    length = max(1, math.isqrt(T))
    local = Local(length, 0) if causal else Local(length)
    assert torch.equal(hops(local, Strided(length), T=T, causal=causal), every)
    columns = Summary(length, max(1, length // 4))
    if causal:
        assert torch.equal(hops(Block(length), columns, T=T, causal=True), every)
    else:  # the last block may be too short to have a summary, and is read through its queries' own block alone
        whole = T // length * length
        assert torch.equal(hops(Block(length), columns, T=whole, causal=False), every[:whole, :whole])


@pytest.mark.parametrize("T", [1, 20, 64, 125, 200])
def test_three_factors_cover_every_pair_with_cube_root_keys(T: int) -> None:
    length = math.ceil(round(T ** (1 / 3), 6))
    factors = Local(length - 1, 0), Dilated(length - 1, length), Strided(length**2)
    for order in (factors, factors[::-1]):
        assert torch.equal(hops(*order, T=T, causal=True), Dense().dense(T, causal=True))
    for factor in factors:
        assert int(factor.dense(T, causal=True).sum(1).max()) <= length
    if length > 2:  # and none of them is idle
        for pair in combinations(factors, 2):
            assert not torch.equal(hops(*pair, T=T, causal=True), Dense().dense(T, causal=True))


@some
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 90), st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)
)
def test_random_draws_distinct_allowed_blocks(
    blocks: int, size: int, T: int, apart: int, first: int, last: int
) -> None:
    pattern, n = Random(blocks, size, 5, apart=apart, first=first, last=last), -(-T // size)
    for causal in (False, True):
        table = pattern.table(torch.arange(n), causal=causal, length=T)
        for row, drawn in enumerate(table.tolist()):
            if causal:
                allowed = {c for c in range(first, row) if row - c >= apart}
            else:
                allowed = {c for c in range(first, n - last) if abs(row - c) >= apart}
            chosen = [c for c in drawn if c >= 0]
            assert len(chosen) == len(set(chosen)) == min(blocks, len(allowed))
            assert set(chosen) <= allowed


def test_random_is_keyed_by_seed_head_and_row() -> None:
    rows = torch.arange(64)
    tables = [Random(3, 4, seed, head).table(rows, length=256) for seed in (0, 1, 2**33) for head in (0, 1)]
    for a, b in combinations(tables, 2):
        assert (a != b).float().mean() > 0.8
    assert torch.equal(Random(3, 4, 1).table(rows[20:30], length=256), Random(3, 4, 1).table(rows, length=256)[20:30])
    for head in range(3):
        row = torch.full((64,), head)
        assert torch.equal(
            Random(3, 4, 1).table(rows, length=256, head=row), Random(3, 4, 1, head).table(rows, length=256)
        )
        pattern, other = (
            Local(3) | Random(3, 4, 1) | Random(1, 4, 2),
            Local(3) | Random(3, 4, 1, head) | Random(1, 4, 2, head),
        )
        at = torch.arange(64)
        assert torch.equal(pattern.keys(at, 64, head=row), other.keys(at, 64))
        assert torch.equal(pattern.mask(at[:, None], at, length=64, head=row[:, None]), other.dense(64))
    lengths = torch.tensor([[90], [256]])
    both = Random(3, 4).table(rows, length=lengths)
    assert torch.equal(both[1], Random(3, 4).table(rows, length=256))
    assert torch.equal(both[0, :23], Random(3, 4).table(rows[:23], length=90))


def test_random_is_uniform() -> None:
    """Every block is drawn equally often: chi-squared, 9 degrees of freedom, p = 0.001 at 27.9."""
    heads = [Random(3, 1, 11, head).table(torch.tensor([4]), length=10) for head in range(3000)]
    counts = torch.bincount(torch.cat(heads).flatten(), minlength=10).double()
    assert float(((counts - 900) ** 2 / 900).sum()) < 27.9


def test_random_needs_the_length_unless_causal() -> None:
    i = torch.arange(4)
    with pytest.raises(ValueError, match="length"):
        Random(1, 2).mask(i, i)
    Random(1, 2).mask(i, i, causal=True)


@pytest.mark.parametrize("pattern", list(DEFINITIONS), ids=repr)
def test_keys_of_one_atom_at_a_time(pattern: Pattern) -> None:
    for T, S in ((23, 23), (31, 9), (4, 30)):
        for causal in (False, True):
            dense = pattern.dense(T, S, causal=causal)
            keys = pattern.keys(torch.arange(T), S, causal=causal).tolist()
            assert [sorted(j for j in row if j >= 0) for row in keys] == [row.nonzero()[:, 0].tolist() for row in dense]


def test_impossible_sizes_raise() -> None:
    for wrong in (
        lambda: Local(-1),
        lambda: Local(2, -1),
        lambda: Dilated(2, 0),
        lambda: Strided(0),
        lambda: Block(0),
        lambda: Block(4, -1),
        lambda: Summary(4, 0),
        lambda: Summary(4, 5),
        lambda: Summary(4, 2, 2),
        lambda: Global(0),
        lambda: Random(0, 4),
        lambda: Random(1, 0),
        lambda: Random(1, 4, -1),
        lambda: Strided(2.5),
        lambda: Strided(True),
        lambda: Pattern.from_json("[]"),
        lambda: Pattern.from_json('[{"atom": "Sideways", "l": 3}]'),
    ):
        with pytest.raises(ValueError, match=r"must be|at least|one of"):
            wrong()


def test_long_sequences_are_counted_at_the_cost_of_the_pattern() -> None:
    T, length = 300_000, 100
    assert Local(length, 0).pairs(T) == (length + 1) * T - length * (length + 1) // 2
    assert Global(2).pairs(T) == 4 * T - 4
    assert Dense().pairs(T, causal=True) == T * (T + 1) // 2


def test_draws_itself(tmp_path: Path) -> None:
    path = tmp_path / "pattern.png"
    (Local(4) | Global(2) | Random(1, 8)).draw(64, path)
    assert path.read_bytes().startswith(b"\x89PNG")
