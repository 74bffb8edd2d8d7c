"""Text, Retrieval, Image and the packed files, on sets of the same format in miniature."""

from pathlib import Path

import numpy as np
import pytest

from subquad.data import files
from subquad.tasks.lra import image
from subquad.tasks.lra.image import Image
from subquad.tasks.lra.pack import pack
from subquad.tasks.lra.retrieval import STAND_IN, Retrieval, pairs, read_tsv
from subquad.tasks.lra.text import Text

REVIEWS = 40  # of each part and kind


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """aclImdb and CIFAR-10, small."""
    folder = tmp_path / "data"
    for part in ("train", "test"):
        for label, kind in enumerate(("neg", "pos")):
            place = folder / "aclImdb" / part / kind
            place.mkdir(parents=True)
            for n in range(REVIEWS):
                words = f"{part} {kind} {n} ".encode() * (1 + n % 7)
                (place / f"{n}_{2 + 6 * label}.txt").write_bytes(words)
            urls = [f"http://www.imdb.com/title/tt{1000 + n // 2:07d}/usercomments" for n in range(REVIEWS)]
            (folder / "aclImdb" / part / f"urls_{kind}.txt").write_text("\n".join(urls) + "\n")
    batches = folder / "cifar-10-batches-bin"
    batches.mkdir()
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        records = random.integers(0, 256, (4, 3073)).astype(np.uint8)
        records[:, 0] %= 10
        (batches / f"{name}.bin").write_bytes(records.tobytes())
    splits = {"train": slice(0, 16), "validation": slice(16, 20), "test": slice(20, 24)}
    monkeypatch.setattr(image, "SPLITS", splits)
    monkeypatch.setenv("SUBQUAD_DATA", str(folder))
    return folder


def test_text(data: Path) -> None:
    task = Text(length=20)
    sizes = [len(task.source(split)) for split in ("train", "validation", "test")]
    assert sizes == [72, 8, 80]
    batch = task.source("test").batch(np.arange(80), 0)
    for tokens, length, label in zip(batch["tokens"], batch["lengths"], batch["labels"], strict=True):
        written = bytes(tokens[:length].tolist())
        assert written.startswith(b"test pos" if label else b"test neg")
        assert not tokens[length:].any()
    seen = [bytes(row.tolist()) for split in ("train", "validation") for row in task.source(split).batch(
        np.arange(72 if split == "train" else 8), 0)["tokens"]]  # fmt: skip
    assert all(words.startswith(b"train") for words in seen)
    with pytest.raises(ValueError, match="length"):
        Text(length=5000)


def test_pairs_are_balanced_and_share_no_film_between_splits() -> None:
    films = np.repeat(np.arange(100), 6)
    found = {split: pairs(films, split, 400) for split in ("train", "validation", "test")}
    seen: set[int] = set()
    for rows, labels in found.values():
        assert labels.sum() == 200
        assert ((films[rows[:, 0]] == films[rows[:, 1]]) == (labels == 1)).all()
        assert (rows[:, 0] != rows[:, 1]).all()
        mine = set(films[rows].ravel().tolist())
        assert not mine & seen
        seen |= mine
    again, _ = pairs(films, "train", 400)
    assert (again == found["train"][0]).all()


def test_no_single_review_tells_the_label() -> None:
    """Films with many reviews are no likelier in one kind of pair: guessing from the right one alone is a coin."""
    films = np.repeat(np.arange(60), np.tile([2, 30], 30))
    rows, labels = pairs(films, "train", 8000)
    sizes = np.bincount(films)[films[rows[:, 1]]]
    assert abs((sizes[labels == 1] > 10).mean() - (sizes[labels == 0] > 10).mean()) < 0.03


def test_retrieval_stand_in(data: Path) -> None:
    task = Retrieval(length=16, train=30, held_out=10)
    assert task.stand_in == STAND_IN == "IMDb same-movie pairs"
    batch = task.source("train").batch(np.array([0, 3]), 0)
    assert batch["a"].shape == batch["b"].shape == (2, 16)
    model = task.make_model({**task.model, "dim": 8, "heads": 2, "ff_dim": 8})
    assert task.loss(model, batch).count == 2
    assert task.measure(model, batch)["accuracy"][1] == 2


def test_the_arena_s_tsv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path / "data"))
    line = b"1.0\tP1\tP2\tb'first text'\tb'second'\n0.0\tP1\tP3\tfirst text\tother one\n"
    for split in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_bytes(line)
    batch = Retrieval(length=12, folder=str(tmp_path)).source("validation").batch(np.array([0, 1]), 0)
    assert batch["labels"].tolist() == [1, 0]
    assert [bytes(row[:n].tolist()) for row, n in zip(batch["b"], batch["b_lengths"], strict=True)] == [
        b"second",
        b"other one",
    ]
    (tmp_path / "broken.tsv").write_bytes(b"1.0\tP1\n")
    with pytest.raises(files.Broken, match=r"broken\.tsv:1 has 2 fields"):
        read_tsv(tmp_path / "broken.tsv")
    with pytest.raises(files.Missing, match="new_aan_pairs"):
        Retrieval(folder=str(tmp_path / "data")).source("train")


def test_packed_files_give_the_same_data(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = ("train", "validation", "test")
    tasks = (Text(length=20), Image(), Retrieval(length=16, train=20, held_out=10))
    first = [task.source(s).batch(np.arange(4), 0) for task in tasks for s in splits]
    written = pack(tmp_path / "packed", longest=20)
    assert [path.name for path in written] == ["imdb.npz.xz", "image.npz.xz"]
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path / "packed"))
    second = [task.source(s).batch(np.arange(4), 0) for task in tasks for s in splits]
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        assert all((one[name] == other[name]).all() for name in one)


def test_image_is_grey(data: Path) -> None:
    batch = Image().source("validation").batch(np.arange(4), 0)
    assert batch["tokens"].shape == (4, 1024)
    record = np.frombuffer((data / "cifar-10-batches-bin" / "data_batch_5.bin").read_bytes(), np.uint8)[:3073]
    red, green, blue = record[1:].reshape(3, 1024).astype(float)
    grey = 0.2989 * red + 0.587 * green + 0.114 * blue
    assert np.abs(batch["tokens"][0].numpy() - grey).max() <= 1
    assert batch["labels"][0] == record[0]
