"""Pathfinder pictures: two long dashed paths, short ones between them, and two discs: are both on the same path?

Rules     of the arena's sets (Linsley et al. 2018, arXiv:1805.08315; Tay et al. 2021), with their published parameters:
          two paths of 14 dashes ("paddles") begin near the middle, a given distance apart, and grow in turn; then
          distractors of 14 // 3 dashes where there is room. All positions are whole pixels: a dash ends on a circle
          around its pivot, in a direction drawn with weight cos²(continuity · turn), and keeps a margin to everything
          drawn before. One disc marks the beginning of a path, the other the end of the same or of the other path
Departs   thousands of pictures grow at once; exactly half of the labels are 1; the first dash of a distractor is
          tried at PLACES places instead of everywhere
Verified  dashes, their masks, discs and the weights of turns equal those of the public generator pixel by pixel
          (drewlinsley/pathfinder, ab9c130, which reduces 8-bit pictures); tests/data/test_contours.py compares averages
          with those of 1,500 of its pictures
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

VERSION = 3  # of the pictures: cached pictures of another version are not used
DEGREES = 360  # directions of a first dash
TRIALS = 3  # of a dash before its path is given up
RETRIES = 5  # of a distractor
PLACES = 128  # tried for a distractor's first dash
FULL = 1.8  # two masks whose sum reaches this overlap
CLEAR = 0.3  # a mask up to this leaves room for a first dash
ATTEMPTS = 32  # pictures begun at once for each one wanted: most paths run into something
GIVE_UP = 20  # attempts in a row without any picture
LEAST, CELLS = 512, 2**21  # begin at least LEAST pictures at once; more only up to CELLS pixels in all


@dataclass(frozen=True)
class Style:
    size: int
    length: int  # of a dash
    thickness: float
    margins: tuple[int, ...]  # one of them is drawn for each picture
    radius: float  # of the discs
    seed_distance: int  # between the beginnings of the two paths
    continuity: float
    contrast: float  # of the long paths' dashes; discs have 1
    distractor_contrast: float  # the brightest pixel of a picture becomes 255
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
    32: Style(32, 2, 0.5, (1,), 1.5, 7, 1.0, 2 * 0.75, 2, distractors=20 // 4),
    128: Style(128, 5, 1.5, (2, 3), 3, 20, 1.8, 0.9, 0.9, distractors=35 // 4),
}


class Scene(NamedTuple):
    """The dashes of N pictures, first those of the long paths, and the places of the discs as (row, column)."""

    margin: np.ndarray  # [N]
    place: np.ndarray  # [N, P, 2]: anchors of the dashes: the beginning of a first dash, the end of others
    stamp: np.ndarray  # [N, P]: index of the dash in Stamps
    there: np.ndarray  # [N, P]: False for a distractor that found no room
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
    labels = random.permutation(np.arange(count) % 2)
    margins = random.choice(style.margins, count)
    parts, rows = [], []
    for margin in style.margins:
        for label in (0, 1):
            wanted = np.flatnonzero((margins == margin) & (labels == label))
            missing, failures = len(wanted), 0
            while missing:
                parts.append(_attempt(style, margin, label, random, missing))
                missing -= len(parts[-1].labels)
                failures = 0 if len(parts[-1].labels) else failures + 1
                if failures == GIVE_UP:
                    raise ValueError(f"{style} leaves no room for two paths: {GIVE_UP} x {LEAST} attempts failed")
            rows.append(wanted)
    back = np.argsort(np.concatenate(rows))
    return Scene(*(np.concatenate(arrays)[back] for arrays in zip(*parts, strict=True)))


class Stamps:
    """All possible dashes at one margin, as small pictures around their anchor: DEGREES first dashes that begin there,
    then one for each direction in which a path can continue, ending there."""

    def __init__(self, style: Style, margin: int):
        length, step = style.length, style.length + margin
        self.reach = length + int(np.ceil(style.thickness)) + margin
        self.degrees = (np.arange(DEGREES) - 180) * np.pi / 180
        # the pixels on the circle that a path's next dash can end on, from its pivot
        round_ = np.arange(0, 360, 360 / (2 * step * np.pi)) * np.pi / 180
        ends = np.floor(style.size + _polar(round_, step)).astype(np.int64) - style.size
        self.ends = np.unique(ends, axis=0)  # [K, 2]
        self.ways = np.arctan2(self.ends[:, 0], self.ends[:, 1])  # [K]
        angles = np.concatenate((self.degrees, self.ways + np.where(self.ways < 0, np.pi, -np.pi)))
        lines = [self._line(style, margin, angle) for angle in angles]
        self.light, self.mask = (np.stack(arrays) for arrays in zip(*lines, strict=True))
        self.wide = _dilate(np.pad(self.mask, ((0, 0), (margin, margin), (margin, margin))), margin)
        # the pixels a first dash needs, relative to its beginning; shifted down and right by one pixel, as published
        cores = [np.argwhere(mask == 1) + 1 - self.reach for mask in self.mask[:DEGREES]]
        cores = [core[np.abs(core).max(1) <= step] for core in cores]
        # also as published: a direction only counts if its pixels would reach into the picture from all four corners
        corners = [(y, x) for y in (-1, 1) for x in (-1, 1)]
        self.first = np.array([all((core * corner >= 0).all(1).any() for corner in corners) for core in cores])
        most = max(map(len, cores))
        self.core = np.stack([np.pad(core, ((0, most - len(core)), (0, 0)), mode="edge") for core in cores])

    def _line(self, style: Style, margin: int, angle: float) -> tuple[np.ndarray, np.ndarray]:
        """A dash from the middle, and the margin around it; drawn at a higher resolution and then reduced."""
        side, fine = 2 * self.reach + 1, 2 * self.reach * style.antialias + 1
        picture = Image.new("L", (fine, fine))
        middle = self.reach * style.antialias
        end = np.ceil(middle + _polar(angle, style.length * style.antialias)).astype(int)
        width = round(style.thickness * style.antialias)
        ImageDraw.Draw(picture).line([(middle, middle), (int(end[1]), int(end[0]))], fill=255, width=width)
        around = _dilate(np.array(picture), margin * style.antialias)
        return _reduce(np.array(picture), side), _reduce(around, side)


stamps = lru_cache(Stamps)


@lru_cache
def disc(style: Style) -> np.ndarray:
    """A disc around the middle of a small picture, from 0 to 1."""
    reach = int(np.ceil(style.radius)) + 3
    at = np.arange(-reach * style.antialias, (reach + 1) * style.antialias)
    inside = at[:, None] ** 2 + at**2 <= (style.radius * style.antialias) ** 2
    return _reduce((255 * inside).astype(np.uint8), 2 * reach + 1)


def _polar(angle: np.ndarray | float, length: float) -> np.ndarray:
    return length * np.stack((np.sin(angle), np.cos(angle)), axis=-1)


def _reduce(picture: np.ndarray, side: int) -> np.ndarray:
    return np.asarray(Image.fromarray(picture).resize((side, side), Image.Resampling.LANCZOS)) / np.float32(255)


def _dilate(pictures: np.ndarray, radius: int) -> np.ndarray:
    """[..., n, n]: each pixel becomes the largest within a radius."""
    padded = np.pad(pictures, [(0, 0)] * (pictures.ndim - 2) + [(radius, radius)] * 2)
    side, out = pictures.shape[-1], np.zeros_like(pictures)
    for y in range(-radius, radius + 1):
        for x in range(-radius, radius + 1):
            if y * y + x * x <= radius * radius:
                np.maximum(out, padded[..., radius + y :, radius + x :][..., :side, :side], out=out)
    return out


def begin(style: Style, margin: int, tail: np.ndarray, angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(heads, pivots) [..., 2] of first dashes from their tails [..., 2]."""
    head = np.ceil(tail + _polar(angle, style.length)).astype(np.int64)
    return head, np.ceil(head - _polar(angle, style.length + margin)).astype(np.int64)


