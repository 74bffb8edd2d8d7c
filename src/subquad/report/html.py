"""The few pieces all pages are made of: a frame, tables that sort, charts as data, highlighted source."""

import html
import io
import json
import keyword
import math
import tokenize
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from subquad.report.visible import visible


def escape(text: str) -> str:
    """Text as a page shows it: neither its marks nor its control characters do anything."""
    return html.escape(visible(text))


class Cell(NamedTuple):
    """What is shown, and the value it sorts by (the shown text if None)."""

    shown: str
    value: float | str | None = None
    css: str = ""
    raw: bool = False  # shown is HTML already


def template(name: str) -> str:
    """A file of templates/."""
    return files("subquad.report").joinpath("templates", *name.split("/")).read_text(encoding="utf-8")


def page(
    title: str, body: str, *, nav: Sequence[tuple[str, str]] = (), assets: str | None = None, here: str = ""
) -> str:
    """A whole document. Style and script are written into it, or linked from the folder `assets`."""
    if assets is None:
        style, script = f"<style>{template('style.css')}</style>", f"<script>{template('page.js')}</script>"
    else:
        style = f'<link rel="stylesheet" href="{assets}/style.css">'
        script = f'<script src="{assets}/page.js"></script>'
    current = ' aria-current="page"'
    links = "".join(
        f'<a href="{escape(href)}"{current if text == here else ""}>{escape(text)}</a>' for text, href in nav[1:]
    )
    home = f'<a class="home" href="{escape(nav[0][1])}">{escape(nav[0][0])}</a>' if nav else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f'{style}\n</head>\n<body>\n<header class="bar"><div>{home}<nav>{links}</nav>'
        '<button class="theme" type="button" data-theme-switch title="colours: automatic, light or dark">theme: auto'
        f"</button></div></header>\n<main>\n{body}\n</main>\n{script}\n</body>\n</html>\n"
    )


def number(value: float | int | None, digits: int = 3, unit: str = "") -> Cell:
    """A figure rounded for reading; it sorts by its full value."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return Cell("", "", "n")
    shown = f"{value:,}" if isinstance(value, int) else _rounded(value, digits)
    return Cell(shown + (f" {unit}" if unit else ""), value, "n")


def size(value: float | None) -> Cell:
    """Bytes in the unit that reads best."""
    if value is None:
        return Cell("", "", "n")
    shown, unit = float(value), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if shown < 1000:
            break
        shown, unit = shown / 1000, larger
    return Cell(f"{_rounded(shown, 3)} {unit}", value, "n")


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
) -> str:
    """A table that sorts by its headers; with `name` and `filtered` an input above hides rows."""
    cells = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in rows]
    numeric = [any(row[i].css == "n" for row in cells) for i in range(len(columns))]
    head = "".join(
        f'<th scope="col"{" class=n" if right else ""}><button type="button">{escape(text)}</button></th>'
        for text, right in zip(columns, numeric, strict=True)
    )
    body = "".join(f"<tr>{''.join(_cell(c) for c in row)}</tr>\n" for row in cells)
    search = (
        f'<input class="filter" type="search" data-filter="{name}" placeholder="filter, e.g. linear 4,096" '
        'aria-label="filter rows">'
        if filtered
        else ""
    )
    label = f"<caption><span>{escape(caption)}</span></caption>" if caption else ""
    identity = f' id="{name}"' if name else ""
    return (
        f'{search}<div class="scroll" tabindex="0"><table class="sort"{identity}>{label}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    css = f' class="{cell.css}"' if cell.css else ""
    value = "" if cell.value is None else f' data-v="{escape(str(cell.value))}"'
    return f"<td{css}{value}>{cell.shown if cell.raw else escape(cell.shown)}</td>"


def facts(pairs: Mapping[str, Any]) -> str:
    """A list of names and values; nested ones on one line."""
    return (
        '<dl class="facts">'
        + "".join(f"<dt>{escape(k.replace('_', ' '))}</dt><dd>{escape(_plain(v))}</dd>" for k, v in pairs.items())
        + "</dl>"
    )


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


def chart(name: str, spec: Mapping[str, Any]) -> str:
    """A chart drawn by page.js from its data. `name` is unique in the page."""
    data = json.dumps(spelt(spec), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")  # no mark of a page stands inside a script
    return (
        f'<script type="application/json" id="{name}-data">{data}</script>'
        f'<div class="chart" id="{name}" data-spec="{name}-data"><noscript>This chart is drawn by JavaScript; the CSV '
        "and PNG files next to the report hold the same figures.</noscript></div>"
    )


def spelt(value: Any, spell: Callable[[str], str] = visible) -> Any:
    """Data with every string in it as it may be shown."""
    if isinstance(value, Mapping):
        return {spell(str(key)): spelt(inner, spell) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [spelt(inner, spell) for inner in value]
    return spell(value) if isinstance(value, str) else value


def code(source: str, css: str = "") -> str:
    """Python with comments, strings and keywords set apart."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    out, done = [], 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = {tokenize.COMMENT: "c", tokenize.STRING: "s"}.get(token.type)
        if token.type == tokenize.NAME and keyword.iskeyword(token.string):
            kind = "k"
        if kind is None:
            continue
        begin, end = (starts[row - 1] + column for row, column in (token.start, token.end))
        out += [escape(source[done:begin]), f'<span class="{kind}">{escape(source[begin:end])}</span>']
        done = end
    return f'<pre class="{css}"><code>{"".join(out)}{escape(source[done:])}</code></pre>'
