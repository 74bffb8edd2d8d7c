"""MNIST: 70,000 handwritten digits of 28 x 28 grey pixels.

Source   Y. LeCun, C. Cortes and C. Burges, http://yann.lecun.com/exdb/mnist; downloads come from a mirror of the four
         original files (SHA-256 as listed by many public projects; the content was checked against another copy)
Licence  none stated
Sizes    60,000 + 10,000 images, 784 bytes each, 0 (background) to 255
Split    as published, without validation images; `images.hold_out(training, 5000)` makes some
"""

from pathlib import Path

import numpy as np
import torch

from subquad.data import files
from subquad.data.images import Images

SHAPE = (28, 28)
MIRROR = "https://storage.googleapis.com/cvdf-datasets/mnist/"
SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
FILES = {
    name: files.File(
        f"mnist/{name}",
        also=(f"mnist/{name[:-3]}", f"MNIST/raw/{name}", f"MNIST/raw/{name[:-3]}"),
        url=f"{MIRROR}{name}",
        sha256=sha256,
    )
    for name, sha256 in SHA256.items()
}


def load() -> tuple[Images, Images]:
    """(training, test)"""
    return _part("train"), _part("t10k")


def _part(name: str) -> Images:
    path = files.get(FILES[f"{name}-images-idx3-ubyte.gz"])
    pixels = read_idx(path)
    if pixels.shape[1:] != SHAPE:
        raise files.Broken(f"{path} holds images of {pixels.shape[1:]}: accepted are {SHAPE}")
    path = files.get(FILES[f"{name}-labels-idx1-ubyte.gz"])
    labels = read_idx(path)
    if labels.shape != pixels.shape[:1]:
        raise files.Broken(f"{path} holds {len(labels)} labels for {len(pixels)} images")
    return Images(torch.from_numpy(pixels).flatten(1), torch.from_numpy(labels).long(), SHAPE)


def read_idx(path: Path) -> np.ndarray:
    """An idx file of bytes, plain or gzip: 0, 0, 8, the number of dimensions, their big-endian sizes, the bytes."""
    data = files.read(path)
    if data[:2] == b"\x1f\x8b":
        data = files.unpacked(path, "gzip")
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise files.Broken(f"{path} is not an idx file of bytes: it begins with {data[:4].hex(' ')}, not 00 00 08")
    shape = tuple(int(n) for n in np.frombuffer(data, ">i4", data[3], 4))
    body = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if body.size != np.prod(shape, dtype=np.int64):
        raise files.Broken(f"{path} has the shape {shape} in its header and holds {body.size:,} bytes: it is damaged")
    return body.reshape(shape).copy()
