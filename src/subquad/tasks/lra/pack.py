"""Pack the real data into two small files for a machine without a network; all other data is generated there."""

import io
import lzma
from pathlib import Path

import numpy as np

from subquad.data import files
from subquad.data.generated import Arrays, generated

SUFFIX = ".npz.xz"
FORMAT = 2  # of these files; format 1 stored the differences between neighbouring pixels


def pack(folder: Path, longest: int = 4096) -> list[Path]:
    """Write folder/lra/imdb.npz.xz and image.npz.xz; with $SUBQUAD_DATA=folder the tasks find them.

    `longest`: bytes kept of a review.
    """
    from subquad.tasks.lra.image import grey
    from subquad.tasks.lra.text import reviews

    written = []
    for name, arrays in (("imdb", reviews(longest)), ("image", grey())):
        path = folder / "lra" / f"{name}{SUFFIX}"
        path.parent.mkdir(parents=True, exist_ok=True)
        # 32 bits are enough for the indices
        small = {key: array.astype(np.int32) if array.dtype == np.int64 else array for key, array in arrays.items()}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, format=FORMAT, **small)
        with files.atomic(path) as new:
            new.write_bytes(lzma.compress(buffer.getvalue(), preset=6))
        written.append(path)
    return written


def packed(name: str) -> Arrays | None:
    """What `pack` wrote; None if it is not on this machine."""
    path = generated() / f"{name}{SUFFIX}"
    if not path.exists():
        return None
    try:
        arrays = files.arrays(path, files.unpacked(path, "xz"))
        if int(arrays.pop("format")) != FORMAT:
            raise ValueError("it has another format")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged or of an older version: delete it, or pack it again") from error
    return arrays
