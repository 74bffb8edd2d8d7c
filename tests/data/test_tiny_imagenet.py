import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imsave
from PIL import Image

from subquad.data import tiny_imagenet
from subquad.data.files import Broken, Missing


def put_tiny(root: Path) -> np.ndarray:
    """Two classes of two images each, and two for validation, the last of which is grey."""
    flat = np.broadcast_to(np.arange(10, 250, 40, dtype=np.uint8)[:, None, None, None], (6, 64, 64, 3))  # JPEG keeps it
    (root / "val/images").mkdir(parents=True)
    (root / "wnids.txt").write_text("n02\nn01\n")
    for n, name in enumerate(("n02/images/n02_2", "n02/images/n02_10", "n01/images/n01_0", "n01/images/n01_1")):
        path = root / "train" / f"{name}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        imsave(path, np.array(flat[n]), format="jpeg")
    imsave(root / "val/images/val_0.JPEG", np.array(flat[4]), format="jpeg")
    Image.fromarray(np.array(flat[5, ..., 0])).save(root / "val/images/val_1.JPEG")
    (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t32\t44\t62\nval_1.JPEG\tn02\t5\t5\t9\t9\n")
    return flat


def test_tiny_imagenet_is_read(data: Path) -> None:
    flat = put_tiny(data / "tiny-imagenet-200")
    training, test = tiny_imagenet.load()
    assert training.labels.tolist() == [0, 0, 1, 1]
    assert test.labels.tolist() == [1, 0]
    for found, expected in ((training, flat[:4]), (test, flat[4:])):
        assert np.abs(found.pixels.view(-1, 64, 64, 3).numpy().astype(int) - expected).max() <= 2


def test_pictures_that_are_added_or_replaced_are_seen(data: Path) -> None:
    root = data / "tiny-imagenet-200"
    flat = put_tiny(root)
    assert len(tiny_imagenet.load()[0].labels) == 4
    imsave(root / "train/n01/images/n01_2.JPEG", np.array(flat[5]), format="jpeg")
    assert tiny_imagenet.load()[0].labels.tolist() == [0, 0, 1, 1, 1]
    imsave(root / "val/images/val_0.JPEG", np.array(flat[0]), format="jpeg")
    os.utime(root / "val/images/val_0.JPEG", ns=(1, 1))
    assert abs(int(tiny_imagenet.load()[1].pixels[0, 0]) - 10) <= 2
    (root / "wnids.txt").write_text("n01\nn02\n")
    assert [part.labels.tolist() for part in tiny_imagenet.load()] == [[0, 0, 0, 1, 1], [0, 1]]


def test_what_is_wrong_with_tiny_imagenet_is_named(data: Path) -> None:
    root = data / "tiny-imagenet-200"
    put_tiny(root)
    (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn77\t0\t32\t44\t62\n")
    with pytest.raises(Broken, match=r"val_annotations\.txt:1 gives val_0\.JPEG the class n77"):
        tiny_imagenet.load()
    (root / "val/val_annotations.txt").write_text("\n\nval_0.JPEG\n")
    with pytest.raises(
        Broken, match=r"val_annotations\.txt:3 is 'val_0\.JPEG': accepted are lines of a file name, its class"
    ):
        tiny_imagenet.load()
    (root / "val/val_annotations.txt").write_text("\n")
    with pytest.raises(Broken, match="val holds no pictures"):
        tiny_imagenet.load()
    (root / "wnids.txt").write_text("n02\nn01\nn03\n")
    (root / "train/again").mkdir()
    with pytest.raises(Broken, match="n03/images holds no JPEG files"):
        tiny_imagenet.load()


def test_blank_lines_are_skipped(data: Path) -> None:
    put_tiny(data / "tiny-imagenet-200")
    path = data / "tiny-imagenet-200/val/val_annotations.txt"
    path.write_text(path.read_text().replace("\n", "\n \n"))
    assert tiny_imagenet.load()[1].labels.tolist() == [1, 0]


@pytest.mark.parametrize("part", ["train", "val"])
def test_the_error_for_a_missing_half_says_what_to_put_where(data: Path, part: str) -> None:
    root = data / "tiny-imagenet-200"
    put_tiny(root)
    shutil.rmtree(root / part)
    with pytest.raises(Missing, match=rf"{part} is missing: put the folder {part} of http.*\.zip into {root}$"):
        tiny_imagenet.load()
