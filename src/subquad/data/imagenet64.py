"""ImageNet at 64 x 64 pixels, in either of its two public forms.

Source   van den Oord et al. 2016, arXiv:1601.06759: PNG files in train_64x64 and valid_64x64, without labels; the
         Sparse Transformer's 3.44 bits/dim were measured on these
         Chrabaszcz et al. 2017, arXiv:1707.08819: train_data_batch_1.npz to 10 and val_data.npz, with labels
Licence  ImageNet's: for research, after registration at https://image-net.org/download-images; not downloaded here
Sizes    1,281,149 + 49,999 (PNG) or 1,281,167 + 50,000 (npz) images, 12,288 bytes each
Split    as published; the papers report on the validation images, which `load` returns as the test part
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from subquad.data import files
from subquad.data.images import Images, Part, packed, read_picture

SHAPE = (64, 64, 3)
FOLDER = files.File(
    "imagenet64",
    home="https://image-net.org/download-images, downsampled 64x64: PNG files in train_64x64 and valid_64x64, or "
    "train_data_batch_1.npz to 10 and val_data.npz",
    also=("ImageNet64", "Imagenet64"),
)


def load() -> tuple[Images, Images]:
    """(training, test)"""
    folder = files.get(FOLDER)
    return _part(folder, "train_data_batch_*.npz", "train_64x64"), _part(folder, "val_data.npz", "valid_64x64")


def _part(folder: Path, batches: str, pictures: str) -> Images:
    archives = sorted(folder.rglob(batches), key=lambda path: (len(path.name), path.name))  # 2 before 10
    if archives:
        return packed(f"imagenet64.{pictures}", SHAPE, partial(_read_batches, archives), *archives)
    place = folder / pictures
    if not any(place.glob("*.png")):
        raise files.Missing(f"{folder} holds neither {batches} nor PNG files in {pictures} ({FOLDER.home})")
    return packed(f"imagenet64.{pictures}", SHAPE, partial(_read_pictures, place), place)


def _read_batches(paths: Sequence[Path]) -> Iterator[Part]:
    """Planes of red, green and blue; labels from 1."""
    for path in files.shown(paths, "batches of pictures into one file"):
        stored = files.arrays(path, what="batch of images")
        if not {"data", "labels"} <= stored.keys():
            raise files.Broken(f"{path} is not a whole batch of images: it holds {', '.join(stored) or 'nothing'}")
        planes, labels = stored["data"], stored["labels"]
        if planes.dtype != np.uint8 or planes.shape != (len(labels), 64 * 64 * 3):
            raise files.Broken(f"{path} holds {planes.dtype} {planes.shape}: accepted is uint8 [N, 12288], N labels")
        yield planes.reshape(-1, 3, 64 * 64).transpose(0, 2, 1), labels.astype(np.int64) - 1


def _read_pictures(place: Path) -> Iterator[Part]:
    for path in files.shown(sorted(place.glob("*.png")), f"{place.name} into one file"):
        yield read_picture(path, SHAPE), np.array([-1])
