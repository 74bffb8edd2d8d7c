"""Put bugs into functions on purpose, to find tests that cannot fail."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest


class Slip(NamedTuple):
    """A bug: in the source of `function`, `wrong` replaces `right`, which occurs once."""

    function: Any
    right: str
    wrong: str


def plant(monkeypatch: pytest.MonkeyPatch, slip: Slip) -> None:
    """Change the function itself, so that the bug is also in modules that have already imported it."""
    function = inspect.unwrap(slip.function)
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :] if not source.startswith("def ") else source  # without decorators
    assert source.count(slip.right) == 1, f"{slip.right!r} is not one line of {function.__qualname__} any more"
    source = source.replace(slip.right, slip.wrong)
    kept = function.__code__.co_freevars  # such as the class that super() looks up
    if kept:
        names = "".join(f"    {name} = None\n" for name in kept)
        source = f"def around():\n{names}{textwrap.indent(source, '    ')}\n    return {function.__name__}\n"
    made: dict[str, Any] = {}
    exec(source, function.__globals__, made)
    changed = made["around"]() if kept else made[function.__name__]
    monkeypatch.setattr(function, "__code__", changed.__code__)


def caught(monkeypatch: pytest.MonkeyPatch, slips: tuple[Slip, ...], check: Callable[[], None]) -> None:
    """Assert that `check` passes without the bug and fails with it."""
    check()
    with monkeypatch.context() as patched:
        for slip in slips:
            plant(patched, slip)
        with pytest.raises(AssertionError):
            check()
