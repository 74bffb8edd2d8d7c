import os
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imsave

from subquad.data import imagenet64
from subquad.data.files import Broken, Missing
from subquad.data.images import Pixels


def pictures(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 64, 64, 3), dtype=np.uint8)


def put_npz(folder: Path) -> np.ndarray:
    """Batches 1, 2 and 10 of two images each, and one for validation: planes, labels from 1."""
    made = pictures(7)
    folder.mkdir(parents=True)
    for n, name in enumerate(("train_data_batch_1", "train_data_batch_2", "train_data_batch_10")):
        planes = made[2 * n : 2 * n + 2].transpose(0, 3, 1, 2).reshape(2, -1)
        np.savez(folder / f"{name}.npz", data=planes, labels=np.array([2 * n + 1, 2 * n + 2]), mean=np.zeros(3))
    np.savez(folder / "val_data.npz", data=made[6:].transpose(0, 3, 1, 2).reshape(1, -1), labels=np.array([1000]))
    return made


def test_batches_are_read_once_and_mapped(data: Path) -> None:
    made = put_npz(data / "imagenet64/train")
    for _ in range(2):
        training, test = imagenet64.load()
        assert training.shape == (64, 64, 3)
        np.testing.assert_array_equal(training.pixels.view(-1, 64, 64, 3), made[:6])
        assert training.labels.tolist() == [0, 1, 2, 3, 4, 5]
        np.testing.assert_array_equal(test.pixels.view(-1, 64, 64, 3), made[6:])
        assert test.labels.tolist() == [999]
    batch = Pixels(training).batch(np.array([5, 1]))
    assert batch["pixels"].dtype == torch.uint8
    np.testing.assert_array_equal(batch["pixels"].view(2, 64, 64, 3), made[[5, 1]])


def test_folders_of_png_files_have_no_labels(data: Path) -> None:
    made = pictures(5)
    for n, place in enumerate(("train_64x64", "train_64x64", "train_64x64", "valid_64x64", "valid_64x64")):
        (data / "imagenet64" / place).mkdir(parents=True, exist_ok=True)
        imsave(data / f"imagenet64/{place}/{n:07}.png", made[n])
    training, test = imagenet64.load()
    np.testing.assert_array_equal(training.pixels.view(-1, 64, 64, 3), made[:3])
    np.testing.assert_array_equal(test.pixels.view(-1, 64, 64, 3), made[3:])
    assert training.labels.tolist() == [-1, -1, -1]
    path = data / "imagenet64/train_64x64/0000001.png"
    imsave(path, made[4])  # overwritten in place, so that the folder's own time stays
    os.utime(path, ns=(1, 1))
    np.testing.assert_array_equal(imagenet64.load()[0].pixels.view(-1, 64, 64, 3), made[[0, 4, 2]])


def test_what_is_wrong_is_named(data: Path) -> None:
    with pytest.raises(Missing, match=r"imagenet64 is not in .*image-net\.org"):
        imagenet64.load()
    (data / "imagenet64").mkdir()
    with pytest.raises(Missing, match=r"neither train_data_batch_\*\.npz nor PNG files in train_64x64"):
        imagenet64.load()
    (data / "imagenet64/train_64x64").mkdir()
    path = data / "imagenet64/train_64x64/1.png"
    imsave(path, pictures(1)[0, :32])
    with pytest.raises(Broken, match=r"1\.png is a picture of \(32, 64, 3\): accepted are \(64, 64, 3\)"):
        imagenet64.load()
    path.write_bytes(b"not a picture")
    with pytest.raises(Broken, match=r"1\.png is not a whole picture"):
        imagenet64.load()
    batch = data / "imagenet64/train_data_batch_1.npz"
    np.savez(batch, data=np.zeros((2, 100), np.uint8), labels=np.ones(2))
    with pytest.raises(Broken, match=r"train_data_batch_1\.npz holds uint8 \(2, 100\)"):
        imagenet64.load()
    batch.write_bytes(batch.read_bytes()[:-20])
    with pytest.raises(Broken, match=r"train_data_batch_1\.npz is not a whole batch"):
        imagenet64.load()
