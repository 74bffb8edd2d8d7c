import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data import text
from subquad.data.files import Broken, Missing
from subquad.data.text import Windows

few = settings(max_examples=60, deadline=None, derandomize=True)


def test_any_file_is_cut_in_order_and_mapped(data: Path, tmp_path: Path) -> None:
    body = bytes(np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8))
    (tmp_path / "book.bin").write_bytes(body)
    corpus = text.load(str(tmp_path / "book.bin"))
    assert corpus.name == "book.bin"
    assert [len(part) for part in corpus[1:]] == [900, 50, 50]
    assert b"".join(part.tobytes() for part in corpus[1:]) == body
    assert isinstance(corpus.train, np.memmap)
    (data / "mine.txt").write_bytes(body)
    assert text.load("mine.txt").train.tobytes() == body[:900]


def test_an_unknown_name_lists_the_accepted_ones(data: Path) -> None:
    with pytest.raises(ValueError, match=r"'enwik9' is neither.*enwik8, text8, .*ptb") as raised:
        text.load("enwik9")
    assert f"relative to {Path.cwd()} or {data}" in str(raised.value)
    (data / "small").write_bytes(b"ab")
    with pytest.raises(Broken, match="small holds 2 bytes"):
        text.load("small")


def test_a_truncated_file_is_not_taken_for_the_whole_corpus(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("enwik8", "text8"):
        (data / name).write_bytes(b"x" * 1000)
        with pytest.raises(Broken, match=f"{name} holds 1,000 bytes, not the 100,000,000"):
            text.load(name)
    (data / "text8.first12.5MB").write_bytes(b"the quick brown fox " * 50)
    with pytest.raises(Broken, match=r"text8\.first12\.5MB holds 1,000 bytes, not the 12,549,839 of text8\.first12"):
        text.load("text8.first12.5MB")
    monkeypatch.setitem(text.FIRST, "text8.first12.5MB", 1000)
    assert text.load("text8.first12.5MB").name == "text8 first 12.5 MB"
    with pytest.raises(Broken, match=r"enwik8 holds 1,000 bytes"):  # a truncated file is not cut either
        text.load("enwik8.first4.15MB")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("enwik8.first4.15MB", [3_738_959, 207_721, 207_719]),
        ("text8.first12.5MB", [11_294_855, 627_493, 627_491]),
    ],
)
def test_the_first_bytes_are_cut_from_the_whole(
    data: Path, monkeypatch: pytest.MonkeyPatch, name: str, sizes: list[int]
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    whole, size = name.partition(".")[0], sum(sizes)
    advice = rf"{name} \(the first {size:,} bytes of {whole}\) is not in .*{whole} is not in .*Put it there \(from http"
    with pytest.raises(Missing, match=advice):
        text.load(name)
    with (data / whole).open("wb") as file:
        file.truncate(100_000_000)  # zeros that take no room
        for at, mark in ((0, b"a"), (size - 1, b"y"), (size, b"z")):
            file.seek(at)
            file.write(mark)
    corpus = text.load(name)
    assert [len(part) for part in corpus[1:]] == sizes
    assert (chr(corpus.train[0]), chr(corpus.test[-1])) == ("a", "y")
    (data / name).write_bytes(b"my own file " * 50)
    monkeypatch.setitem(text.FIRST, name, 600)
    assert text.load(name).train[:12].tobytes() == b"my own file "


def test_the_error_for_the_whole_names_the_part_that_exists(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(Missing, match=r"holds it$"):
        text.load("text8")
    with pytest.raises(Missing, match=r"You can also give the path of your own file$"):
        text.load("text8.first12.5MB")  # the default of the task
    (data / "text8.first12.5MB").write_bytes(b"x" * 100)
    with pytest.raises(Missing, match=r"text8\.first12\.5MB exists and can be loaded by that name$"):
        text.load("text8")


def test_the_whole_is_split_as_in_the_papers(data: Path) -> None:
    with (data / "enwik8").open("wb") as file:
        file.truncate(100_000_000)  # zeros that take no room
        for at, mark in ((0, b"a"), (90_000_000, b"b"), (95_000_000, b"c"), (99_999_999, b"z")):
            file.seek(at)
            file.write(mark)
    corpus = text.load("enwik8")
    assert [len(part) for part in corpus[1:]] == [90_000_000, 5_000_000, 5_000_000]
    assert [chr(part[0]) for part in corpus[1:]] == ["a", "b", "c"]
    assert chr(corpus.test[-1]) == "z"


@pytest.mark.parametrize("characters", [False, True])
def test_treebank_characters_come_from_words_or_characters(data: Path, characters: bool) -> None:
    (data / "ptb").mkdir()
    for part in ("train", "valid", "test"):
        lines = [f" no it was n't {part} monday ", " mr. <unk> is N years old "]
        if characters:
            spread = [" ".join(line.strip().replace(" ", "_")) + " " for line in lines]
            (data / f"ptb/ptb.char.{part}.txt").write_text("\n ".join(spread) + "\n")
        else:
            (data / f"ptb/ptb.{part}.txt").write_text("\n".join(lines) + "\n")
    corpus = text.load("ptb")
    assert bytes(corpus.validation).decode() == "no_it_was_n't_valid_monday\nmr._<unk>_is_N_years_old\n"
    assert bytes(corpus.train).decode().startswith("no_it_was_n't_train_monday\n")


def test_treebank_characters_of_another_alphabet_are_named(data: Path) -> None:
    (data / "ptb").mkdir()
    for part in ("train", "valid", "test"):
        (data / f"ptb/ptb.{part}.txt").write_text("caf\u00e9\n", encoding="utf-8")
    with pytest.raises(Broken, match=r"ptb\.train\.txt holds 0xc3 at byte 3: accepted is text in ascii"):
        text.load("ptb")


NOVEL = """<?xml version="1.0"?><TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><p>not this</p></teiHeader><text>
<front><div type="titlepage"><p>Novel {n}</p></div></front><body><div type="chapter"><head> CHAPTER I. </head>
<p>It was <hi>very</hi>
   late,<note>said the editor</note> he <pb n="2"/>thought.</p><quote><l>A verse</l><l>and one more</l></quote></div>
</body></text></TEI>"""


def test_novels_become_one_paragraph_a_line_and_are_split_whole(data: Path) -> None:
    (data / "eltec-eng/level1").mkdir(parents=True)
    for n in range(40):
        (data / f"eltec-eng/level1/ENG{n:03}.xml").write_text(NOVEL.format(n=n))
    corpus = text.load("eltec-eng")
    assert corpus.name == "ELTeC-eng, 40 novels"
    body = "\nCHAPTER I.\nIt was very late, he thought.\nA verse\nand one more\n\0"
    assert bytes(corpus.validation).decode() == f"Novel 9{body}Novel 29{body}"
    assert bytes(corpus.test).decode() == f"Novel 19{body}Novel 39{body}"
    titles = [line for line in bytes(corpus.train).decode().replace("\0", "\n").split("\n") if line.startswith("Novel")]
    assert titles == [f"Novel {n}" for n in range(40) if n not in (9, 19, 29, 39)]


def test_a_broken_novel_is_named(data: Path) -> None:
    (data / "eltec-eng/level1").mkdir(parents=True)
    with pytest.raises(Broken, match="holds 0 XML files"):
        text.load("eltec-eng")
    for n in range(20):
        (data / f"eltec-eng/level1/ENG{n:03}.xml").write_text(NOVEL.format(n=n))
    (data / "eltec-eng/level1/ENG007.xml").write_text(NOVEL[:200])
    with pytest.raises(Broken, match=r"ENG007\.xml is not complete XML"):
        text.load("eltec-eng")
    (data / "eltec-eng/level1/ENG007.xml").write_text("<html/>")
    with pytest.raises(Broken, match=r"ENG007\.xml is not a TEI file"):
        text.load("eltec-eng")


@few
@given(st.data(), st.integers(2, 300))
def test_windows_predict_every_token_once(data: st.DataObject, size: int) -> None:
    length = data.draw(st.integers(1, size - 1))
    context = data.draw(st.integers(0, length - 1))
    tokens = np.arange(size) % 251
    windows = Windows(tokens.astype(np.uint8), length, context)
    batch = windows.batch(np.arange(len(windows)))
    assert batch["tokens"].shape == (len(windows), length + 1)
    predicted = [row[1:][first:] for row, first in zip(batch["tokens"], batch["first"], strict=True)]
    np.testing.assert_array_equal(np.concatenate(predicted), tokens[1:])
    assert all(first >= context for first in batch["first"][1:])
    assert int(batch["first"][0]) == 0


@few
@given(st.data(), st.integers(2, 300), st.integers(0, 50))
def test_shifted_windows_lie_in_the_text_and_differ_by_epoch(data: st.DataObject, size: int, epoch: int) -> None:
    length = data.draw(st.integers(1, size - 1))
    tokens = (np.arange(size) % 251).astype(np.uint8)
    windows = Windows(tokens, length, shifted=True)
    batch = windows.batch(np.arange(len(windows)), epoch)
    follows = (batch["tokens"][:, 1:].int() - batch["tokens"][:, :-1].int()) % 251
    assert bool((follows == 1).all())
    assert not batch["first"].any()
    again = windows.batch(np.arange(len(windows)), epoch)
    assert bool((again["tokens"] == batch["tokens"]).all())


def test_shifts_spread_over_the_stride() -> None:
    windows = Windows(np.arange(200, dtype=np.uint8), 50, shifted=True)
    starts = {int(windows.batch(np.array([0]), epoch)["tokens"][0, 0]) for epoch in range(20)}
    assert len(starts) >= 19
    assert 0 in starts


@pytest.mark.parametrize(
    ("size", "length", "context", "said"),
    [
        (10, 10, 0, "length=10 cannot work with 10 tokens: accepted is 1 to 9"),
        (10, 0, 0, "length=0"),
        (10, 4, 4, "context=4 cannot work: accepted is 0 to length - 1 = 3"),
        (10, 4, -1, "context=-1"),
    ],
)
def test_impossible_windows_are_named(size: int, length: int, context: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Windows(np.zeros(size, np.uint8), length, context)
