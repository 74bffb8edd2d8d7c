"""Handwritten digits that ship with the package: 1,797 images of 8 x 8 pixels in 17 shades.

Source   E. Alpaydin and C. Kaynak 1998, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
         doi:10.24432/C50P49, CC BY 4.0; the 1,797 images are its test part, as scikit-learn carries them, unchanged
Split    1,500 for training and 297 for testing, by one fixed shuffle
"""

from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SHADES, SIDE = 17, 8


class Digits(NamedTuple):
    images: Tensor  # [N, 64] int64, row by row, 0 .. 16
    labels: Tensor  # [N] int64


def load() -> tuple[Digits, Digits]:
    """(training, test)"""
    with files("subquad.data").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file)
        images, labels = (torch.from_numpy(stored[name].astype(np.int64)) for name in ("images", "labels"))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    everything = Digits(images.flatten(1)[order], labels[order])
    return Digits(*(t[:1500] for t in everything)), Digits(*(t[1500:] for t in everything))
