"""Rows with padding anywhere become rows that begin with their tokens, and back; positions count tokens."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra: pip install 'subquad[hf]'")

from subquad.hf.padding import check_positions, last_padding, read_mask, real_columns, to_columns, tokens_first

MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
IDS = torch.arange(25).view(5, 5)


def test_there_and_back() -> None:
    layout = read_mask(MASK, 5, 5)
    assert layout is not None
    assert layout.lengths.tolist() == [3, 2, 2, 0, 5]
    first = tokens_first(IDS, layout)
    for row, length, ids, mask in zip(first, layout.lengths, IDS, MASK, strict=True):
        assert row[:length].tolist() == ids[mask.bool()].tolist()
    assert to_columns(first, layout).tolist() == [
        [0, 0, 2, 3, 4],
        [5, 6, 6, 6, 6],  # padding repeats the token before it
        [0, 11, 11, 13, 13],
        [0, 0, 0, 0, 0],
        [20, 21, 22, 23, 24],
    ]
    assert torch.equal(real_columns(layout), MASK.bool())
    vectors = torch.randn(5, 5, 3, 2)
    assert torch.equal(to_columns(tokens_first(vectors, layout), layout)[MASK.bool()], vectors[MASK.bool()])


def test_columns_before_the_first_token_hold_what_came_before() -> None:
    layout = read_mask(MASK, 5, 5)
    before = torch.tensor([-1, -2, -3, -4, -5])
    columns = to_columns(tokens_first(IDS, layout), layout, before)
    assert columns[0].tolist() == [-1, -1, 2, 3, 4]
    assert columns[3].tolist() == [-4] * 5


def test_without_padding_nothing_moves() -> None:
    for mask in (torch.ones(5, 5, dtype=torch.int64), torch.ones(5, 5, dtype=torch.bool)):
        assert read_mask(mask, 5, 5) is None
    assert tokens_first(IDS, None) is IDS
    assert to_columns(IDS, None) is IDS
    assert last_padding(None) == 0


def test_where_padding_ends() -> None:
    assert int(last_padding(read_mask(MASK[:1], 1, 5))) == 2
    assert int(last_padding(read_mask(MASK[1:3], 2, 5))) == 5


def test_only_a_rows_own_count_is_accepted_as_positions() -> None:
    layout, before = read_mask(MASK, 5, 5), torch.tensor([7, 0, 1, 0, 2])
    assert layout is not None
    own = MASK.cumsum(1) - 1
    check_positions(own, None, 5, layout)
    check_positions(own + before[:, None], before, 5, layout)
    check_positions(own.masked_fill(MASK == 0, 99), None, 5, layout)  # padding has no position
    check_positions(torch.arange(5)[None], None, 3, 5)
    check_positions(None, None, 3, 5)
    wrong = own.clone()
    wrong[0, 4] = 0
    for positions in (wrong, own + 1, own[:, :4], own[None]):
        with pytest.raises(ValueError, match=r"position_ids is .* count"):
            check_positions(positions, None, 5, layout)
    with pytest.raises(ValueError, match="sequences packed into one row need a row each"):
        check_positions(torch.tensor([[0, 1, 0, 1, 2]]), None, 1, 5)
