"""The real data in two small files, to be carried to a machine without a network; the rest is made there."""

import io
import lzma
from pathlib import Path

import numpy as np

from subquad.data import files
from subquad.data.generated import Arrays, generated

SUFFIX = ".npz.xz"
SIDE = 32


def pack(folder: Path, longest: int = 1024) -> list[Path]:
    """Write folder/lra/imdb.npz.xz and image.npz.xz; with $SUBQUAD_DATA=folder the tasks find them.

    `longest`: bytes kept of a review.
    """
    from subquad.tasks.lra.image import grey
    from subquad.tasks.lra.text import reviews

    photographs = grey()
    photographs["tokens"] = _differences(photographs["tokens"])
    written = []
    for name, arrays in (("imdb", reviews(longest)), ("image", photographs)):
        path = folder / "lra" / f"{name}{SUFFIX}"
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **{key: _small(array) for key, array in arrays.items()})
        with files.atomic(path) as new:
            new.write_bytes(lzma.compress(buffer.getvalue(), preset=6))
        written.append(path)
    return written


def packed(name: str) -> Arrays | None:
    """What `pack` wrote, if it is here."""
    path = generated() / f"{name}{SUFFIX}"
    if not path.exists():
        return None
    try:
        arrays = files.arrays(path, files.unpacked(path, "xz"))
        if name == "image":
            arrays["tokens"] = _sums(arrays["tokens"])
        return arrays
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: delete it, or pack it again") from error


def _small(array: np.ndarray) -> np.ndarray:
    """Indices of text need 64 bits nowhere."""
    return array.astype(np.int32) if array.dtype == np.int64 else array


def _differences(tokens: np.ndarray) -> np.ndarray:
    """Each pixel less the mean of its left and its upper neighbour, modulo 256: a third smaller when compressed."""
    pixels = tokens.reshape(-1, SIDE, SIDE)
    return (pixels - _guess(pixels)).reshape(len(tokens), -1)


def _sums(tokens: np.ndarray) -> np.ndarray:
    differences = tokens.reshape(-1, SIDE, SIDE)
    pixels = differences.copy()
    for row in range(SIDE):
        for column in range(SIDE):
            left = pixels[:, row, column - 1].astype(np.uint16) if column else None
            up = pixels[:, row - 1, column].astype(np.uint16) if row else None
            if left is None and up is None:
                continue
            mean = left if up is None else up if left is None else (left + up) // 2
            assert mean is not None
            pixels[:, row, column] += mean.astype(np.uint8)
    return pixels.reshape(len(tokens), -1)


def _guess(pixels: np.ndarray) -> np.ndarray:
    """(left + up) / 2, or the one there is."""
    left = np.pad(pixels[:, :, :-1], ((0, 0), (0, 0), (1, 0)))
    up = np.pad(pixels[:, :-1], ((0, 0), (1, 0), (0, 0)))
    mean = (left.astype(np.uint16) + up) // 2
    mean[:, 0] = left[:, 0]
    mean[:, :, 0] = up[:, :, 0]
    return mean.astype(np.uint8)
