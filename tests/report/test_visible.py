"""Escape sequences in names and strings of files are shown, not executed."""

import io
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from typer.testing import CliRunner

from subquad.cli import app
from subquad.report.html import chart, escape
from subquad.report.visible import Terminal, visible
from tests.report import runs

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202eevil\r\x00\udcff$\\x$<!--<script>"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def test_control_characters_are_spelt_and_the_rest_stays() -> None:
    assert visible("a\x1b[31mb\x9b\u202ec\udcff") == r"a\x1b[31mb\x9b\u202ec\udcff"
    plain = "tab\t, new line\n, é, 漢, 😀, [bold]"
    assert visible(plain) == plain


def test_a_terminal_gets_no_sequence_but_our_own() -> None:
    written = io.StringIO()
    console = Terminal(file=written, force_terminal=True, width=200, color_system="standard", legacy_windows=False)
    console.print(f"[red]error[/red] {EVIL.partition('$')[0]}", soft_wrap=True, highlight=False)
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL)
    console.print(table)
    shown = written.getvalue()
    assert "\x1b[31merror\x1b[0m" in shown  # colours are ours
    assert not CONTROL.search(re.sub(r"\x1b\[[\d;]*m", "", shown))
    assert shown.count(r"\x1b[2J\x9b31m\u202eevil") == 4


def test_a_progress_bar_moves_as_before() -> None:
    outputs = []
    for kind in (Console, Terminal):
        written = io.StringIO()
        console = kind(file=written, force_terminal=True, width=60, legacy_windows=False)
        with Progress("{task.description}", console=console, auto_refresh=False) as progress:
            task = progress.add_task("x", total=2)
            console.print("between")
            progress.update(task, completed=1, refresh=True)
        outputs.append(written.getvalue())
    assert outputs[0] == outputs[1]
    assert "\x1b[" in outputs[0]


def poisoned(value: Any, key: str = "") -> Any:
    """Every text in a run's figures, except those that the reader interprets."""
    if isinstance(value, dict):
        return {key: poisoned(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner, key) for inner in value]
    return value + EVIL if isinstance(value, str) and key not in ("kind", "mechanism", "file") else value


def test_a_report_of_poisoned_figures_is_harmless(tmp_path: Path) -> None:
    folder = tmp_path / ("run\x1b[31m $\\x$")
    figures = poisoned(runs.results())
    figures["rows"] = figures["rows"][:10]
    figures["quality"].append({**figures["quality"][0], "mechanism": EVIL})
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(figures))
    (tmp_path / "other.json").write_text(json.dumps(poisoned({"device": "x", "rows": [{"a": "b"}], "c": "d"})))
    result = CliRunner().invoke(app, ["report", str(folder), str(tmp_path / "other.json")])
    assert result.exit_code == 0, result.output
    assert not CONTROL.search(result.output)
    for file in (folder / "report.html", *folder.glob("*.csv")):
        assert not CONTROL.search(file.read_text().replace("\r\n", "\n")), file.name
    page = (folder / "report.html").read_text()
    assert "<!--" not in page
    assert r"\u202eevil" in page
    charts = re.findall(r'<script type="application/json" id="[\w-]+-data">(.*?)</script>', page, re.DOTALL)
    assert charts
    assert not any(CONTROL.search(json.dumps(json.loads(text), ensure_ascii=False)) for text in charts)


def test_nothing_in_a_page_or_its_data_is_a_mark() -> None:
    assert escape("<b>\x1b") == r"&lt;b&gt;\x1b"
    written = chart("x", {"views": [{"name": EVIL, EVIL: [EVIL]}]})
    assert json.loads(written[written.index(">") + 1 : written.index("</script>")])
    assert written.count("<") == 6  # the script, the box and what it says without JavaScript
    assert not CONTROL.search(written)
