import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.data import mnist
from subquad.data.files import Broken
from subquad.data.images import Pixels, hold_out


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def put(folder: Path, packed: bool = True) -> dict[str, np.ndarray]:
    """The four files, small: 6 and 3 images of 28 x 28."""
    draw, made = np.random.default_rng(0), {}
    folder.mkdir(exist_ok=True, parents=True)
    for part, count in (("train", 6), ("t10k", 3)):
        made[f"{part}-images-idx3-ubyte"] = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        made[f"{part}-labels-idx1-ubyte"] = draw.integers(0, 10, count, dtype=np.uint8)
    for name, array in made.items():
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    return made


@pytest.mark.parametrize(("place", "packed"), [("mnist", True), ("mnist", False), ("MNIST/raw", False)])
def test_the_four_files_are_read(data: Path, place: str, packed: bool) -> None:
    made = put(data / place, packed)
    training, test = mnist.load()
    assert training.pixels.dtype == torch.uint8
    assert training.labels.dtype == torch.int64
    assert training.shape == test.shape == (28, 28)
    np.testing.assert_array_equal(training.pixels, made["train-images-idx3-ubyte"].reshape(6, 784))
    np.testing.assert_array_equal(test.pixels, made["t10k-images-idx3-ubyte"].reshape(3, 784))
    np.testing.assert_array_equal(training.labels, made["train-labels-idx1-ubyte"])


def test_batches_are_rows_in_the_order_asked_for(data: Path) -> None:
    put(data / "mnist")
    training, _ = mnist.load()
    source = Pixels(training)
    batch = source.batch(np.array([4, 0, 4]), epoch=2)
    assert len(source) == 6
    assert torch.equal(batch["pixels"], training.pixels[[4, 0, 4]])
    assert torch.equal(batch["labels"], training.labels[[4, 0, 4]])


def test_the_last_images_are_held_out(data: Path) -> None:
    put(data / "mnist")
    training, _ = mnist.load()
    rest, held = hold_out(training, 2)
    assert torch.equal(torch.cat((rest.pixels, held.pixels)), training.pixels)
    assert torch.equal(held.labels, training.labels[4:])
    for count in (0, 6, -1):
        with pytest.raises(ValueError, match=f"count={count} cannot work: accepted is 1 to 5"):
            hold_out(training, count)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: gzip.compress(b)[:-20], "not a whole gzip file"),
        (lambda b: b[:-1], "holds 4,703 bytes: it is damaged"),
        (lambda b: b + b"x", "holds 4,705 bytes"),
        (lambda b: b"\x89PNG" + b, "not an idx file of bytes: it begins with 89 50 4e 47"),
        (lambda b: b[:0], "not an idx file"),
        (lambda b: b[:9], "not an idx file"),
    ],
)
def test_a_broken_file_is_named(data: Path, change: Callable[[bytes], bytes], said: str) -> None:
    made = put(data / "mnist")
    path = data / "mnist/train-images-idx3-ubyte.gz"
    path.write_bytes(change(idx(made["train-images-idx3-ubyte"])))
    with pytest.raises(Broken, match=said) as error:
        mnist.load()
    assert str(path) in str(error.value)


@pytest.mark.parametrize("shape", [(6, 14, 14), (6, 784)])
def test_images_of_another_size_are_refused(data: Path, shape: tuple[int, ...]) -> None:
    put(data / "mnist")
    (data / "mnist/train-images-idx3-ubyte.gz").write_bytes(idx(np.zeros(shape, np.uint8)))
    with pytest.raises(Broken, match=r"train-images.* holds images of \((14, 14|784,)\): accepted are \(28, 28\)"):
        mnist.load()


def test_labels_of_other_images_are_refused(data: Path) -> None:
    put(data / "mnist")
    (data / "mnist/train-labels-idx1-ubyte.gz").write_bytes(idx(np.zeros(5, np.uint8)))
    with pytest.raises(Broken, match=r"train-labels.* holds 5 labels for 6 images"):
        mnist.load()
