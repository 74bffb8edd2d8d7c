"""Pathfinder without a network: find the discs, follow dashes from one of them, see whether they lead to the other."""

from functools import lru_cache

import numpy as np

from subquad.tasks.lra.contours import Scene, Style, render

Likeness = tuple[np.ndarray, np.ndarray, np.ndarray]  # points, what is read there, its spread
BEAM = 160  # ways followed at once
TURNS = 37  # tried after each dash
FIRST = 96  # directions in which a path may leave a disc
FAINT = 4.0  # mean squared deviation from a dash, in units of its spread: more is none
SLACK = 0.1  # by which a way may be less likely than the likeliest
NEAR = 1.25  # pixels between the end of a path and the disc it leads to


def solve(picture: np.ndarray, style: Style) -> int:
    """1 if a path of the style's dashes leads from one disc to the other, else 0."""
    here, there = discs(picture, style)
    light = _smooth(picture.astype(np.float64) / 255)
    return int(any(_leads(light, here, there, style, margin) for margin in style.margins))


def discs(picture: np.ndarray, style: Style) -> tuple[np.ndarray, np.ndarray]:
    """The middles of the two discs, (row, column): nothing else is as bright."""
    places = np.argwhere(picture >= 250) + 0.5
    far = np.hypot(*(places - places[0]).T) >= 2 * style.radius + 0.5
    first, second = (_middle(picture, places[chosen].mean(0), style) for chosen in (~far, far))
    return first, second


def _middle(picture: np.ndarray, guess: np.ndarray, style: Style) -> np.ndarray:
    """Of the discs around a guess the one most like the picture."""
    shifts = np.linspace(-0.6, 0.6, 13)
    middles = guess + np.stack(np.meshgrid(shifts, shifts, indexing="ij"), axis=-1).reshape(-1, 2)
    pixels = np.argwhere(np.ones_like(picture)) + 0.5
    pixels = pixels[np.hypot(*(pixels - guess).T) < style.radius + 1.5]
    fine = (np.arange(style.antialias) + 0.5) / style.antialias - 0.5
    parts = np.stack(np.meshgrid(fine, fine, indexing="ij"), axis=-1).reshape(-1, 2)
    apart = pixels[:, None] + parts - middles[:, None, None]  # [middles, pixels, parts, 2]
    cover = np.clip((style.radius - np.hypot(apart[..., 0], apart[..., 1])) * style.antialias + 0.5, 0, 1).mean(-1)
    seen = picture[tuple(pixels.astype(np.int64).T)] / 255
    wrong = np.where(cover > seen, cover - seen, (seen - cover) / 4)  # a dash may add light, nothing takes it away
    return middles[(wrong**2).sum(-1).argmin()]


def _smooth(picture: np.ndarray) -> np.ndarray:
    """A thin line then reads alike whether it runs through pixels or between them."""
    for axis in (0, 1):
        padded = np.pad(picture, [(1, 1) if a == axis else (0, 0) for a in (0, 1)])
        low, high = (np.delete(padded, at, axis) for at in ([-1, -2], [0, 1]))
        picture = picture / 2 + (low + high) / 4
    return picture


