"""Make text from outside (run names, strings in files) safe to show: control characters are spelt out."""

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

# control characters except tab and newline, marks that change the direction of text, lone surrogates
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """The text with hidden characters spelt out, as \\x1b."""
    return HIDDEN.sub(lambda match: ascii(match[0])[1:-1], text)


class Terminal(Console):
    """A console that sends no control characters except its own."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.push_render_hook(_Spell())


class _Spell(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Spelt(renderable) for renderable in renderables]


class _Spelt:
    def __init__(self, inner: ConsoleRenderable):
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        segments: Iterable[Segment] = console.render(self.inner, options)
        for text, style, control in segments:
            yield Segment(text, style, control) if control else Segment(visible(text), style)
