"""The real data sets, if the data folder holds them: counts and facts that others have published or that were counted
in a second way."""

import numpy as np
import pytest
import torch

from subquad.data import cifar10, digits, files, imdb, mnist, music, speech, text
from subquad.data.files import File


def needs(*wanted: File) -> pytest.MarkDecorator:
    absent = [file.path for file in wanted if files.find(file) is None]
    return pytest.mark.skipif(bool(absent), reason=f"not in {files.folder()}: {', '.join(absent)}")


def test_digits() -> None:
    training, test = digits.load()
    assert (len(training.labels), len(test.labels)) == (1500, 297)
    assert int(training.pixels.max()) == 16


@needs(*mnist.FILES.values())
def test_mnist() -> None:
    training, test = mnist.load()
    assert (len(training.labels), len(test.labels)) == (60000, 10000)
    assert training.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert training.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    scaled = training.pixels.float() / 255
    assert float(scaled.mean()) == pytest.approx(0.1307, abs=5e-5)
    assert float(scaled.std()) == pytest.approx(0.3081, abs=5e-5)


@needs(cifar10.FOLDER)
def test_cifar10() -> None:
    training, test = cifar10.load()
    assert training.labels.bincount().tolist() == [5000] * 10
    assert test.labels.bincount().tolist() == [1000] * 10
    assert [cifar10.CLASSES[n] for n in test.labels[:4]] == ["cat", "ship", "ship", "airplane"]
    means = training.pixels.view(-1, 3).float().mean(0) / 255
    torch.testing.assert_close(means, torch.tensor((0.4914, 0.4822, 0.4465)), atol=1e-4, rtol=0)
    grey = cifar10.grey(test)
    assert grey.pixels.shape == (10000, 1024)
    assert float(grey.pixels.float().mean() / 255) == pytest.approx(0.48, abs=0.01)


@needs(imdb.FOLDER)
def test_imdb() -> None:
    training, test = imdb.load()
    for part in (training, test):
        assert len(part["labels"]) == 25000
        assert part["labels"].sum() == 12500
        assert np.unique(part["films"], return_counts=True)[1].max() == 30
        assert int(np.diff(part["starts"]).min()) >= 32
    assert training["text"][training["starts"][12500] :].tobytes().startswith(b"Bromwell High is a cartoon comedy.")


@pytest.mark.parametrize(
    ("name", "sizes", "alphabet"),
    [
        ("text8.first12.5MB", (11_294_855, 627_493, 627_491), 27),
        ("enwik8.first4.15MB", (3_738_959, 207_721, 207_719), None),
        ("tinyshakespeare", (1_003_854, 55_771, 55_769), 65),
        ("text8", (90_000_000, 5_000_000, 5_000_000), 27),
        ("enwik8", (90_000_000, 5_000_000, 5_000_000), 205),
    ],
)
def test_text(name: str, sizes: tuple[int, ...], alphabet: int | None) -> None:
    if files.find(text.FILES[name]) is None:
        pytest.skip(f"not in {files.folder()}: {name}")
    corpus = text.load(name)
    assert tuple(len(part) for part in corpus[1:]) == sizes
    if alphabet is not None:
        assert len(set().union(*(np.unique(part).tolist() for part in corpus[1:]))) == alphabet


@needs(*(file for name, file in text.FILES.items() if name.startswith("ptb")))
def test_treebank_characters() -> None:
    corpus = text.load("ptb")
    lines = [int((part == ord("\n")).sum()) for part in corpus[1:]]
    assert lines == [42068, 3370, 3761]
    characters = [len(part) - count for part, count in zip(corpus[1:], lines, strict=True)]
    assert characters == [4_975_414, 389_672, 438_662]
    assert len(np.unique(corpus.train)) == 50


@needs(text.FILES["eltec-eng"])
def test_novels() -> None:
    corpus = text.load("eltec-eng")
    novels = [int((part == 0).sum()) for part in corpus[1:]]
    assert sum(novels) == int(corpus.name.split(", ")[1].split()[0])
    assert novels[1] == novels[2] + (sum(novels) % 20 >= 10)
    for part in corpus[1:]:
        whole = bytes(part)
        whole.decode("utf-8")
        assert b"<p>" not in whole
        assert b"teiHeader" not in whole


@needs(music.CHORALES)
def test_chorales() -> None:
    found = music.chorales()
    assert [len(part) for part in found] == [229, 76, 77]
    every = np.concatenate([np.concatenate(part) for part in found])
    assert (every[every > 0].min(), every.max()) == (music.LOWEST, music.HIGHEST)
    assert found.train[0][:5].tolist() == [[74, 70, 65, 58]] * 4 + [[75, 70, 58, 55]]


@needs(speech.AN4)
def test_an4() -> None:
    found = speech.an4()
    assert [len(part) for part in found[1:4]] == [857, 91, 130]
    assert len(found.symbols) == 34
    lengths = np.concatenate([np.diff(part.starts) for part in found[1:4]])
    assert (lengths.min(), lengths.max()) == (69, 639)
    assert all(np.isfinite(part.frames).all() for part in found[1:4])
    for part in found[1:4]:  # enough frames for CTC: one for each symbol and one between equal ones
        assert bool((np.diff(part.starts) > 2 * np.diff(part.target_starts)).all())


@needs(speech.FSDD)
def test_spoken_digits() -> None:
    found = speech.digits()
    assert [len(part) for part in found[1:4]] == [2400, 300, 300]
    assert all(np.isfinite(part.frames).all() for part in found[1:4])


@needs(speech.FSDD)
def test_sound() -> None:
    corpus = music.sound(files.find(speech.FSDD) or "", 8000)
    assert sum(len(part) for part in corpus[1:]) == 10_498_424
