"""The description of a mechanism: the fixed fields of its module's docstring, for the command line and the docs."""

import dataclasses
import inspect
import re
import sys
import textwrap
from typing import NamedTuple

from subquad.mechanisms.base import Mixer

FIELDS = ("Paper", "Definition", "Cost", "Departures", "Verified")


class Card(NamedTuple):
    title: str
    paper: str
    definition: str
    cost: str
    departures: str
    verified: str

    @property
    def source(self) -> str:
        """The arXiv or OpenReview identifier, else the first author and year."""
        known = re.search(r"arXiv:(\d{4}\.\d{4,5})|OpenReview:(\w+)", self.paper)
        if known:
            return str(known[1] or known[2])
        return self.paper.split(",")[0]

    @property
    def training_cost(self) -> str:
        """The O(...) of training time."""
        known = re.search(r"train (O\(.*?\))(?= time|[,;]|$)", self.cost)
        return known[1] if known else self.cost


def card(cls: type[Mixer]) -> Card:
    """Parse the docstring of the module that defines the mechanism."""
    doc = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
    head = re.compile(rf"^({'|'.join(FIELDS)})\s+", re.MULTILINE)
    pieces = head.split(doc)
    texts = {
        name: textwrap.dedent(" " * 12 + text).strip() for name, text in zip(pieces[1::2], pieces[2::2], strict=True)
    }
    missing = [name for name in FIELDS if name not in texts]
    if missing:
        raise ValueError(f"the docstring of {cls.__module__} lacks {', '.join(missing)}: see CONTRIBUTING")
    return Card(pieces[0].strip(), *(texts[name] for name in FIELDS))


def option_meanings(cls: type[Mixer]) -> dict[str, str]:
    """What each option means: the comment after its field, also for inherited fields."""
    parts = (part for part in reversed(cls.options_type.__mro__) if dataclasses.is_dataclass(part))
    field = re.compile(r"^    (\w+): [^#\n]*?  # (.+)$", re.MULTILINE)
    comments = {name: comment for part in parts for name, comment in field.findall(inspect.getsource(part))}
    return {
        option.name: "has no effect here, keep the default" if option.name in cls.unused else comments[option.name]
        for option in dataclasses.fields(cls.options_type)
    }
