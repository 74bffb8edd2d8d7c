"""The precision of sums: at least float32, and float64 where the input is."""

import torch
from torch import Tensor


def wide_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    return x.to(wide_type(x))