def step_pivot(style: Style, margin: int, pivot: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """The pivots [n, 2] of the dashes after those with `pivot` and `angle`."""
    return np.ceil(pivot + _polar(angle, style.length + 2 * margin)).astype(np.int64)


def weights(style: Style, made: Stamps, angle: np.ndarray) -> np.ndarray:
    """How likely each next direction is after dashes at an angle [n], before obstacles are considered: [n, K]"""
    turn = np.abs((made.ways - angle[:, None] + np.pi) % (2 * np.pi) - np.pi)
    return np.cos(np.minimum(style.continuity * turn, np.pi / 2)) ** 2


class _Canvas:
    """Many small pictures, with a border as wide as a stamp; reads and draws stamps by their place."""

    def __init__(self, count: int, size: int, border: int):
        self.border, self.side = border, size + 2 * border
        self.pictures = np.zeros((count, self.side, self.side), np.float32)
        self.flat = self.pictures.reshape(-1)  # one index for picture, row and column: numpy gathers it twice as fast

    @property
    def inner(self) -> np.ndarray:
        return self.pictures[:, self.border : -self.border, self.border : -self.border]

    def cells(self, rows: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Flat indices [n, ...] of places [n, ..., 2] in pictures rows [n]"""
        corner = (rows * self.side + self.border) * self.side + self.border
        return corner.reshape(-1, *[1] * (place.ndim - 2)) + place[..., 0] * self.side + place[..., 1]

    def around(self, rows: np.ndarray, place: np.ndarray, reach: int) -> np.ndarray:
        """Flat indices [n, (2 reach + 1)²] of the squares around places [n, 2]"""
        at = np.arange(-reach, reach + 1)
        return self.cells(rows, place)[:, None] + (at[:, None] * self.side + at).ravel()

    def put(self, rows: np.ndarray, place: np.ndarray, stamp: np.ndarray) -> None:
        """Draw stamps [n, side, side]; the brighter pixel wins."""
        cells = self.around(rows, place, stamp.shape[-1] // 2)
        self.flat[cells] = np.maximum(self.flat[cells], stamp.reshape(-1, cells.shape[1]))


class _Growth:
    """Pictures that grow together at one margin. A dash takes its room when the next dash of its path is placed."""

    def __init__(self, style: Style, margin: int, random: np.random.Generator, count: int):
        self.style, self.margin, self.random = style, margin, random
        self.stamps = stamps(style, margin)
        border = self.stamps.reach + margin
        self.mask, self.wide = (_Canvas(count, style.size, border) for _ in range(2))
        edge = np.ones((style.size, style.size), np.float32)
        edge[style.padding : -style.padding, style.padding : -style.padding] = 0
        self.mask.inner[:] = edge
        self.wide.inner[:] = _dilate(edge, margin)
        self.place, self.pivot = np.zeros((2, count, style.dashes, 2), np.int64)
        self.stamp = np.zeros((count, style.dashes), np.int64)
        self.angle = np.zeros((count, style.dashes))

    def take(self, rows: np.ndarray, dash: int) -> None:
        """Mark the pixels of a dash as taken."""
        self.mask.put(rows, self.place[rows, dash], self.stamps.mask[self.stamp[rows, dash]])
        self.wide.put(rows, self.place[rows, dash], self.stamps.wide[self.stamp[rows, dash]])

    def inside(self, place: np.ndarray) -> np.ndarray:
        return np.asarray(((place >= 0) & (place < self.style.size)).all(-1))

    def put(self, rows: np.ndarray, dash: int, pivot: np.ndarray, angle: np.ndarray, *at: np.ndarray) -> None:
        self.pivot[rows, dash], self.angle[rows, dash] = pivot, angle
        self.place[rows, dash], self.stamp[rows, dash] = at

    def start(self, rows: np.ndarray, dash: int, tail: np.ndarray, stamp: np.ndarray) -> np.ndarray:
        """Place a path's first dash, from tail [n, 2]; returns whether it lies inside the picture."""
        angle = self.stamps.degrees[stamp]
        head, pivot = begin(self.style, self.margin, tail, angle)
        self.put(rows, dash, pivot, angle, tail, stamp)
        return self.inside(head) & self.inside(pivot) & self.inside(tail)

    def extend(self, rows: np.ndarray, dash: int) -> np.ndarray:
        """Add dash number `dash` to paths that have all before it; returns the rows that had room for it."""
        made, style = self.stamps, self.style
        angle = self.angle[rows, dash - 1]
        pivot = step_pivot(style, self.margin, self.pivot[rows, dash - 1], angle)
        ends = pivot[:, None] + made.ends  # [n, K, 2]
        weight = weights(style, made, angle) * self.inside(ends)
        weight *= 1 - self.wide.flat[self.wide.cells(rows, np.clip(ends, 0, style.size - 1))]
        mass = weight.cumsum(1)
        able = mass[:, -1] >= 1e-4
        rows, pivot, ends, mass = rows[able], pivot[able], ends[able], mass[able]
        waiting, done = np.arange(len(rows)), np.zeros(len(rows), bool)
        chosen = np.zeros(len(rows), np.int64)
        for _ in range(TRIALS):
            if not len(waiting):
                break
            below = mass[waiting] <= (self.random.random(len(waiting)) * mass[waiting, -1])[:, None]
            pick = np.minimum(below.sum(1), len(made.ends) - 1)
            seen = self.mask.flat[self.mask.around(rows[waiting], ends[waiting, pick], made.reach)]
            free = (seen + made.mask[DEGREES + pick].reshape(len(pick), -1)).max(1, initial=0) < FULL
            chosen[waiting[free]], done[waiting[free]] = pick[free], True
            waiting = waiting[~free]
        rows, pivot, ends, chosen = rows[done], pivot[done], ends[done], chosen[done]
        self.take(rows, dash - 1)
        self.put(rows, dash, pivot, made.ways[chosen], ends[np.arange(len(rows)), chosen], DEGREES + chosen)
        return rows


def _attempt(style: Style, margin: int, label: int, random: np.random.Generator, wanted: int) -> Scene:
    """Pictures in which both long paths found room: at most as many as wanted."""
    count = max(LEAST, min(ATTEMPTS * wanted, CELLS // style.size**2))
    growth = _Growth(style, margin, random, count)
    rows = _long_paths(growth, np.arange(count))[:wanted]
    origin = random.integers(2, size=len(rows))  # which of the two paths the first disc is on
    end = origin if label else 1 - origin
    first, last = growth.place[rows, origin * style.contour], growth.place[rows, (end + 1) * style.contour - 1]
    there = np.zeros((count, style.dashes), bool)
    there[rows, : 2 * style.contour] = True
    for number in range(style.distractors):
        _distractor(growth, rows, 2 * style.contour + number * style.distractor, there)
    margins, labels = np.full(len(rows), margin), np.full(len(rows), label, np.uint8)
    discs = np.stack((first, last), axis=1)
    return Scene(margins, growth.place[rows], growth.stamp[rows], there[rows], discs, labels)


def _long_paths(growth: _Growth, rows: np.ndarray) -> np.ndarray:
    """Both long paths, one dash each in turn; returns the rows in which they found room."""
    style, random, made = growth.style, growth.random, growth.stamps
    way = random.choice(np.flatnonzero(made.first), len(rows))
    # the first dash begins near the middle of the picture, if there is room for it
    low, high = 2 * style.seed_distance, style.size - 2 * style.seed_distance
    first, last = low - made.core.min(1)[way], high - made.core.max(1)[way]  # `last` is excluded
    tail = np.floor(first + random.random((len(way), 2)) * (last - first)).astype(np.int64)
    fits = (last > first).all(1)
    fits &= growth.start(rows, 0, tail, way)
    around = np.round(tail + _polar(random.integers(360, size=len(rows)) * np.pi / 180, style.seed_distance))
    fits &= growth.start(rows, style.contour, around.astype(np.int64), random.integers(DEGREES, size=len(rows)))
    rows = rows[fits]
    for step in range(1, style.contour):
        for path in (0, style.contour):
            rows = growth.extend(rows, path + step)
    growth.take(rows, 2 * style.contour - 1)  # as published, distractors may run over the end of the first path
    return rows


def _distractor(growth: _Growth, rows: np.ndarray, dash: int, there: np.ndarray) -> None:
    """A short path whose first dash is number `dash`, where there is room."""
    style, random, made = growth.style, growth.random, growth.stamps
    without = rows
    for _ in range(RETRIES):
        way = random.integers(DEGREES, size=len(without))
        tried, way = without[made.first[way]], way[made.first[way]]
        tails = random.integers(1, style.size - 1, (len(tried), PLACES, 2))
        head, pivot = begin(style, growth.margin, tails, made.degrees[way, None])
        needed = np.clip(tails[:, :, None] + made.core[way][:, None], 0, style.size - 1)
        room = (growth.mask.flat[growth.mask.cells(tried, needed)] <= CLEAR).all(2)
        room &= growth.inside(head) & growth.inside(pivot)
        free, best = room.any(1), room.argmax(1)
        tried, way, tail = tried[free], way[free], tails[free, best[free]]
        growth.start(tried, dash, tail, way)
        # to undo paths that are given up
        before = growth.mask.pictures[tried], growth.wide.pictures[tried]
        done = tried
        for step in range(1, style.distractor):
            done = growth.extend(done, dash + step)
        growth.take(done, dash + style.distractor - 1)
        lost = np.isin(tried, done, invert=True)
        growth.mask.pictures[tried[lost]], growth.wide.pictures[tried[lost]] = before[0][lost], before[1][lost]
        there[done, dash : dash + style.distractor] = True
        without = np.setdiff1d(without, done, assume_unique=True)


def render(style: Style, scene: Scene) -> np.ndarray:
    """[N, size, size] uint8: the brighter of dashes and discs; the brightest pixel of each picture becomes 255."""
    reach = max(stamps(style, margin).reach for margin in style.margins)
    canvas = _Canvas(len(scene.labels), style.size, max(reach, len(disc(style)) // 2))
    for margin in style.margins:
        light = stamps(style, margin).light
        for dash in range(scene.there.shape[1]):
            contrast = np.float32(style.contrast if dash < 2 * style.contour else style.distractor_contrast)
            rows = np.flatnonzero(scene.there[:, dash] & (scene.margin == margin))
            canvas.put(rows, scene.place[rows, dash], contrast * light[scene.stamp[rows, dash]])
    for number in (0, 1):
        rows = np.arange(len(scene.labels))
        canvas.put(rows, scene.discs[:, number], np.broadcast_to(disc(style), (len(rows), *disc(style).shape)))
    brightest = canvas.inner.max((1, 2), keepdims=True)
    return np.floor(canvas.inner * (255 / brightest) + 0.5).astype(np.uint8)
