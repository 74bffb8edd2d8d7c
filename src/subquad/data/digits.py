"""Handwritten digits that ship with the package: 1,797 images of 8 x 8 pixels in 17 shades.

Source   E. Alpaydin and C. Kaynak 1998, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
         doi:10.24432/C50P49, CC BY 4.0; the 1,797 images are its test part, unchanged, as in scikit-learn
Split    1,500 for training and 297 for testing, after one fixed shuffle
"""

from importlib.resources import files

import numpy as np
import torch

from subquad.data.images import Images

SHADES, SIDE = 17, 8


def load() -> tuple[Images, Images]:
    """(training, test), with pixels of 0 to 16"""
    with files("subquad.data").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file)
        images, labels = (torch.from_numpy(stored[name].astype(np.int64)) for name in ("images", "labels"))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    everything = Images(images.flatten(1)[order].to(torch.uint8), labels[order], (SIDE, SIDE))
    return everything.part(slice(1500)), everything.part(slice(1500, None))
