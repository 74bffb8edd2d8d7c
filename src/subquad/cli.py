"""The command line: parses, calls, prints."""

import dataclasses
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Efficient transformers under one contract.")
console = Console()


def _say_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A wrong name or value is one line on the screen and exit code 2, not a traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except ValueError as error:
            Console(stderr=True).print(f"[red]error[/red] {escape(str(error))}")
            raise typer.Exit(2) from None

    return run


def _version(wanted: bool) -> None:
    if wanted:
        import torch

        import subquad

        console.print(f"subquad {subquad.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command("list")
def list_mechanisms() -> None:
    """Every mechanism: family, cost, traits, source."""
    from subquad.mechanisms import MECHANISMS
    from subquad.mechanisms.card import card

    table = Table(title=f"{len(MECHANISMS)} mechanisms", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in ("name", "family", "cost", "causal", "bidirectional", "cross", "state", "source"):
        folds = column in ("family", "cost")
        header = "bidir." if column == "bidirectional" and console.width < 120 else column
        table.add_column(header, overflow="fold", no_wrap=not folds, min_width=10 if folds else None)
    for name, cls in MECHANISMS.items():
        traits, facts = cls.traits, card(cls)
        marks = ("yes" if flag else "-" for flag in (traits.causal, traits.bidirectional, traits.cross))
        state = traits.state or "-"
        table.add_row(f"[bold]{name}[/bold]", cls.family, facts.training_cost, *marks, state, facts.source)
    console.print(table)


@app.command()
@_say_errors
def show(
    name: str,
    picture: Annotated[Path | None, typer.Option(help="Draw who attends to whom into this PNG.")] = None,
    error: Annotated[bool, typer.Option("--error", help="Measure the distance to exact softmax attention.")] = False,
) -> None:
    """One mechanism: equation, cost, options with defaults, source, where verified."""
    from subquad.mechanisms import mechanism
    from subquad.mechanisms.base import Options
    from subquad.mechanisms.card import FIELDS, card

    cls = mechanism(name)
    facts = card(cls)
    console.print(f"[bold]{name}[/bold] ({cls.family}): {escape(facts.title)}\n")
    for field in FIELDS:
        console.print(f"[bold]{field}[/bold]")
        console.print(escape(getattr(facts, field.lower())) + "\n", soft_wrap=True)
    table = Table(title="Options", title_justify="left")
    for column in ("option", "default", "of"):
        table.add_column(column)
    shared = {field.name for field in dataclasses.fields(Options)}
    for option in dataclasses.fields(cls.options_type):
        default = "required" if option.default is dataclasses.MISSING else repr(option.default)
        if option.name == "max_length" and cls.traits.fixed_length:
            default = "required"
        whose = "no meaning here" if option.name in cls.unused else "all" if option.name in shared else name
        table.add_row(option.name, default, whose)
    console.print(table)
    if picture is not None:
        from subquad.mechanisms.picture import draw

        draw(name, picture)
        console.print(f"drawn: {picture}")
    if error:
        from subquad.mechanisms.error import error_table

        console.print(error_table(name))


@app.command()
@_say_errors
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the figures.")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(help="Training steps.")] = 600,
) -> None:
    """Train a small linear transformer on real handwritten digits, then generate digits as an RNN."""
    from subquad.tasks.digits import demo as run

    run(out, steps=steps, console=console)


def main() -> None:
    app()
