from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.data.files import Broken
from subquad.models import Seq2Seq
from subquad.tasks.pairs import END, LONGEST, START, WRITTEN, Fixed, Pairs, collate, date_pair, translate

pytestmark = pytest.mark.usefixtures("no_gradients")

SMALL = {"dim": 16, "depth": 1, "heads": 2}


def test_dates_as_people_write_them() -> None:
    day = int((np.datetime64("1999-03-22") - np.datetime64("1900-01-01")).astype(int))
    written = [date_pair(day, form)[0] for form in range(len(WRITTEN))]
    assert {date_pair(day, form)[1] for form in range(len(WRITTEN))} == {"1999-03-22"}
    assert "Monday, 22nd of March 1999" in written
    assert "22 Mar 1999" in written
    assert "Mon Mar 22 1999" in written
    assert "1999/03/22" in written
    assert len(set(written)) == len(WRITTEN)
    assert "13th" in date_pair(day - 9, 4)[0]
    year = [date_pair(day + later, form) for later in range(365) for form in range(len(WRITTEN))]
    assert tuple(max(map(len, texts)) for texts in zip(*year, strict=True)) == LONGEST


def test_splits_share_no_day_and_batches_repeat() -> None:
    task = Pairs()
    days = {split: set(task.source(split).days.tolist()) for split in ("train", "validation", "test")}  # type: ignore
    assert not days["train"] & days["validation"]
    assert not days["train"] & days["test"]
    assert not days["validation"] & days["test"]
    source = task.source("train")
    first, again = (source.batch(np.arange(5), 2) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(source.batch(np.arange(5), 3)["source"][:, :4], first["source"][:, :4])


@pytest.mark.parametrize("cross", ["softmax", "linear", "additive"])
def test_greedy_decoding_finds_exactly_what_the_model_prefers(cross: str) -> None:
    task = Pairs()
    torch.manual_seed(0)
    model = task.make_model({**task.model, **SMALL, "cross": cross}).eval()
    assert isinstance(model, Seq2Seq)
    batch = collate([("abc", "x"), ("defgh", "yz")], (5, 2))
    with torch.no_grad():
        written = translate(model, batch["source"], batch["source_lengths"], 4)
        for row in range(2):
            prefix = [START]
            for byte in written[row].tolist():
                n = int(batch["source_lengths"][row])
                logits = model(batch["source"][row : row + 1, :n], torch.tensor([prefix]))
                assert int(logits[0, -1].argmax()) == byte
                if byte == END:
                    break
                prefix.append(byte)


def test_only_a_whole_right_answer_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Pairs()
    batch = collate([("a", "xy"), ("b", "x"), ("c", "xyz")], (1, 3))
    answers = torch.tensor([[ord("x"), ord("y"), END, 0], [ord("x"), ord("y"), END, 0], [ord("x")] * 4])
    monkeypatch.setattr("subquad.tasks.pairs.translate", lambda *_: answers)
    model = task.make_model({**task.model, **SMALL}).eval()
    sums = task.measure(model, batch)
    assert [int(part) for part in sums["accuracy"]] == [1, 3]
    assert int(sums["nats"][1]) == 3 + 2 + 4  # every byte and the end
    assert task.summary({k: (float(a), float(b)) for k, (a, b) in sums.items()})["accuracy"] == pytest.approx(1 / 3)


def test_pairs_once_and_for_all() -> None:
    source = Fixed([("ab", "a b"), ("c", "c")])
    batch = source.batch(np.array([1, 0]), 7)
    assert batch["source"].tolist() == [[99, 0], [97, 98]]
    assert batch["target"].tolist() == [[START, 99, END, 0, 0], [START, 97, 32, 98, END]]
    with pytest.raises(ValueError, match="dates"):
        Pairs(set="poems")


def test_spaces_are_of_any_text_in_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes("é été\0naïve – “où”\n".encode() * 200)
    for cut in range(4):  # also inside a letter of several bytes
        task = Pairs(set="spaces", text=str(path), words=2, count=100)
        found = task.source("train").pairs  # type: ignore[attr-defined]
        assert found[0] == ("éténaïve", "été naïve")
        assert len(found) == 100
        path.write_bytes(path.read_bytes()[: -cut - 1])
    path.write_bytes("un café ".encode("latin-1") * 200)
    with pytest.raises(Broken, match=r"book\.txt holds b'caf\\xe9': accepted is text in UTF-8"):
        task.source("train")
    path.write_bytes(b"one two three " * 5)
    with pytest.raises(Broken, match=r"book\.txt has 0 whole words \(test\): accepted are 2 or more"):
        task.source("test")


def test_batches_come_in_few_shapes_and_padding_counts_for_nothing() -> None:
    task = Pairs()
    pairs = [("ab" * n, "a b" * n) for n in range(1, 60)]
    source = Fixed(pairs)
    shapes = {tuple(batch[name].shape for name in ("source", "target")) for batch in (
        source.batch(np.array([i, i // 2]), 0) for i in range(len(pairs))
    )}  # fmt: skip
    assert len({a for a, _ in shapes}) <= 8
    assert len({b for _, b in shapes}) <= 8
    torch.manual_seed(0)
    model = task.make_model({**task.model, **SMALL}).double().eval()
    batch = source.batch(np.array([8, 4]), 0)
    sizes = {name: int(batch[f"{name}_lengths"].max()) for name in ("source", "target")}
    assert all(batch[name].shape[1] > size for name, size in sizes.items())
    tight = {**batch, **{name: batch[name][:, :size] for name, size in sizes.items()}}
    for (a, count), (b, other) in zip(
        task.measure(model, batch).values(), task.measure(model, tight).values(), strict=True
    ):
        torch.testing.assert_close(a, b)
        assert int(count) == int(other)
