"""Checks of arguments: every error names the argument, the value and what is accepted."""

import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal


def refuse(name: str, value: object, accepted: str) -> None:
    """Raise the one form that every error about a value has."""
    raise ValueError(f"{name}={value!r} cannot work: accepted is {accepted}")


def at_least(options: object, **bounds: int) -> None:
    """Refuse options that are not integers of at least their bound."""
    for name, bound in bounds.items():
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < bound:
            refuse(name, value, f"an integer of at least {bound}")


def counts(values: Iterable[object]) -> bool:
    """Whether all are integers of at least 1."""
    return all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in values)


def one_of(options: object, **choices: Iterable[str]) -> None:
    """Refuse options that are not among their choices."""
    for name, accepted in choices.items():
        if getattr(options, name) not in tuple(accepted):
            refuse(name, getattr(options, name), " or ".join(f'"{choice}"' for choice in accepted))


PLAIN = {bool: "True or False", int: "an integer", float: "a finite number", str: "a name", type(None): "None"}


def check_plain(name: str, value: object, hint: Any) -> None:
    """Refuse a value of another plain type than the option has; NaN and infinity are no numbers here."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    accepted = []
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            fits, words = value in typing.get_args(kind), " or ".join(f'"{choice}"' for choice in typing.get_args(kind))
        elif kind in (int, float):
            number = isinstance(value, int) or (kind is float and isinstance(value, float) and math.isfinite(value))
            fits, words = number and not isinstance(value, bool), PLAIN[kind]
        elif kind in PLAIN:
            fits, words = isinstance(value, kind), PLAIN[kind]
        elif typing.get_origin(kind) is Callable:
            fits, words = callable(value), "a callable"
        else:
            return  # the mechanism checks what has structure
        if fits:
            return
        accepted.append(words)
    refuse(name, value, " or ".join(accepted))


def plain_name(name: str, value: str) -> str:
    """Refuse what could lead out of the folder that a name is for; returns the name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        near = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("._-")
        such = f", such as {near!r}" if near else ""
        refuse(name, value, f"a name of letters, digits, '-', '_' and '.' that begins with a letter or digit{such}")
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a misspelt name, or a full stop."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
