"""Which device a name means, refused in one sentence where this machine does not have it."""

import torch

from subquad.checks import refuse


def available(name: str) -> str:
    """The name of a device that is there; "auto" is a GPU where there is one."""
    found = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if found else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        refuse("device", name, '"cpu" or "cuda"')
    elif device.type == "cuda" and not found:
        refuse("device", name, '"cpu" here: torch finds no GPU')
    elif device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        refuse("device", name, f'"cuda:0" to "cuda:{torch.cuda.device_count() - 1}"')
    return name
