"""Solve Pathfinder without a network: find the discs and check whether dashes lead from one to the other."""

import numpy as np

from subquad.data.contours import DEGREES, Stamps, Style, begin, disc, stamps, step_pivot, weights

BEAM = 400  # paths followed at once
DIM = 1.5 / 255  # a dash may be this much darker in the picture than when drawn
SLACK = 0.25  # a path to the other disc wins if it costs at most this much more than the cheapest
SURPRISE = 0.05  # cost of a dash's turn, for each unit of its negative logarithm


def solve(picture: np.ndarray, style: Style) -> int:
    """1 if a path of the style's dashes leads from one disc to the other, else 0."""
    pair, light = discs(picture, style)
    best = {True: np.inf, False: np.inf}  # least cost of a path that ends at the other disc, or elsewhere
    for margin in style.margins:
        for here, there in (pair, pair[::-1]):
            ends, cost = _follow(light, here, pair, style, stamps(style, margin), margin)
            arrived = (ends == there).all(1)
            for is_there in (True, False):
                best[is_there] = min(best[is_there], cost[arrived == is_there].min(initial=np.inf))
    return int(best[True] < best[False] + SLACK)


def discs(picture: np.ndarray, style: Style) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """(the middles of the two discs as (row, column), the picture scaled so that a disc has 1)"""
    contrast = max(style.contrast, style.distractor_contrast)
    most = max(1.0, contrast * max(stamps(style, margin).light.max() for margin in style.margins))
    found = []
    for brightest in np.unique(picture[picture >= np.floor(255 / most)]):  # the value of a disc; a dash may be brighter
        light = picture / float(brightest)
        fits = [(float(_apart(light, place, style)), tuple(place)) for place in _places(light, style)]
        if len(fits) >= 2:
            (one, first), (two, second) = sorted(fits)[:2]
            found.append((one + two, first, second, light))
    _, first, second, light = min(found, key=lambda fit: fit[0])
    return (np.array(first), np.array(second)), light


def _places(light: np.ndarray, style: Style) -> np.ndarray:
    """Places where the picture is at least as bright as a disc."""
    shape = disc(style)
    beyond = np.pad(light, len(shape) // 2, constant_values=1)  # anything may lie beyond the border
    return np.argwhere((np.lib.stride_tricks.sliding_window_view(beyond, shape.shape) >= shape - 4 * DIM).all((2, 3)))


def _apart(light: np.ndarray, place: np.ndarray, style: Style) -> float:
    """The difference between the picture and a disc in the disc's bright pixels."""
    shape = disc(style)
    at = np.argwhere(shape > 0.5)
    inside = place + at - len(shape) // 2
    return float(np.abs(light[tuple(inside.T)] - shape[tuple(at.T)]).sum())


def _follow(
    light: np.ndarray, here: np.ndarray, pair: tuple[np.ndarray, np.ndarray], style: Style, made: Stamps, margin: int
) -> tuple[np.ndarray, np.ndarray]:
    """(the ends [W, 2] of possible paths that begin at a disc, their costs [W])"""
    size, reach = style.size, made.reach
    shown = np.pad(light, reach, constant_values=1)
    hidden = np.pad(np.zeros_like(light, dtype=bool), reach, constant_values=True)  # beyond border, under discs
    for y, x in pair:
        far = int(style.radius) + 1
        hidden[y + reach - far : y + reach + far + 1, x + reach - far : x + reach + far + 1] = True
    patch = np.arange(2 * reach + 1)

    def unlike(place: np.ndarray, stamp: np.ndarray) -> np.ndarray:
        """[n]: how much brighter than the dashes [n] the picture is there; infinity if a dash is not there"""
        dash = style.contrast * made.light[stamp]
        index = (place[:, 0, None, None] + patch[:, None], place[:, 1, None, None] + patch)
        seen, lit = shown[index], (dash > 0) & ~hidden[index]
        more = np.where(lit, seen - dash, 0)
        cost = (np.abs(more) * dash).sum((1, 2)) / dash.sum((1, 2))
        return np.where((seen >= dash - DIM).all((1, 2)), cost, np.inf)

    place, pivot = begin(style, margin, here, made.degrees)
    cost = unlike(np.broadcast_to(here, (DEGREES, 2)), np.arange(DEGREES))
    there = np.isfinite(cost)
    place, pivot, angle, cost = place[there], pivot[there], made.degrees[there], cost[there]
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
