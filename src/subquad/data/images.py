"""Images as sequences of bytes; a data set is one tensor, so a batch is one indexing operation."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad.data import files

Part = tuple[np.ndarray, np.ndarray]


class Images(NamedTuple):
    pixels: Tensor  # [N, T] uint8, row by row, the channels of a pixel next to each other; may be memory-mapped
    labels: Tensor  # [N] int64; -1 where a set has none
    shape: tuple[int, ...]  # of one image: (28, 28), (32, 32, 3)

    def part(self, rows: slice) -> "Images":
        return Images(self.pixels[rows], self.labels[rows], self.shape)


def hold_out(training: Images, count: int) -> tuple[Images, Images]:
    """(training, validation): the last `count` images become the validation part."""
    if not 0 < count < len(training.labels):
        raise ValueError(f"count={count} cannot work: accepted is 1 to {len(training.labels) - 1}")
    return training.part(slice(None, -count)), training.part(slice(-count, None))


@dataclass(frozen=True)
class Pixels:
    """A source of images: {"pixels": [B, T] uint8, "labels": [B] int64}."""

    images: Images

    def __len__(self) -> int:
        return len(self.images.labels)

    def batch(self, indices: np.ndarray, epoch: int = 0) -> dict[str, Tensor]:
        rows = torch.from_numpy(np.array(indices, dtype=np.int64))
        pixels, labels, _ = self.images
        return {"pixels": pixels.index_select(0, rows), "labels": labels.index_select(0, rows)}  # 6 times as fast as []


def packed(name: str, shape: tuple[int, ...], parts: Callable[[], Iterable[Part]], *sources: Path) -> Images:
    """Images as one memory-mapped file, which is made again when a source has changed; `parts` yields (pixels [n, T],
    labels [n])."""

    def make(new: Path) -> None:
        new.mkdir()
        labels = []
        with (new / "pixels.u8").open("wb") as file:
            for pixels, part in parts():
                file.write(np.ascontiguousarray(pixels, np.uint8).tobytes())
                labels.append(np.asarray(part, np.int64))
        if not labels:
            raise files.Broken(f"{sources[0]} holds no pictures: accepted are one or more")
        np.save(new / "labels.npy", np.concatenate(labels))

    place = files.prepared(f"{name}.images", make, *sources)
    labels = np.load(place / "labels.npy")
    pixels = np.memmap(place / "pixels.u8", np.uint8, mode="c").reshape(len(labels), -1)  # torch needs write access
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels), shape)


def read_picture(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """[H, W, 3] uint8 of a PNG or JPEG file; grey ones get three equal channels."""
    from matplotlib.image import imread

    try:
        pixels = np.asarray(imread(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise files.Broken(f"{path} is not a whole picture: {error}") from error
    if pixels.dtype != np.uint8:
        pixels = np.round(pixels * 255).astype(np.uint8)  # imread gives PNG files as 0 to 1
    pixels = np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels[..., :3]
    if pixels.shape != shape:
        raise files.Broken(f"{path} is a picture of {pixels.shape}: accepted are {shape}")
    return pixels
