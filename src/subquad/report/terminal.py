"""What `subquad list`, `subquad show` and `subquad recommend` print."""

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from subquad.mechanisms import MECHANISMS, mechanism
from subquad.mechanisms.base import Mixer, Options
from subquad.mechanisms.card import FIELDS, card, option_meanings
from subquad.studies.recommend import Advice

NARROW = 110  # columns: a narrower terminal shows the family below the name


def wrapped(text: str, width: int, first: str = "", later: str | None = None) -> str:
    """Text in lines of this width, with `later` before all but the first, ready to print. Long paths are not broken, so
    that they can be copied."""
    later = " " * len(first) if later is None else later
    lines = textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return escape("\n".join(lines))


def mechanisms_table(width: int) -> Table:
    narrow = width < NARROW
    table = Table(title=f"{len(MECHANISMS)} mechanisms", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in ("name", "family", "cost", "causal", "bidirectional", "cross", "state", "source"):
        if column != "family" or not narrow:
            header = "bidir." if narrow and column == "bidirectional" else column
            table.add_column(header, overflow="fold", no_wrap=column in ("state", "source"))
    for name, cls in MECHANISMS.items():
        traits, facts = cls.traits, card(cls)
        marks = ("yes" if flag else "-" for flag in (traits.causal, traits.bidirectional, traits.cross))
        named = [f"[bold]{name}[/bold]\n[dim]{cls.family}[/dim]"] if narrow else [f"[bold]{name}[/bold]", cls.family]
        table.add_row(*named, facts.training_cost, *marks, traits.state or "-", facts.source)
    return table


def mechanism_card(name: str, width: int) -> Iterator[str]:
    """The fields of a mechanism's docstring."""
    cls = mechanism(name)
    facts = card(cls)
    yield f"[bold]{name}[/bold] [dim]{cls.family}[/dim]\n{wrapped(facts.title, width)}\n"
    for field in FIELDS:
        text = getattr(facts, field.lower())
        # only definitions keep their line breaks; the rest of a line that is too long is indented below it
        lines = text.splitlines() if field == "Definition" else [" ".join(text.split())]
        indent = "  " if field == "Definition" else ""
        yield "\n".join([f"[bold]{field}[/bold]", *(wrapped(line, width, later=indent) for line in lines)]) + "\n"


def options_table(name: str) -> Table:
    """The options of a mechanism; its own come first."""
    cls = mechanism(name)
    table = Table(title="Options", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("option", "default", "meaning"):
        table.add_column(column, no_wrap=column == "option")
    meanings = option_meanings(cls)
    for option, default, _ in options(cls):
        table.add_row(option.name, default, escape(meanings[option.name]))
    return table


def options(cls: type[Mixer]) -> Iterator[tuple[dataclasses.Field[Any], str, bool]]:
    """(option, its default in words, whether all mechanisms have it); the mechanism's own options come first."""
    shared = {field.name for field in dataclasses.fields(Options)}
    for option in sorted(dataclasses.fields(cls.options_type), key=lambda option: option.name in shared):
        required = option.default is dataclasses.MISSING or (option.name == "max_length" and cls.traits.fixed_length)
        yield option, "required" if required else repr(option.default), option.name in shared


def advice_lines(advice: Advice, width: int) -> Iterator[str]:
    yield f"[bold]{wrapped(advice.verdict, width)}[/bold]\n"
    for rank, choice in enumerate(advice.choices, start=1):
        yield f"{rank}. [bold]{choice.mechanism}[/bold]"
        yield from (wrapped(reason, width, "   - ") for reason in choice.reasons)
    yield "\n" + wrapped(f"from {advice.figures}", width)
    if advice.missing:
        yield wrapped(f"not compared, since not measured at this length: {', '.join(advice.missing)}", width)
