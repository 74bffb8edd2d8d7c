"""CIFAR-10: 60,000 photographs of 32 x 32 pixels in ten classes, the binary version.

Source   A. Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images",
         https://www.cs.toronto.edu/~kriz/cifar.html
Licence  none stated
Sizes    50,000 + 10,000 images, 3,072 bytes each
Split    as published; `images.hold_out(training, count)` takes the validation images of the papers: 2,000 in the
         Sparse Transformer, 5,000 in the Long Range Arena
Order    r, g, b of a pixel, then of the next one in the row, as both papers read them
"""

import numpy as np
import torch
from torch import Tensor

from subquad.data import files
from subquad.data.images import Images

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, RECORD = 32, 1 + 3 * 32 * 32
FOLDER = files.File(
    "cifar-10-batches-bin",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    unpack="tar",
)


def load() -> tuple[Images, Images]:
    """(training, test) in colour: [N, 3072], shape (32, 32, 3)"""
    training = [_batch(f"data_batch_{n}.bin") for n in range(1, 6)]
    pixels, labels = (torch.cat(parts) for parts in zip(*training, strict=True))
    shape = (SIDE, SIDE, 3)
    return Images(pixels, labels, shape), Images(*_batch("test_batch.bin"), shape)


def grey(images: Images) -> Images:
    """[N, 1024], shape (32, 32): as the Long Range Arena makes them, with tf.image.rgb_to_grayscale."""
    weights = torch.tensor((0.2989, 0.5870, 0.1140))
    parts = [
        ((chunk.view(-1, SIDE * SIDE, 3).float() / 255) @ weights * 255.5).to(torch.uint8)  # rounds as tf.image does
        for chunk in images.pixels.split(10000)
    ]
    return Images(torch.cat(parts), images.labels, (SIDE, SIDE))


def _batch(name: str) -> tuple[Tensor, Tensor]:
    """Records of a label and three planes: red, green, blue."""
    path = files.get(FOLDER) / name
    data = np.frombuffer(files.read(path), np.uint8)
    if data.size == 0 or data.size % RECORD:
        raise files.Broken(f"{path} holds {data.size:,} bytes, not a multiple of {RECORD:,}: it is cut short")
    records = torch.from_numpy(data.reshape(-1, RECORD).copy())
    labels = records[:, 0].long()
    if int(labels.max()) >= len(CLASSES):
        raise files.Broken(f"{path} holds the label {int(labels.max())}: labels are 0 to 9, so this is not CIFAR-10")
    pixels = records[:, 1:].unflatten(1, (3, SIDE * SIDE)).transpose(1, 2).flatten(1)  # [N, 1024, 3] -> [N, 3072]
    return pixels.contiguous(), labels
