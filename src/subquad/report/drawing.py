"""Grey images in a terminal: a character shows two pixels, one above the other; without colours, by its ink."""

import functools

from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from torch import Tensor

INK = " .:-=+*#%@"  # from light to dark
GREYS = 24  # shades of grey in a terminal of 256 colours
GAP = 2  # columns between images


class Drawing:
    """Images [N, rows, columns] from 0 to 1, side by side, as many as fit the width.

    The tensor may change between two prints, as it does while a model writes.
    """

    def __init__(self, images: Tensor):
        self.images = images

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        coloured = console.is_terminal and console.color_system is not None
        count = max(1, (options.max_width + GAP) // (self.images.shape[2] + GAP))
        images = self.images[:count].clamp(0, 1)
        for y in range(0, images.shape[1], 2):
            upper = images[:, y]  # [N, columns]
            lower = images[:, min(y + 1, images.shape[1] - 1)]
            for i, (top, bottom) in enumerate(zip(upper.tolist(), lower.tolist(), strict=True)):
                if i:
                    yield Segment(" " * GAP)
                for a, b in zip(top, bottom, strict=True):
                    yield _halves(_level(a, GREYS), _level(b, GREYS)) if coloured else _ink((a + b) / 2)
            yield Segment.line()


def _level(value: float, count: int) -> int:
    return min(int(value * count), count - 1)


@functools.cache
def _halves(upper: int, lower: int) -> Segment:
    grey = [round(255 * level / (GREYS - 1)) for level in (upper, lower)]
    top, bottom = (Color.from_rgb(value, value, value) for value in grey)
    return Segment("▀", Style(color=top, bgcolor=bottom))


def _ink(value: float) -> Segment:
    return Segment(INK[_level(value, len(INK))])
