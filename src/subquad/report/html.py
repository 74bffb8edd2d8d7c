"""Parts that all pages share: the Jinja templates, tables that sort, charts as data, highlighted Python."""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from subquad.report.visible import visible

if TYPE_CHECKING:
    from jinja2 import Environment


class Cell(NamedTuple):
    """A cell of a table: what is shown, and the value it sorts by (the shown text if None)."""

    shown: str  # Markup is HTML, any other text will be escaped
    value: float | str | None = None
    css: str = ""


@functools.cache
def environment() -> "Environment":
    """The templates. Every value is escaped unless it is Markup, and control characters are spelt out."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("subquad.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    made.globals |= {"chart": chart, "code": code, "facts": facts, "table": table, "template": template}
    return made


def render(name: str, /, **values: Any) -> Markup:
    """The template with these values."""
    return Markup(environment().get_template(name).render(values))


def template(name: str) -> Markup:
    """A file of templates/ unchanged, such as the style and the script."""
    return Markup(files("subquad.report").joinpath("templates", *name.split("/")).read_text(encoding="utf-8"))


def escape(text: str) -> Markup:
    """Text as HTML: escape special characters."""
    return Markup.escape(visible(text))


def number(value: float | int | None, digits: int = 3, unit: str = "") -> Cell:
    """A figure, rounded for reading but sorted by its full value."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return Cell("", "", "n")
    shown = f"{value:,}" if isinstance(value, int) else _rounded(value, digits)
    return Cell(shown + (f" {unit}" if unit else ""), value, "n")


def size(value: float | None) -> Cell:
    """Bytes in the unit that reads best."""
    if value is None:
        return Cell("", "", "n")
    power = sum(value >= 1000**n for n in range(1, 5))
    return Cell(f"{_rounded(value / 1000**power, 3)} {('B', 'kB', 'MB', 'GB', 'TB')[power]}", value, "n")


def _rounded(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)))
    if power < -4 or power > 8:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - power)}f}"


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell | str]],
    *,
    name: str = "",
    caption: str = "",
    filtered: bool = False,
) -> Markup:
    """A table that readers can sort by its headers; `name` and `filtered` add an input that filters its rows."""
    cells = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in rows]
    numeric = [any(row[i].css == "n" for row in cells) for i in range(len(columns))]
    head = list(zip(columns, numeric, strict=True))
    return render("table.html", head=head, rows=cells, name=name, caption=caption, filtered=filtered)


def facts(pairs: Mapping[str, Any]) -> Markup:
    """A list of names and values; nested values go on one line."""
    return render("facts.html", pairs={key.replace("_", " "): _plain(value) for key, value in pairs.items()})


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(v) for v in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value, 4).shown
    return "none" if value is None else f"{value:,}" if isinstance(value, int) and value > 9999 else str(value)


def chart(name: str, spec: Mapping[str, Any]) -> Markup:
    """A chart that page.js draws from its data. `name` is unique in the page."""
    data = json.dumps(spelt(spec), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return render("chart.html", name=name, data=Markup(data.replace("<", "\\u003c")))  # no text ends the script


def spelt(value: Any, spell: Callable[[str], str] = visible) -> Any:
    """Data with `spell` applied to every string in it."""
    if isinstance(value, Mapping):
        return {spell(str(key)): spelt(inner, spell) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [spelt(inner, spell) for inner in value]
    return spell(value) if isinstance(value, str) else value


def code(source: str, css: str = "") -> Markup:
    """Python with its comments, strings and keywords highlighted."""
    from pygments.lexers import PythonLexer
    from pygments.token import Comment, Keyword, Operator, String

    kinds = ((Comment, "c"), (String, "s"), (Keyword, "k"), (Operator.Word, "k"))
    tokens = PythonLexer(stripnl=False).get_tokens(source)
    named = ((next((css for kind, css in kinds if token in kind), ""), text) for token, text in tokens)
    groups = itertools.groupby(named, itemgetter(0))
    return render("code.html", pieces=[(css, "".join(text for _, text in group)) for css, group in groups], css=css)
