import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.tasks.lra import listops
from subquad.tasks.lra.listops import CLOSE, DIGIT, LENGTHS, NAMES, Expressions, ListOps, draw, generate


def solve(tokens: np.ndarray) -> int:
    """The value of an expression, read from left to right with a stack."""
    stack: list[list[int]] = [[]]
    kinds: list[int] = []
    for token in tokens.tolist():
        if token == CLOSE:
            values, kind = sorted(stack.pop()), kinds.pop()
            middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) // 2
            stack[-1].append((values[0], values[-1], middle, sum(values) % 10)[kind])
        elif token > 10:
            kinds.append(token - 11)
            stack.append([])
        else:
            stack[-1].append(token - DIGIT)
    return stack[0][0]


def text(tokens: np.ndarray) -> str:
    """As people read it: [MAX 2 [MIN 3 4 ] 1 ]"""
    return " ".join("]" if t == CLOSE else NAMES[t - 11] if t > 10 else str(t - DIGIT) for t in tokens.tolist())


def rows(made: Expressions) -> list[np.ndarray]:
    return np.split(made.tokens, np.cumsum(made.lengths.astype(np.int64))[:-1])


def value_of(words: list[str]) -> int:
    """By recursion over the text, as one would do by hand."""
    word = words.pop(0)
    if not word.startswith("["):
        return int(word)
    values = []
    while words[0] != "]":
        values.append(value_of(words))
    words.pop(0)
    if word == "[MIN":
        return min(values)
    if word == "[MAX":
        return max(values)
    return int(np.median(values)) if word == "[MED" else sum(values) % 10


@pytest.fixture(scope="module")
def made() -> Expressions:
    return draw(seed=0, number=0, trees=12_000)


def test_values_are_those_of_the_text(made: Expressions) -> None:
    for tokens, value in zip(rows(made)[:300], made.values, strict=False):
        assert value == solve(tokens) == value_of(text(tokens).split())


def test_the_draw_follows_the_official_rules(made: Expressions) -> None:
    assert 0.074 < len(made.lengths) / made.drawn < 0.093  # 8.3 %, within four deviations
    assert made.lengths.min() > 500
    assert made.lengths.max() < 2000
    assert 990 < made.lengths.mean() < 1085
    share = np.bincount(made.values, minlength=10) / len(made.values)
    assert 0.12 < share[0] < 0.22
    assert 0.12 < share[9] < 0.22
    assert share[1:9].max() < 0.13
    assert set(np.unique(made.tokens)) == set(range(1, 16))


def test_depth_and_arguments(made: Expressions) -> None:
    deepest, arguments = 0, set()
    for tokens in rows(made):
        stack: list[int] = []
        for token in tokens.tolist():
            if token == CLOSE:
                arguments.add(stack.pop())
            else:
                if stack:
                    stack[-1] += 1
                if token > 10:
                    stack.append(0)
            deepest = max(deepest, len(stack))
    assert arguments == set(range(2, 11))
    assert deepest == 9  # operators at depths 1 to 9, digits below


def test_the_same_seed_gives_the_same_set_however_many_processes() -> None:
    alone, together = generate(60, seed=3, workers=1), generate(60, seed=3, workers=2)
    assert (alone.tokens == together.tokens).all()
    assert (alone.values == together.values).all()
    assert not np.array_equal(generate(60, seed=4, workers=1).tokens, alone.tokens)
    assert len({row.tobytes() for row in rows(alone)}) == 60


def test_repeated_expressions_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = draw(0, 0, 2000)
    monkeypatch.setattr(listops, "draw", lambda *_, **__: one)
    monkeypatch.setattr(listops, "CHUNK", 10**9)
    with pytest.raises(RuntimeError, match=f"{len(one.lengths)} of"):
        listops.generate(10 * len(one.lengths), workers=1)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=10), st.integers(0, 3))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_one_operator(values: list[int], kind: int) -> None:
    tokens = np.array([11 + kind, *(DIGIT + v for v in values), CLOSE], np.uint8)
    assert solve(tokens) == value_of(text(tokens).split())


def test_task(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    task = ListOps(train=50, held_out=20)
    sizes = {split: len(task.source(split)) for split in ("train", "validation", "test")}
    assert sizes == {"train": 50, "validation": 20, "test": 20}
    batch = task.source("test").batch(np.array([3, 7]), 0)
    for tokens, length, label in zip(batch["tokens"], batch["lengths"], batch["labels"], strict=True):
        assert solve(tokens[:length].numpy()) == label
        assert not tokens[length:].any()


def test_short_expressions_have_the_lengths_asked_for(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `subquad compare --task listops` trains on."""
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    task = ListOps(train=1500, held_out=250, shortest=16, longest=128)
    source = task.source("train")
    batch = source.batch(np.arange(len(source)), 0)
    assert batch["tokens"].shape == (1500, 128)
    assert 16 <= int(batch["lengths"].min()) < int(batch["lengths"].max()) <= 128
    assert len(set(batch["labels"].tolist())) == 10
    for tokens, length, label in zip(batch["tokens"], batch["lengths"], batch["labels"], strict=True):
        assert solve(tokens[:length].numpy()) == label
    assert LENGTHS == (501, 1999)
    assert ListOps().positions() == 2000
