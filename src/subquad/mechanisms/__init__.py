"""The mechanisms, one file each; `MECHANISMS` is the whole list and `build` the way in."""

import dataclasses
from typing import Any

from subquad.mechanisms.additive import Additive
from subquad.mechanisms.base import Mixer, nearest
from subquad.mechanisms.linear import Linear
from subquad.mechanisms.softmax import Softmax

MECHANISMS: dict[str, type[Mixer]] = {
    "softmax": Softmax,
    "additive": Additive,
    "linear": Linear,
}


def mechanism(name: str) -> type[Mixer]:
    """The class of that name, or a ValueError with the nearest name."""
    if name not in MECHANISMS:
        accepted = ", ".join(MECHANISMS)
        raise ValueError(f"unknown mechanism {name!r}{nearest(name, MECHANISMS)} Accepted: {accepted}")
    return MECHANISMS[name]


def build(name: str, **options: Any) -> Mixer:
    """A mechanism by name: build("linear", dim=256, heads=8, causal=True).

    TypeError for an option the mechanism does not have, ValueError for a value that cannot work.
    """
    cls = mechanism(name)
    known = [field.name for field in dataclasses.fields(cls.options_type)]
    for option in options:
        if option not in known:
            raise TypeError(f"{name} has no option {option!r}{nearest(option, known)} Accepted: {', '.join(known)}")
    return cls(cls.options_type(**options))
