from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data import imdb
from subquad.data.files import Broken
from subquad.data.generated import Arrays
from subquad.data.padding import first_bytes


def texts_of(part: Arrays) -> list[bytes]:
    return [part["text"][start:end].tobytes() for start, end in pairwise(part["starts"])]


def put(folder: Path) -> None:
    """Three reviews of each kind, named 0, 2 and 10: the lists of films also have lines for the numbers between."""
    for part in ("train", "test"):
        for kind, stars in (("neg", 3), ("pos", 8)):
            place = folder / "aclImdb" / part / kind
            place.mkdir(parents=True)
            lines = [f"http://www.imdb.com/title/tt{1000 + n:07}/usercomments" for n in range(11)]
            (place.parent / f"urls_{kind}.txt").write_text("\n".join(lines) + "\n")
            for n in (0, 2, 10):
                (place / f"{n}_{stars}.txt").write_text(f"{part} {kind} {n} «été»" + "!" * n, encoding="utf-8")


def test_reviews_are_read_with_label_stars_and_film(data: Path) -> None:
    put(data)
    for _ in range(2):  # from the folder, then from the cached file
        training, test = imdb.load()
        assert len(training["labels"]) == len(test["labels"]) == 6
        assert [text.decode()[:12] for text in texts_of(training)] == [
            *("train neg 0 ", "train neg 2 ", "train neg 10"),
            *("train pos 0 ", "train pos 2 ", "train pos 10"),
        ]
        assert texts_of(test)[5].decode() == "test pos 10 «été»!!!!!!!!!!"
        assert training["labels"].tolist() == [0, 0, 0, 1, 1, 1]
        assert training["films"].tolist() == [1000, 1002, 1010] * 2


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=6), st.integers(1, 25))
def test_padding_keeps_the_beginning(texts: list[bytes], length: int) -> None:
    starts = np.cumsum([0, *map(len, texts)])
    reviews = {"text": np.frombuffer(b"".join(texts), np.uint8), "starts": starts}
    order = np.arange(len(texts))[::-1]
    tokens, lengths = first_bytes(reviews, order, length)
    assert tokens.shape == (len(texts), length)
    for row, count, text in zip(tokens, lengths.tolist(), texts[::-1], strict=True):
        assert count == min(len(text), length)
        assert bytes(row.tolist()) == text[:length].ljust(length, b"\0")


def test_an_incomplete_set_is_named(data: Path) -> None:
    put(data)
    place = data / "aclImdb/train"
    (place / "urls_pos.txt").write_text("http://www.imdb.com/title/tt0000001/usercomments\n")
    with pytest.raises(Broken, match=r"urls_pos\.txt has only 1 lines, and none for 10_8\.txt"):
        imdb.load()
    (place / "neg/notes.txt").write_text("mine")
    with pytest.raises(Broken, match=r"neg/notes\.txt is not a review: reviews have names like"):
        imdb.load()
    for path in (place / "neg").iterdir():
        path.unlink()
    with pytest.raises(Broken, match="neg holds no reviews"):
        imdb.load()
    (place / "neg").rmdir()
    with pytest.raises(Broken, match=r"neg is missing: .*aclImdb is not the complete folder"):
        imdb.load()
