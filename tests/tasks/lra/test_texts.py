"""Text, Retrieval, Image and the packed files, on tiny data sets of the same format."""

from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.data import files
from subquad.tasks.lra import image, retrieval
from subquad.tasks.lra.image import Image
from subquad.tasks.lra.listops import ListOps
from subquad.tasks.lra.pack import pack
from subquad.tasks.lra.pathfinder import Pathfinder
from subquad.tasks.lra.retrieval import STAND_IN, Retrieval, bag_of_words, pairs, read_tsv
from subquad.tasks.lra.task import Classification, cut
from subquad.tasks.lra.text import Text
from subquad.training.task import SPLITS, Split

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
    monkeypatch.setattr(image, "SIZES", (16, 4, 4))
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


def test_validation_is_held_out_of_training(data: Path) -> None:
    def texts(split: Split) -> set[bytes]:
        found = Text(length=100).source(split)
        return {bytes(row.tolist()) for row in found.batch(np.arange(len(found)), 0)["tokens"]}

    train, validation, test = texts("train"), texts("validation"), texts("test")
    assert [len(found) for found in (train, validation, test)] == [72, 8, 80]
    assert len(train | validation | test) == 160


def test_sizes_are_the_arena_s() -> None:
    assert (ListOps().train, ListOps().held_out) == (96_000, 2_000)
    assert (ListOps().train, Pathfinder().train, Pathfinder().held_out) == (96_000, 160_000, 20_000)
    photographs = {"tokens": np.arange(60_000), "labels": np.arange(60_000)}
    rows = [cut(photographs, split, *image.SIZES).tokens for split in SPLITS]
    assert [len(part) for part in rows] == [45_000, 5_000, 10_000]
    assert np.concatenate(rows).tolist() == list(range(60_000))


@torch.no_grad()
def test_what_lies_behind_a_text_is_not_read(data: Path) -> None:
    tasks: dict[Classification, tuple[str, ...]] = {
        Text(length=30): ("tokens",),
        Retrieval(length=30, train=8, held_out=4): ("a", "b"),
    }
    for task, sides in tasks.items():
        model = task.make_model({**task.model, "dim": 8, "heads": 2, "ff_dim": 8}).eval()
        batch = task.source("train").batch(np.arange(8), 0)
        changed = dict(batch)
        for side in sides:
            lengths = batch["lengths" if side == "tokens" else f"{side}_lengths"]
            assert (lengths < 30).any()
            behind = torch.arange(30) >= lengths[:, None]
            changed[side] = torch.where(behind, 7, batch[side].long()).to(batch[side].dtype)
        torch.testing.assert_close(task.logits(model, changed), task.logits(model, batch))


def test_pairs_are_balanced_and_share_no_film_between_splits() -> None:
    films, liked = np.repeat(np.arange(100), 6), np.tile([0, 1], 300)
    found = {split: pairs(films, liked, split, 400) for split in ("train", "validation", "test")}
    seen: set[int] = set()
    for rows, labels in found.values():
        assert labels.sum() == 200
        assert ((films[rows[:, 0]] == films[rows[:, 1]]) == (labels == 1)).all()
        assert (rows[:, 0] != rows[:, 1]).all()
        mine = set(films[rows].ravel().tolist())
        assert not mine & seen
        seen |= mine
    again, _ = pairs(films, liked, "train", 400)
    assert (again == found["train"][0]).all()


def test_no_single_review_tells_the_label() -> None:
    """Films with many reviews are equally likely in both kinds of pairs: the second review alone tells nothing."""
    films = np.repeat(np.arange(60), np.tile([2, 30], 30))
    liked = (np.arange(len(films)) * 7919 % 10 < np.where(films % 3, 9, 1)).astype(int)  # most reviews of a film agree
    rows, labels = pairs(films, liked, "train", 8000)
    agree = liked[rows[:, 0]] == liked[rows[:, 1]]
    assert agree.mean() > 0.7
    assert abs(agree[labels == 1].mean() - agree[labels == 0].mean()) < 0.03
    sizes = np.bincount(films)[films[rows[:, 1]]]
    assert abs((sizes[labels == 1] > 10).mean() - (sizes[labels == 0] > 10).mean()) < 0.03


def test_a_bag_of_words_finds_films_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    films, liked = np.repeat(np.arange(100), 6), np.tile([0, 1], 300)

    def stored(named: bool) -> dict[str, np.ndarray]:
        words = [
            f"a {'good' if like else 'bad'} {f'film{film}' if named else 'film'}"
            for film, like in zip(films, liked, strict=True)
        ]
        pieces = [np.frombuffer(text.encode(), np.uint8) for text in words]
        starts = np.cumsum([0, *map(len, pieces)])
        return {"text": np.concatenate(pieces), "starts": starts, "labels": liked, "films": films}

    for named, low, high in ((True, 100, 100), (False, 40, 60)):
        monkeypatch.setattr(retrieval, "stored", lambda named=named: stored(named))
        assert low <= bag_of_words(Retrieval(held_out=400)) <= high


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
    line = b"1.0\tP1\tP2\tb'first text'\tb\"sec'd\\xc3\\xa9\"\r\n0.0\tP1\tP3\tfirst text\tother one\n"
    for split in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_bytes(line)
    batch = Retrieval(length=12, folder=str(tmp_path)).source("validation").batch(np.array([0, 1]), 0)
    assert batch["labels"].tolist() == [1, 0]
    assert [bytes(row[:n].tolist()) for row, n in zip(batch["b"], batch["b_lengths"], strict=True)] == [
        b"sec'd\xc3\xa9",
        b"other one",
    ]
    (tmp_path / "broken.tsv").write_bytes(b"1.0\tP1\n")
    with pytest.raises(files.Broken, match=r"broken\.tsv:1 has 2 fields"):
        read_tsv(tmp_path / "broken.tsv")
    for text, said in ((b"label\ta\tb\tc\td\n", r"broken\.tsv:1 has the label"), (b"", r"broken\.tsv is empty")):
        (tmp_path / "broken.tsv").write_bytes(text)
        with pytest.raises(files.Broken, match=said):
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
