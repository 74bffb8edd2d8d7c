"""Where prompts are cut into pieces: at the same places for each of them, with a cache and without."""

EVERY = 256  # tokens between borders
EARLY = (32, 64, 128)  # borders before the first of these, so that short prompts share states too


def border_after(count: int, every: int, early: tuple[int, ...]) -> int:
    """The first border after `count` tokens."""
    return min([count - count % every + every, *(border for border in early if border > count)])


def is_border(count: int, every: int, early: tuple[int, ...]) -> bool:
    return count > 0 and (count % every == 0 or count in early)
