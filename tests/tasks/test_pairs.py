import numpy as np
import pytest
import torch

from subquad.models import Seq2Seq
from subquad.tasks.pairs import END, START, WRITTEN, Fixed, Pairs, collate, date_pair, translate

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
    batch = collate([("abc", "x"), ("defgh", "yz")])
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
    batch = collate([("a", "xy"), ("b", "x"), ("c", "xyz")])
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