def _read(light: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Between pixels, at points [..., 2]; dark outside."""
    size = len(light)
    at = points - 0.5
    low = np.floor(at).astype(np.int64)
    share = at - low
    total = np.zeros(points.shape[:-1])
    for dy in (0, 1):
        for dx in (0, 1):
            y, x = low[..., 0] + dy, low[..., 1] + dx
            inside = (y >= 0) & (y < size) & (x >= 0) & (x < size)
            weight = np.abs(1 - dy - share[..., 0]) * np.abs(1 - dx - share[..., 1])
            total += np.where(inside, light[np.clip(y, 0, size - 1), np.clip(x, 0, size - 1)] * weight, 0)
    return total


@lru_cache
def _likeness(style: Style) -> Likeness:
    """(points along and beside a dash [S, 2], mean and spread of what is read there): of dashes anywhere, any way."""
    along = np.linspace(0, style.length, 2 * style.length + 1)
    beside = np.array([-1, -0.5, 0, 0.5, 1]) * max(1, style.thickness)
    points = np.stack(np.meshgrid(along, beside, indexing="ij"), axis=-1).reshape(-1, 2)
    random = np.random.Generator(np.random.PCG64(0))
    count, corner = 200, np.full((200, 2, 2), style.radius, np.float32)
    start = (style.size / 2 + random.random((count, 2))).astype(np.float32)
    angle = random.random(count) * 2 * np.pi
    head = (start + style.length * _unit(angle)).astype(np.float32)
    alone = Scene(start[:, None], head[:, None], np.ones((count, 1), bool), corner, np.zeros(count))
    pictures = render(style, alone)
    read = np.stack(
        [_read(_smooth(p / 255), _around(s, a, points)) for p, s, a in zip(pictures, start, angle, strict=True)]
    )
    return points, read.mean(0), read.std(0) + 0.03 * style.contrast


def _around(start: np.ndarray, angle: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Points (along, beside) [S, 2] of dashes that begin at start [..., 2]: [..., S, 2]"""
    unit = _unit(angle)
    across = np.stack((-unit[..., 1], unit[..., 0]), axis=-1)
    along, beside = points[:, :1], points[:, 1:]
    return start[..., None, :] + along * unit[..., None, :] + beside * across[..., None, :]


def _leads(light: np.ndarray, here: np.ndarray, there: np.ndarray, style: Style, margin: int) -> bool:
    """Follow what looks most like a path, dash by dash, from `here`; does one end at `there`?"""
    likeness = _likeness(style)
    central = likeness[0][:, 1] == 0
    middle = (likeness[0][central], likeness[1][central], likeness[2][central])
    angle = np.arange(FIRST) * (2 * np.pi / FIRST)
    head = here + style.length * _unit(angle)
    cost = np.zeros(FIRST)
    turns = np.linspace(-0.95, 0.95, TURNS) * (np.pi / 2) / style.continuity
    habit = -0.1 * np.log(np.cos(style.continuity * turns) ** 2)
    for _ in range(1, style.contour):
        pivot = np.repeat(head + margin * _unit(angle), TURNS, axis=0)  # [W · turns, 2]
        angle = (angle[:, None] + turns).ravel()
        start = pivot + margin * _unit(angle)
        cost = (cost[:, None] + habit).ravel()
        bright = _unlike(light, start, angle, middle, (here, there), style) < FAINT  # quick, and most are not
        start, angle, cost = start[bright], angle[bright], cost[bright]
        unlike = _unlike(light, start, angle, likeness, (here, there), style)
        head, angle, cost = _best(start + style.length * _unit(angle), angle, cost + unlike, unlike < FAINT)
        if not len(cost):
            return False
    ends = np.hypot(*(head - there).T) < NEAR
    return bool(ends.any() and cost[ends].min() < cost.min() + SLACK)


def _unlike(
    light: np.ndarray,
    start: np.ndarray,
    angle: np.ndarray,
    likeness: Likeness,
    discs: tuple[np.ndarray, np.ndarray],
    style: Style,
) -> np.ndarray:
    """How far what is read deviates from a dash, in units of its spread; a disc hides what is under it."""
    points, mean, spread = likeness
    at = _around(start, angle, points)  # [W, S, 2]
    deviation = np.minimum(((_read(light, at) - mean) / spread) ** 2, 16)
    clear = np.ones(deviation.shape, bool)
    for disc in discs:
        clear &= np.hypot(at[..., 0] - disc[0], at[..., 1] - disc[1]) > style.radius + 1.5
    return (deviation * clear).sum(1) / np.maximum(clear.sum(1), 1)


def _best(
    head: np.ndarray, angle: np.ndarray, cost: np.ndarray, possible: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best of the possible ways, of those that are nearly the same one."""
    order = np.flatnonzero(possible)[np.argsort(cost[possible], kind="stable")]
    places = np.concatenate((np.round(3 * head[order]), np.round(_unit(angle[order]) * 3)), axis=1)
    _, first = np.unique(places, axis=0, return_index=True)
    chosen = order[np.sort(first)[:BEAM]]
    return head[chosen], angle[chosen], cost[chosen]


def _unit(angle: np.ndarray) -> np.ndarray:
    return np.stack((np.sin(angle), np.cos(angle)), axis=-1)
