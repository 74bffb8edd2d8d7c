"""How commands of the command line are declared, and how they say errors."""

import dataclasses
import inspect
import math
import os
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer import Option

from subquad.checks import refuse
from subquad.report.visible import Terminal

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Efficient transformers under one contract.")
bench = typer.Typer(no_args_is_help=True, help="Measure and write JSON.")
app.add_typer(bench, name="bench")
console = Terminal()
LARGEST = 2**62  # refuse larger integers here: torch fails on them deep inside


def declare(name: str | None = None, group: typer.Typer = app) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command. For a wrong name or value it prints one line and exits with code 2, without a traceback."""

    def register(command: Callable[..., None]) -> Callable[..., None]:
        return group.command(name)(_say_errors(command))

    return register


def _say_errors(command: Callable[..., None]) -> Callable[..., None]:

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            for name, value in kwargs.items():
                if isinstance(value, float) and math.isnan(value):
                    refuse(name, value, "a number")
                if isinstance(value, int) and abs(value) > LARGEST:
                    refuse(name, value, "an integer below 2**62")
            command(*args, **kwargs)
        except (ValueError, OSError, ImportError) as error:  # such as a missing file or optional package
            raise failure(error) from None
        except (RuntimeError, MemoryError) as error:
            from subquad.measure.cost import out_of_memory

            amount = out_of_memory(error)
            if amount is None:
                raise
            defaults = {name: option.default for name, option in inspect.signature(command).parameters.items()}
            given = [f"{name}={value}" for name, value in kwargs.items() if value != defaults[name]]
            raise failure(ValueError(f"not enough memory for {', '.join(given) or 'this'}: {amount}")) from None

    return run


def options_of(kind: Any, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option for each field of a dataclass that has a help text; the command gets them as one object."""
    fields = {f.name: f for f in dataclasses.fields(kind) if "help" in f.metadata}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            command(**{name: kind(**{field: given.pop(field) for field in fields})}, **given)

        signature = inspect.signature(command)
        options = [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=f.default,
                annotation=Annotated[f.type, Option(help=f.metadata["help"])],
            )
            for f in fields.values()
        ]
        others = [parameter for other, parameter in signature.parameters.items() if other != name]
        run.__signature__ = signature.replace(parameters=[*others, *options])  # type: ignore[attr-defined]
        return run

    return decorate


def failure(error: BaseException, code: int = 2) -> typer.Exit:
    """Print an error in one line; returns the exit to raise."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    Terminal(stderr=True).print(f"[red]error[/red] {escape(' '.join(text.split()))}", soft_wrap=True, highlight=False)
    return typer.Exit(code)


def say(text: str) -> None:
    """Print text without breaking a long path in it, so that the path can be copied."""
    console.print(escape(text), soft_wrap=True)
