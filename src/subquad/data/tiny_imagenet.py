"""Tiny ImageNet: 200 classes of ImageNet at 64 x 64 pixels.

Source   Stanford's course CS231n, http://cs231n.stanford.edu/tiny-imagenet-200.zip, JPEG files
Licence  ImageNet's, for research
Sizes    100,000 + 10,000 images, 12,288 bytes each; 10,000 more without labels are left out
Split    as published, with the validation images as the test part, because the test images have no labels
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from subquad.data import files
from subquad.data.images import Images, Part, packed, read_picture

SHAPE = (64, 64, 3)
FOLDER = files.File(
    "tiny-imagenet-200",
    url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    sha256="6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
    unpack="zip",
)


def load() -> tuple[Images, Images]:
    """(training, test)"""
    folder = files.get(FOLDER)
    train, val, labels = folder / "train", folder / "val", folder / "wnids.txt"
    for part in (train, val):
        if not part.is_dir():
            raise files.Missing(f"{part} is missing: put the folder {part.name} of {FOLDER.home} into {folder}")
    classes = files.read_text(labels).split()
    return (
        packed("tiny_imagenet.train", SHAPE, partial(_read_training, train, classes), train, labels),
        packed("tiny_imagenet.val", SHAPE, partial(_read_validation, val, classes), val, labels),
    )


def _read_training(folder: Path, classes: Sequence[str]) -> Iterator[Part]:
    """One folder for each class."""
    for label, name in enumerate(files.shown(classes, "training pictures into one file")):
        place = files.inside(folder, name, folder.parent / "wnids.txt") / "images"
        paths = sorted(place.glob("*.JPEG"), key=lambda path: (len(path.name), path.name))
        if not paths:
            raise files.Broken(f"{folder / name / 'images'} holds no JPEG files: the data set is incomplete")
        for path in paths:
            yield read_picture(path, SHAPE), np.array([label])


def _read_validation(folder: Path, classes: Sequence[str]) -> Iterator[Part]:
    """A text file with a line of file name, class and box for each picture."""
    path = folder / "val_annotations.txt"
    lines = [(n, line) for n, line in enumerate(files.read_text(path).splitlines(), start=1) if line.strip()]
    for number, line in files.shown(lines, "test pictures into one file"):
        name, label = (*line.split(), "")[:2]
        if not label:
            raise files.Broken(f"{path}:{number} is {line!r}: accepted are lines of a file name, its class and a box")
        if label not in classes:
            raise files.Broken(f"{path}:{number} gives {name} the class {label}, which is not in wnids.txt")
        picture = files.inside(folder / "images", name, path)
        yield read_picture(picture, SHAPE), np.array([classes.index(label)])
