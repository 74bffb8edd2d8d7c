"""Pathfinder pictures: two long dashed paths and short ones between them; do the two discs lie on the same path?

Rules     of the arena's sets (Linsley et al. 2018, arXiv:1805.08315; Tay et al. 2021), with their published parameters:
          two paths of 14 dashes ("paddles") that begin near the middle and a given distance apart, and distractors of
          14 // 3 dashes as far as there is room; a dash turns against the one before it by an angle of density
          cos²(continuity · angle); dashes of one path are 2 · margin apart, dashes of different paths at least that
          plus their thickness. One disc marks the beginning of a path, the other the end of the same or of the other
Departs   dashes lie at real coordinates instead of whole pixels; all paths have the same contrast; thousands of
          pictures grow at once, and those in which a path finds no room or the discs touch are drawn anew
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CANDIDATES = 4  # random turns tried at once for the next dash
ARCS, AHEAD = 5, 3  # a turn is preferred from which one of so many arcs goes on freely for so many dashes
SEEDS = 24  # places tried at once for a path's first dash
RETRIES = 4  # of a distractor
HEADINGS = 128  # a full turn, where tables are used


@dataclass(frozen=True)
class Style:
    size: int
    length: int  # of a dash
    thickness: float
    margins: tuple[int, ...]
    radius: float  # of the discs
    seed_distance: float  # of the two paths' beginnings
    continuity: float
    contrast: float  # of dashes; discs have 1
    distractors: int
    contour: int = 14  # dashes of a long path
    distractor: int = 4
    antialias: int = 2
    padding: int = 1

    @property
    def dashes(self) -> int:
        return 2 * self.contour + self.distractors * self.distractor


# the hard level, contour length 14
HARD = {
    32: Style(32, 2, 0.5, (1,), 1.5, 7, 1.0, 0.75, distractors=20 // 4),
    128: Style(128, 5, 1.5, (2, 3), 3, 20, 1.8, 0.9, distractors=35 // 4),
}


class Scene(NamedTuple):
    """Dashes of N pictures at (row, column), the two long paths first; and which tips are marked."""

    start: np.ndarray  # [N, P, 2]
    head: np.ndarray  # [N, P, 2]
    there: np.ndarray  # [N, P]: a distractor may have found no room
    discs: np.ndarray  # [N, 2, 2]
    labels: np.ndarray  # [N]: 1 where both discs are on one path


def draw(style: Style, count: int, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(pictures [count, size, size] uint8, labels [count], half of them 1); the same for the same seed and number."""
    scene = scenes(style, count, seed, number)
    return render(style, scene), scene.labels


