"""Pathfinder (32 x 32, 1,024 tokens) and Path-X (128 x 128, 16,384): are the two discs on the same dashed path?

Data      made by contours.py at the hard level, seeded; or the arena's own pictures, where data.folder names a folder
          of its release such as lra_release/pathfinder32/curv_contour_length_14 (imgs/*/*.png, metadata/*.npy)
Sizes     160,000 for training, 20,000 each for validation and test, half of the labels 1; a folder is cut 80:10:10
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from subquad.checks import at_least
from subquad.data import files
from subquad.data.contours import HARD, VERSION, draw
from subquad.data.generated import Arrays, cores, generated, in_order, kept
from subquad.data.images import read_picture
from subquad.tasks.lra.task import Picture, cut
from subquad.training.task import Source, Split

CHUNK = 500  # pictures of 32 x 32 made at once, fewer of larger ones


def make(size: int, count: int, seed: int = 0, workers: int | None = None) -> Arrays:
    """So many pictures in parallel, the same however many processes: tokens [count, size²], labels [count]."""
    chunk = chunk_of(size)
    workers = min(cores(), 1 + count // (2 * chunk)) if workers is None else workers
    tokens, labels = np.zeros((count, size * size), np.uint8), np.zeros(count, np.uint8)
    numbers = range(-(-count // chunk))
    parts = in_order(partial(_chunk, size, count, seed, chunk), numbers, workers)
    label = f"{count:,} pictures of {size} x {size}"
    for number, (pictures, found) in enumerate(files.shown(parts, label, len(numbers))):
        rows = slice(number * chunk, number * chunk + len(found))
        tokens[rows], labels[rows] = pictures.reshape(len(found), -1), found
    return {"tokens": tokens, "labels": labels}


def chunk_of(size: int) -> int:
    """Of which pictures are made at once; which they are depends on it. Even, for as many of either label."""
    return 2 * max(1, CHUNK * 32 * 16 // size**2)


def _chunk(size: int, count: int, seed: int, most: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    return draw(HARD[size], min(most, count - number * most), seed, number)


def read_folder(folder: Path, size: int) -> Arrays:
    """The pictures of the arena's release in a fixed random order, but for one that is known to be empty."""
    lists = sorted(folder.glob("metadata/[0-9]*.npy"), key=lambda path: int(path.stem))
    if not lists:
        raise files.Missing(f"{folder}/metadata/*.npy is missing: data.folder is one such as curv_contour_length_14")
    tokens, labels = [], []
    for path in lists:
        for number, line in enumerate(files.read_text(path).splitlines(), start=1):  # text, for all its name
            place, name, _, label, *_ = [*line.split(), *4 * [""]]
            if label not in ("0", "1"):
                raise files.Broken(f"{path}:{number} is {line[:80]!r}: accepted are a folder, a file, a number, 0 or 1")
            picture = files.inside(folder, f"{place}/{name}", path)
            try:
                if picture.stat().st_size:
                    tokens.append(read_picture(picture, (size, size, 3))[..., 0].ravel())  # grey: all channels agree
                    labels.append(int(label))
            except (OSError, files.Broken) as error:
                raise files.Broken(f"{picture}, which {path}:{number} names, cannot be read: {error}") from error
    if len(labels) < 10:
        raise files.Broken(f"{folder} names {len(labels)} pictures: accepted are 10 or more, a tenth is each held out")
    order = np.random.Generator(np.random.PCG64(0)).random(len(labels)).argsort()
    return {"tokens": np.stack(tokens)[order], "labels": np.array(labels, np.uint8)[order]}


def sheet(task: "Pathfinder", path: Path, count: int = 24) -> None:
    """The first pictures of training with their labels in one PNG, for people."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    source = task.source("train")
    batch = source.batch(np.arange(min(count, len(source))), 0)
    pictures, labels = batch["tokens"].numpy().reshape(-1, task.size, task.size), batch["labels"].tolist()
    figure, axes = plt.subplots(-(-count // 6), 6, figsize=(12, 2.2 * -(-count // 6)), layout="constrained")
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, picture, label in zip(axes.flat, pictures, labels, strict=False):
        axis.imshow(picture, cmap="gray", vmin=0, vmax=255)
        axis.set_title("connected" if label else "not connected", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


@dataclass(frozen=True)
class Pathfinder(Picture):
    train: int = 160_000  # examples
    held_out: int = 20_000  # of validation and of test each
    seed: int = 0
    folder: str | None = None  # of the arena's PNG files; None: made here

    name: ClassVar[str] = "pathfinder"
    classes: ClassVar[int] = 2
    size: ClassVar[int] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, train=2, held_out=1, seed=0)

    def positions(self) -> int:
        return self.size * self.size

    def source(self, split: Split) -> Source:
        if self.folder is None:
            sizes = (self.train, self.held_out, self.held_out)
            name = f"{self.name}_{self.train}_{self.held_out}_{self.seed}_v{VERSION}"
            name += "" if self.size == 32 else f"_{chunk_of(self.size)}"
            arrays = kept(generated() / name, lambda: make(self.size, sum(sizes), self.seed))
        else:
            folder = Path(self.folder).expanduser()
            if not folder.is_dir():
                raise files.Missing(f"{folder} is missing: data.folder is one such as curv_contour_length_14")
            name = f"{self.name}_{folder.name}_{files.mark(folder)}"
            arrays = kept(generated() / name, lambda: read_folder(folder, self.size))
            tenth = len(arrays["labels"]) // 10
            sizes = (len(arrays["labels"]) - 2 * tenth, tenth, tenth)
        return cut(arrays, split, *sizes)


@dataclass(frozen=True)
class PathX(Pathfinder):
    name: ClassVar[str] = "pathx"
    size: ClassVar[int] = 128
