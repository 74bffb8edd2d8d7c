import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data.padding import LENGTHS, UNIT, pad, padded_length


def test_rows_are_padded_with_zeros_at_the_end() -> None:
    rows = [torch.ones(3, 2), torch.full((5, 2), 2.0)]
    made = pad(rows, longest=40)
    assert made.shape == (2, 5, 2)
    assert made[0, :3].eq(1).all()
    assert not made[0, 3:].any()
    assert made[1].eq(2).all()
    assert pad([torch.tensor([7])], longest=100, lengths=1).shape == (1, 112)
    assert pad([torch.zeros(0)], longest=0).shape == (1, 1)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.integers(1, 5000), st.integers(1, 12))
def test_lengths_are_few_and_hold_every_row(longest: int, lengths: int) -> None:
    sizes = range(1, longest + 1)
    found = [padded_length(size, longest, lengths) for size in sizes]
    assert len(set(found)) <= lengths
    assert all(size <= length for size, length in zip(sizes, found, strict=True))
    assert found == sorted(found)
    assert max(found) < longest + longest / lengths + lengths * UNIT
    if longest >= lengths * UNIT:
        assert all(length % UNIT == 0 for length in found)


def test_a_shape_depends_only_on_its_own_rows() -> None:
    lengths = {padded_length(size, 639) for size in range(1, 640)}
    assert len(lengths) == LENGTHS
    assert padded_length(700, 639) == 720  # longer than the given longest row: one more step
