"""IMDb: 50,000 film reviews, half of them favourable, with the film of each.

Source   A. Maas et al. 2011, "Learning Word Vectors for Sentiment Analysis", https://ai.stanford.edu/~amaas/data/sentiment
Licence  none stated; asks to be cited
Sizes    25,000 + 25,000 reviews of 32 to 13,704 bytes, at most 30 of a film
Split    as published; one film is in both parts. The Long Range Arena uses the test part for validation
Order    unfavourable first, then by the number in the file's name
"""

import re
from functools import partial
from pathlib import Path

import numpy as np

from subquad.data import files
from subquad.data.generated import Arrays

FOLDER = files.File(
    "aclImdb",
    url="https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
    sha256="c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
    unpack="tar",
)


def load() -> tuple[Arrays, Arrays]:
    """(training, test); the folder of 50,000 files is read once and cached as one file.

    text     uint8, all reviews one after the other, UTF-8
    starts   [N + 1]: review i is text[starts[i] : starts[i + 1]]
    labels   [N] int64: 0 unfavourable, 1 favourable
    films    [N] int64: the number in IMDb's address of the film, 453418 of tt0453418
    """
    folder = files.get(FOLDER)
    return _part(folder / "train"), _part(folder / "test")


def _part(folder: Path) -> Arrays:
    kinds = [folder / kind for kind in ("neg", "pos")]
    for kind in kinds:
        if not kind.is_dir():
            raise files.Broken(f"{kind} is missing: {folder.parent} is not the complete folder aclImdb")
    return files.arrays(files.prepared(f"imdb.{folder.name}.npz", partial(_gather, folder, kinds), *kinds))


def _gather(folder: Path, kinds: list[Path], new: Path) -> None:
    texts, labels, films = [], [], []
    for label, kind in enumerate(kinds):
        addresses = files.read_text(folder / f"urls_{kind.name}.txt", "ascii").split()
        reviews = sorted((_number(path), path) for path in kind.glob("*.txt"))
        if not reviews:
            raise files.Broken(f"{kind} holds no reviews")
        if reviews[-1][0] >= len(addresses):
            place = folder / f"urls_{kind.name}.txt"
            raise files.Broken(f"{place} has only {len(addresses)} lines, and none for {reviews[-1][1].name}")
        for number, path in files.shown(reviews, f"reviews of {folder.name}/{kind.name}"):
            texts.append(files.read(path))
            labels.append(label)
            films.append(int(addresses[number].partition("/title/tt")[2].partition("/")[0]))
    arrays = {
        "text": np.frombuffer(b"".join(texts), np.uint8),
        "starts": np.cumsum([0, *map(len, texts)]),
        "labels": np.array(labels),
        "films": np.array(films),
    }
    with new.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def _number(path: Path) -> int:
    """127 for 127_9.txt, a review with nine stars: its line in the list of films."""
    match = re.fullmatch(r"(\d+)_(\d+)", path.stem)
    if match is None:
        raise files.Broken(f"{path} is not a review: reviews have names like 127_9.txt")
    return int(match[1])
