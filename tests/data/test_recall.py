import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data.recall import NOT_ASKED, Recall


def looked_up(tokens: list[int], keys: int) -> dict[int, int]:
    """{place: answer} by a dictionary that reads from left to right: a key that it knows is a query."""
    known: dict[int, int] = {}
    answers = {}
    for place, token in enumerate(tokens):
        if not 1 <= token <= keys:
            continue
        if token in known:
            answers[place] = known[token]
        else:
            known[token] = tokens[place + 1]
    return answers


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    pairs = draw(st.integers(1, 20))
    return 2 * draw(st.integers(2 * pairs, 60)), pairs, draw(st.integers(2 * pairs + 2, 100))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(sizes(), st.integers(0, 1 << 40), st.integers(0, 5))
def test_a_dictionary_answers_every_query(size: tuple[int, int, int], index: int, seed: int) -> None:
    length, pairs, vocab = size
    data = Recall(length, (pairs,), vocab, seed=seed)
    found = data.batch(np.array([index]))
    tokens, places, answers = (found[name][0].tolist() for name in ("tokens", "places", "answers"))
    keys, values = tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
    assert len(set(keys)) == len(set(values)) == pairs
    assert all(1 <= key <= data.keys for key in keys)
    assert all(data.keys < value < vocab for value in values)
    assert dict(zip(places, answers, strict=True)) == looked_up(tokens, data.keys)
    assert sorted(tokens[place] for place in places) == sorted(keys)  # each once
    assert all(place >= 2 * pairs and place % 2 == 0 for place in places)
    assert sum(token != 0 for token in tokens) == 3 * pairs


def test_rows_with_fewer_queries_are_filled_up() -> None:
    data = Recall(64, (16, 4))
    found = data.batch(np.arange(5))
    assert found["places"].shape == found["answers"].shape == (5, 16)
    asked = found["answers"] != NOT_ASKED
    assert asked.sum(1).tolist() == [16, 4, 16, 4, 16]
    assert asked[1, :4].all()
    assert not found["places"][1, 4:].any()
    for row in range(5):
        places, answers = (found[name][row][asked[row]].tolist() for name in ("places", "answers"))
        assert dict(zip(places, answers, strict=True)) == looked_up(found["tokens"][row].tolist(), data.keys)


def test_an_example_does_not_depend_on_its_batch_or_epoch() -> None:
    data = Recall(64, (16, 4))
    together = data.batch(np.array([5, 0, 99]), epoch=3)
    alone = data.batch(np.array([99]), epoch=0)
    for name in together:
        assert torch.equal(together[name][2:], alone[name])


def test_keys_values_and_distances_are_those_of_the_paper() -> None:
    """Keys and values are uniform. Of a power law with exponent a, one query's place n has the chance n^(a - 1)."""
    data = Recall(64, (1,), 12)
    rows = 20_000
    found = data.batch(np.arange(rows))
    assert torch.bincount(found["tokens"][:, 0], minlength=12)[1:6].sum() == rows
    for column, first, kinds in ((0, 1, 5), (1, 6, 6)):
        counts = torch.bincount(found["tokens"][:, column], minlength=12)[first : first + kinds]
        assert (counts - rows / kinds).abs().max() < 5 * (rows / kinds) ** 0.5
    chance = torch.arange(1, 32) ** (0.01 - 1)
    expected = rows * chance / chance.sum()
    counts = torch.bincount((found["places"][:, 0] - 2) // 2, minlength=31)
    assert ((counts - expected).abs() < 5 * expected.sqrt()).all()
    assert len({tuple(row) for row in Recall().batch(np.arange(rows))["tokens"].tolist()}) == rows


def test_several_queries_are_drawn_one_after_the_other() -> None:
    """Of three places with the chances p, the second query's place is that of a draw without the first one's."""
    data = Recall(10, (2,), 12)
    rows = 20_000
    slots = (data.batch(np.arange(rows))["places"] - 4) // 2
    p = torch.arange(1, 4) ** (0.01 - 1)
    p = p / p.sum()
    for first in range(3):
        for second in range(3):
            expected = 0.0 if first == second else float(rows * p[first] * p[second] / (1 - p[first]))
            count = int(((slots[:, 0] == first) & (slots[:, 1] == second)).sum())
            assert abs(count - expected) <= 5 * expected**0.5


def test_the_examples_are_those_of_every_machine() -> None:
    found = Recall(16, (2,), 12).batch(np.array([1]))
    assert found["tokens"].tolist() == [[4, 7, 5, 6, 4, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0]]
    assert found["places"].tolist() == [[4, 12]]
    assert found["answers"].tolist() == [[7, 6]]
    assert not torch.equal(found["tokens"], Recall(16, (2,), 12, seed=1).batch(np.array([1]))["tokens"])


def test_impossible_values_are_named() -> None:
    for options, said in (
        ({"length": 3}, "length=3"),
        ({"length": 33}, "length=33 cannot work: accepted is an even number"),
        ({"pairs": (8, 33)}, r"pairs=\[8, 33\] cannot work: accepted is one number or several, from 1 to 32"),
        ({"pairs": (0,)}, r"pairs=\[0\]"),
        ({"pairs": ()}, r"pairs=\[\]"),
        ({"vocab": 16}, "from 1 to 7"),
        ({"count": 0}, "count=0"),
    ):
        with pytest.raises(ValueError, match=said):
            Recall(**options)