def scenes(style: Style, count: int, seed: int, number: int) -> Scene:
    if count < 1:
        raise ValueError(f"count={count} cannot work: accepted is an integer of at least 1")
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number, style.size])))
    wanted = {0: count - count // 2, 1: count // 2}
    parts: dict[int, list[Scene]] = {0: [], 1: []}
    while any(wanted.values()):
        found = _attempt(style, random, max(64, 2**21 // style.size**2))
        for label in (0, 1):
            rows = np.flatnonzero(found.labels == label)[: wanted[label]]
            wanted[label] -= len(rows)
            parts[label].append(Scene(*(array[rows] for array in found)))
    order = np.argsort(random.random(count))
    return Scene(*(np.concatenate(arrays)[order] for arrays in zip(*parts[0], *parts[1], strict=True)))


class _Room:
    """Which cells of many pictures are taken. Bits 1 and 2: near a dash of the first or the second long path; 4 and 8:
    near one of them and behind its end, where the path itself may not go; 16: beyond the border.

    Headings and places are rounded, so that what dashes touch comes from tables.
    """

    def __init__(self, style: Style, margins: np.ndarray):
        self.scale = 2 if style.size <= 64 else 1  # cells a pixel
        self.kind = np.searchsorted(style.margins, margins)  # [N], which tables
        period = style.length + 2 * max(style.margins)
        border = (AHEAD * period + style.length) * self.scale + 2
        self.side = style.size * self.scale + 2 * border
        self.border = border
        low = border + int((style.padding + 0.5) * self.scale)
        inside = np.full((self.side, self.side), 16, np.uint8)
        inside[low:-low, low:-low] = 0
        self.cells = np.repeat(inside.reshape(1, -1), len(margins), axis=0)
        angle = (np.arange(HEADINGS) * (2 * np.pi / HEADINGS)).astype(np.float32)
        self.dash = self._offsets(_points(np.zeros((HEADINGS, 2), np.float32), angle, style.length))  # [headings, S]
        self.arcs = np.stack([self._arcs(style, angle, m) for m in style.margins])  # [kinds, headings, arcs, points]
        self.near, self.area = self._areas(style, angle)

    def _offsets(self, points: np.ndarray) -> np.ndarray:
        at = np.round(points * self.scale).astype(np.int32)
        return at[..., 0] * self.side + at[..., 1]

    def _arcs(self, style: Style, angle: np.ndarray, margin: int) -> np.ndarray:
        """Cells of the next dashes after one that ends at (0, 0), if all turn by the same angle."""
        bend = _bends(style)
        angle = np.broadcast_to(angle[:, None], (HEADINGS, ARCS))
        head, cells = np.zeros((HEADINGS, ARCS, 2), np.float32), []
        for _ in range(AHEAD):
            pivot, angle = head + margin * _unit(angle), angle + bend
            start = pivot + margin * _unit(angle)
            cells.append(self._offsets(_points(start, angle, style.length)))
            head = start + style.length * _unit(angle)
        return np.concatenate(cells, axis=-1)

    def _areas(self, style: Style, angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(bits 1 and 4 of the cells around a dash that begins at (0, 0) [kinds, headings, cells], their offsets)"""
        reach = int(np.ceil((style.length + 2 * max(style.margins) + style.thickness) * self.scale))
        at = np.arange(-reach, reach + 1, dtype=np.float32) / self.scale
        start = np.zeros((HEADINGS, 2), np.float32)
        unit = _unit(angle)
        distance = _distance(at[:, None][None], at[None, :][None], start, style.length * unit)
        ahead = at[:, None] * unit[:, 0, None, None] + at * unit[:, 1, None, None] - style.length
        bits = [
            np.where(distance < 2 * m + style.thickness, np.where(ahead < m, 5, 1), 0).astype(np.uint8)
            for m in style.margins
        ]
        y, x = (a.ravel() for a in np.meshgrid(at, at, indexing="ij"))
        return np.stack(bits).reshape(len(bits), HEADINGS, -1), self._offsets(np.stack((y, x), axis=-1))

    def _cell(self, points: np.ndarray) -> np.ndarray:
        at = (points * self.scale).astype(np.int32) + self.border
        return at[..., 0] * self.side + at[..., 1]

    def free(self, rows: np.ndarray, start: np.ndarray, angle: np.ndarray, bits: int) -> np.ndarray:
        """Whether dashes [n, K] of pictures `rows` [n] touch nothing: [n, K]"""
        at = self._cell(np.clip(start, 0, None))[..., None] + self.dash[_heading(angle)]
        found = self.cells[rows[:, None, None], np.minimum(at, self.side**2 - 1)]
        return ((found & np.uint8(bits | 16)) == 0).all(-1)

    def goes_on(self, rows: np.ndarray, head: np.ndarray, angle: np.ndarray, bits: int) -> np.ndarray:
        """Whether an arc goes on freely after dashes [n, K] that end at `head`, inside the picture: [n, K]"""
        arcs = self.arcs[self.kind[rows][:, None], _heading(angle)]  # [n, K, arcs, points]
        found = self.cells[rows[:, None, None, None], self._cell(head)[..., None, None] + arcs]
        return ((found & np.uint8(bits | 16)) == 0).all(-1).any(-1)

    def take(self, rows: np.ndarray, start: np.ndarray, angle: np.ndarray, path: int) -> None:
        """Dashes [n] of long path 0 or 1 take their cells; distractors count as path 0."""
        near = self.near[self.kind[rows], _heading(angle)]  # [n, cells]
        at = self._cell(start)[:, None] + self.area
        self.cells[rows[:, None], at] |= near << np.uint8(path)


def _heading(angle: np.ndarray) -> np.ndarray:
    return np.round(angle * (HEADINGS / (2 * np.pi))).astype(np.int32) % HEADINGS


def _points(start: np.ndarray, angle: np.ndarray, length: int) -> np.ndarray:
    """Along a dash, a pixel apart: [..., S, 2]"""
    along = np.arange(length + 1, dtype=np.float32)[:, None]
    return start[..., None, :] + along * _unit(angle)[..., None, :]


def _distance(y: np.ndarray, x: np.ndarray, start: np.ndarray, head: np.ndarray) -> np.ndarray:
    """From points [n, a, b] to dashes [n, 2]"""
    along = head - start
    y, x = y - start[:, 0, None, None], x - start[:, 1, None, None]
    dy, dx = along[:, 0, None, None], along[:, 1, None, None]
    share = np.clip((y * dy + x * dx) / (along**2).sum(-1)[:, None, None], 0, 1)
    return np.hypot(y - share * dy, x - share * dx)


def _unit(angle: np.ndarray) -> np.ndarray:
    return np.stack((np.sin(angle), np.cos(angle)), axis=-1).astype(np.float32)


def _bends(style: Style) -> np.ndarray:
    """Turns that arcs repeat, the gentlest first."""
    bends = np.linspace(-1, 1, ARCS, dtype=np.float32) / style.continuity
    return bends[np.argsort(np.abs(bends), kind="stable")]


def _turns(random: np.random.Generator, shape: tuple[int, ...], continuity: float) -> np.ndarray:
    """Angles of density cos²(continuity · angle), within a quarter of a circle over continuity."""
    grid = np.linspace(-np.pi / 2, np.pi / 2, 513)
    mass = (grid + np.sin(2 * grid) / 2) / np.pi + 0.5  # the integral of cos², from 0 to 1
    return (np.interp(random.random(shape), mass, grid) / continuity).astype(np.float32)


class _Growth:
    """Pictures that grow together; `alive` are those in which everything has found room so far."""

    def __init__(self, style: Style, random: np.random.Generator, count: int):
        self.style, self.random = style, random
        self.margins = np.array(style.margins)[(random.random(count) * len(style.margins)).astype(np.int64)]
        self.room = _Room(style, self.margins)
        self.start = np.zeros((count, style.dashes, 2), np.float32)
        self.head = np.zeros((count, style.dashes, 2), np.float32)
        self.angle = np.zeros((count, style.dashes), np.float32)
        self.there = np.zeros((count, style.dashes), bool)

    def seed(self, rows: np.ndarray, dash: int, tips: np.ndarray, bits: int) -> np.ndarray:
        """A path's first dash, from one of its possible tips [n, K, 2], in any direction; the rows that have one."""
        angle = (self.random.random(tips.shape[:2]) * 2 * np.pi).astype(np.float32)
        return self._choose(rows, dash, tips, angle, bits)

    def extend(self, rows: np.ndarray, dash: int, bits: int) -> np.ndarray:
        """The dash after `dash` - 1; the rows that have one."""
        margin = self.margins[rows].astype(np.float32)[:, None, None]
        before = self.angle[rows, dash - 1, None]  # [n, 1]
        pivot = self.head[rows, dash - 1, None] + margin * _unit(before)
        turns = _turns(self.random, (len(rows), CANDIDATES), self.style.continuity)
        turns = np.concatenate((turns, np.broadcast_to(_bends(self.style), (len(rows), ARCS))), axis=1)
        angle = before + turns
        return self._choose(rows, dash, pivot + margin * _unit(angle), angle, bits)

    def _choose(self, rows: np.ndarray, dash: int, start: np.ndarray, angle: np.ndarray, bits: int) -> np.ndarray:
        """The first candidate [n, K] that is free and leads on, or else the first that is free."""
        free = self.room.free(rows, start, angle, bits)
        head = start + self.style.length * _unit(angle)
        inside = np.where(free[..., None], head, self.style.size / 2)
        hopeful = free & self.room.goes_on(rows, inside, angle, bits)
        fits = np.where(hopeful.any(1)[:, None], hopeful, free)
        best, each = fits.argmax(1), np.arange(len(rows))
        found = fits[each, best]
        self.start[rows[found], dash] = start[each, best][found]
        self.head[rows[found], dash] = head[each, best][found]
        self.angle[rows[found], dash] = angle[each, best][found]
        self.there[rows[found], dash] = True
        return rows[found]

    def take(self, rows: np.ndarray, dash: int, path: int = 0) -> None:
        self.room.take(rows, self.start[rows, dash], self.angle[rows, dash], path)


def _attempt(style: Style, random: np.random.Generator, count: int) -> Scene:
    growth = _Growth(style, random, count)
    rows = _long_paths(growth, np.arange(count))
    for number in range(style.distractors):
        _distractor(growth, rows, 2 * style.contour + number * style.distractor)
    labels = (random.random(len(rows)) < 0.5).astype(np.uint8)
    origin = (random.random(len(rows)) < 0.5).astype(np.int64)  # which of the two paths the first disc is on
    end = np.where(labels == 1, origin, 1 - origin)
    discs = np.stack(
        (growth.start[rows, origin * style.contour], growth.head[rows, (end + 1) * style.contour - 1]), axis=1
    )
    apart = np.hypot(*(discs[:, 0] - discs[:, 1]).T) > 2 * style.radius + 2
    rows = rows[apart]
    return Scene(growth.start[rows], growth.head[rows], growth.there[rows], discs[apart], labels[apart])


def _long_paths(growth: _Growth, rows: np.ndarray) -> np.ndarray:
    """Both long paths, dash by dash in turn; the rows in which they found room."""
    style, random = growth.style, growth.random
    middle = style.size / 2 + (random.random((len(rows), 1, 2)) - 0.5) * (style.size - 4 * style.seed_distance)
    rows = growth.seed(rows, 0, np.broadcast_to(middle, (len(rows), SEEDS, 2)).astype(np.float32), 0)
    growth.take(rows, 0)
    around = style.seed_distance * _unit(random.random((len(rows), SEEDS)) * 2 * np.pi)
    rows = growth.seed(rows, style.contour, growth.start[rows, 0, None] + around, 1)
    growth.take(rows, style.contour, 1)
    for step in range(1, style.contour):
        for path, (others, own) in enumerate(((2, 4), (1, 8))):
            rows = growth.extend(rows, path * style.contour + step, others | own)
            growth.take(rows, path * style.contour + step, path)
    return rows


def _distractor(growth: _Growth, rows: np.ndarray, dash: int) -> None:
    """A short path from `dash` on, where there is room for one."""
    style, random = growth.style, growth.random
    without = rows
    for _ in range(RETRIES):
        tips = (random.random((len(without), SEEDS, 2)) * style.size).astype(np.float32)
        done = growth.seed(without, dash, tips, 3)
        for step in range(1, style.distractor):
            done = growth.extend(done, dash + step, 3)
        done = done[_untangled(growth, done, dash)]
        for step in range(style.distractor):
            growth.take(done, dash + step)
        without = np.setdiff1d(without, done, assume_unique=True)
    growth.there[without, dash : dash + style.distractor] = False


def _untangled(growth: _Growth, rows: np.ndarray, dash: int) -> np.ndarray:
    """Whether a path keeps its distance from itself."""
    shares = np.linspace(0, 1, growth.style.length + 1, dtype=np.float32)[:, None]
    apart = np.ones(len(rows), bool)
    for late in range(2, growth.style.distractor):
        start, head = growth.start[rows, dash + late], growth.head[rows, dash + late]
        points = start[:, None] + shares * (head - start)[:, None]  # [n, points, 2]
        for early in range(late - 1):
            other = growth.start[rows, dash + early], growth.head[rows, dash + early]
            near = _distance(points[..., None, 0], points[..., None, 1], *other)
            apart &= near.min((1, 2)) > 2 * growth.margins[rows] + growth.style.thickness
    return apart


def render(style: Style, scene: Scene) -> np.ndarray:
    """[N, size, size] uint8, antialiased: each pixel the mean of finer ones."""
    reach = int(np.ceil(max(style.length / 2 + style.thickness, style.radius) + 1))
    side = style.size + 2 * reach
    canvas = np.zeros((len(scene.labels), side * side), np.float32)
    for dash in range(scene.start.shape[1]):
        rows = np.flatnonzero(scene.there[:, dash])
        start, head = scene.start[rows, dash], scene.head[rows, dash]
        narrow = int(np.ceil(style.length / 2 + style.thickness + 0.5))
        _paint(canvas, style, reach, narrow, rows, start, head, style.thickness / 2, style.contrast)
    rows = np.arange(len(scene.labels))
    for disc in (0, 1):
        tip = scene.discs[:, disc]
        _paint(canvas, style, reach, reach, rows, tip, tip + np.float32(1e-3), style.radius, 1.0)
    pictures = canvas.reshape(-1, side, side)[:, reach:-reach, reach:-reach]
    return np.round(255 * pictures).astype(np.uint8)


def _paint(
    canvas: np.ndarray,
    style: Style,
    border: int,
    reach: int,
    rows: np.ndarray,
    start: np.ndarray,
    head: np.ndarray,
    half: float,
    contrast: float,
) -> None:
    """All within `half` of dashes [n, 2] of pictures `rows`, brighter of old and new."""
    fine, side = style.antialias, style.size + 2 * border
    corner = np.floor((start + head) / 2).astype(np.int32) - reach  # [n, 2]
    width = 2 * reach + 1
    within = ((np.arange(width * fine) + 0.5) / fine).astype(np.float32)
    y, x = corner[:, 0, None, None] + within[:, None], corner[:, 1, None, None] + within
    cover = np.clip((half - _distance(y, x, start, head)) * fine + 0.5, 0, 1)
    cover = cover.reshape(len(rows), width, fine, width, fine).mean((2, 4))
    pixels = border + np.arange(width)
    index = (corner[:, 0, None, None] + pixels[:, None]) * side + corner[:, 1, None, None] + pixels
    who = rows[:, None, None]
    canvas[who, index] = np.maximum(canvas[who, index], np.float32(contrast) * cover)
