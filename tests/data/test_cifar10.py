from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.data import cifar10
from subquad.data.files import Broken
from subquad.data.images import Images

BATCHES = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]


def put(folder: Path) -> dict[str, np.ndarray]:
    """The six files with four records each: a label, then planes of red, green and blue."""
    draw, folder = np.random.default_rng(0), folder / "cifar-10-batches-bin"
    folder.mkdir()
    made = {}
    for name in BATCHES:
        made[name] = draw.integers(0, 256, (4, 3073), dtype=np.uint8)
        made[name][:, 0] %= 10
        (folder / name).write_bytes(made[name].tobytes())
    return made


def test_batches_are_read_and_channels_interleaved(data: Path) -> None:
    made = put(data)
    training, test = cifar10.load()
    assert training.pixels.shape == (20, 3072)
    assert test.pixels.shape == (4, 3072)
    assert training.shape == (32, 32, 3)
    record = made["data_batch_3.bin"][1]  # the tenth
    pixels = training.pixels[9].view(32, 32, 3)
    assert int(training.labels[9]) == record[0]
    for row, column, channel in ((0, 0, 0), (0, 1, 2), (5, 7, 1), (31, 31, 2)):
        assert int(pixels[row, column, channel]) == record[1 + channel * 1024 + row * 32 + column]
    np.testing.assert_array_equal(test.labels, made["test_batch.bin"][:, 0])


def test_grey_is_that_of_the_long_range_arena() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    same = levels.repeat_interleave(3).repeat(12).view(3, 3072)
    grey = cifar10.grey(Images(same, torch.zeros(3, dtype=torch.int64), (32, 32, 3)))
    assert grey.shape == (32, 32)
    assert grey.pixels.dtype == torch.uint8
    # the weights sum to 0.9999, and the result is cut after a multiplication by 255.5
    expected = (levels.double() / 255 * 0.9999 * 255.5).floor()
    assert (grey.pixels.flatten().double() - expected.repeat(12)).abs().max() <= 1
    assert int(grey.pixels[0, 255]) == 255
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).repeat(1024)[None]
    assert int(cifar10.grey(Images(red, torch.zeros(1), (32, 32, 3))).pixels[0, 0]) == int(0.2989 * 255.5)


def test_a_broken_batch_is_named(data: Path) -> None:
    put(data)
    path = data / "cifar-10-batches-bin/data_batch_2.bin"
    body = path.read_bytes()
    path.write_bytes(body[:-5])
    with pytest.raises(Broken, match=r"data_batch_2\.bin holds 12,287 bytes.*cut short"):
        cifar10.load()
    path.write_bytes(bytes([77]) + body[1:])
    with pytest.raises(Broken, match=r"data_batch_2\.bin holds the label 77"):
        cifar10.load()
    path.unlink()
    with pytest.raises(Broken, match=r"data_batch_2\.bin cannot be read: No such file"):
        cifar10.load()
