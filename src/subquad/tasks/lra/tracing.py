"""Pathfinder without a network: find the discs, follow dashes from one of them, see whether they lead to the other."""

import numpy as np

from subquad.tasks.lra.contours import DEGREES, Stamps, Style, disc, stamps, step_pivot, weights

BEAM = 400  # ways followed at once
DIM = 1.5 / 255  # by which a picture may be darker than a dash that is there
SLACK = 0.25  # by which the way to the other disc may be less likely than the likeliest, in units of cost
SURPRISE = 0.05  # cost of a dash's turn, for each unit of its negative logarithm


def solve(picture: np.ndarray, style: Style) -> int:
    """1 if a path of the style's dashes leads from one disc to the other, else 0."""
    pair = discs(picture, style)
    best = {True: np.inf, False: np.inf}  # cost of the likeliest way that ends at the other disc, or does not
    for margin in style.margins:
        for here, there in (pair, pair[::-1]):
            ends, cost = _follow(picture / 255, here, pair, style, stamps(style, margin), margin)
            arrived = (ends == there).all(1)
            for is_there in (True, False):
                best[is_there] = min(best[is_there], cost[arrived == is_there].min(initial=np.inf))
    return int(best[True] < best[False] + SLACK)


def discs(picture: np.ndarray, style: Style) -> tuple[np.ndarray, np.ndarray]:
    """The middles of the two discs, (row, column): where the picture is as bright as one, and best explained by two."""
    shape = disc(style)
    reach, size = len(shape) // 2, len(picture)
    light = np.pad(picture / 255, reach)
    beyond = np.pad(picture / 255, reach, constant_values=1)  # whatever lies there
    windows = np.lib.stride_tricks.sliding_window_view(beyond, shape.shape)
    places = np.argwhere((windows >= shape - 4 * DIM).all((2, 3)))
    # of several that fit, the two that leave the least of the brightest pixels unexplained
    bright = np.argwhere(light > style.contrast + 0.1)
    near = np.abs(bright[None] - reach - places[:, None])  # [places, pixels, 2]
    inside = (near <= reach).all(-1)
    offset = np.clip(bright[None] - places[:, None], 0, len(shape) - 1)
    covered = np.where(inside, shape[offset[..., 0], offset[..., 1]], 0)
    left = np.abs(light[tuple(bright.T)] - np.maximum(covered[:, None], covered[None])).sum(-1)
    left += size * size * np.eye(len(places))
    first, second = np.unravel_index(left.argmin(), left.shape)
    return places[first], places[second]


def _follow(
    light: np.ndarray, here: np.ndarray, pair: tuple[np.ndarray, np.ndarray], style: Style, made: Stamps, margin: int
) -> tuple[np.ndarray, np.ndarray]:
    """(where ways of all dashes of a path end that begin at a disc [W, 2], what they cost [W])"""
    size, reach = style.size, made.reach
    shown = np.pad(light, reach, constant_values=1)
    hidden = np.pad(np.zeros_like(light, dtype=bool), reach, constant_values=True)  # beyond the border, or by discs
    for y, x in pair:
        far = int(style.radius) + 1
        hidden[y + reach - far : y + reach + far + 1, x + reach - far : x + reach + far + 1] = True
    patch = np.arange(2 * reach + 1)

    def unlike(place: np.ndarray, stamp: np.ndarray) -> np.ndarray:
        """What more than dashes [n] there is where they are, or infinity where one is not: [n]"""
        dash = style.contrast * made.light[stamp]
        index = (place[:, 0, None, None] + patch[:, None], place[:, 1, None, None] + patch)
        seen, lit = shown[index], (dash > 0) & ~hidden[index]
        more = np.where(lit, seen - dash, 0)
        cost = (np.abs(more) * dash).sum((1, 2)) / dash.sum((1, 2))
        return np.where((seen >= dash - DIM).all((1, 2)), cost, np.inf)

    stamp = np.arange(DEGREES)
    angle = made.degrees
    head = np.ceil(here + style.length * np.stack((np.sin(angle), np.cos(angle)), -1)).astype(np.int64)
    pivot = np.ceil(head - (style.length + margin) * np.stack((np.sin(angle), np.cos(angle)), -1)).astype(np.int64)
    cost = unlike(np.broadcast_to(here, (DEGREES, 2)), stamp)
    place = head
    chosen = np.flatnonzero(np.isfinite(cost))
    pivot, angle, cost, place = pivot[chosen], angle[chosen], cost[chosen], place[chosen]
    for _ in range(1, style.contour):
        pivot = step_pivot(style, margin, pivot, angle)
        ends = pivot[:, None] + made.ends
        weight = weights(style, made, angle) * ((ends >= 0) & (ends < size)).all(-1)
        way, k = np.nonzero(weight > 1e-6)
        if not len(way):
            return np.zeros((0, 2), np.int64), np.zeros(0)
        found = cost[way] + unlike(ends[way, k], DEGREES + k) - SURPRISE * np.log(weight[way, k])
        order = np.argsort(found, kind="stable")
        order = order[np.isfinite(found[order])]
        states = np.concatenate((pivot[way[order]], k[order, None]), axis=1)
        _, first = np.unique(states, axis=0, return_index=True)
        order = order[np.sort(first)[:BEAM]]
        way, k = way[order], k[order]
        pivot, angle, cost, place = pivot[way], made.ways[k], found[order], ends[way, k]
    return place, cost
