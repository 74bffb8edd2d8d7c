"""Autocast, asked and switched off on any device: torch knows none for meta."""

import torch
from torch import Tensor


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def uncast(x: Tensor) -> torch.autocast:
    """A context in which nothing on x's device is cast."""
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)
