"""The type of sums: at least float32, and float64 for float64 inputs. Autocast, also for meta, which lacks it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from subquad.ops.impl import exporting


def wide_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    return x.to(wide_type(x))


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def uncast(x: Tensor) -> AbstractContextManager[Any]:
    """A context that turns off autocast on x's device."""
    if not (exporting() or autocasts(x.device)):  # an exported program may meet autocast later
        return nullcontext()
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)
