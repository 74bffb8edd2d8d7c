from pathlib import Path

import numpy as np
import pytest

from subquad.tasks.lra import pathfinder, tracing
from subquad.tasks.lra.contours import HARD, Scene, draw, scenes


def dash_distance(scene: Scene, i: int, a: int, b: int) -> float:
    share = np.linspace(0, 1, 21)[:, None]
    left = scene.start[i, a] + share * (scene.head[i, a] - scene.start[i, a])
    right = scene.start[i, b] + share * (scene.head[i, b] - scene.start[i, b])
    return float(np.linalg.norm(left[:, None] - right[None], axis=-1).min())


@pytest.mark.parametrize("size", [32, 128])
def test_paths_follow_the_published_parameters(size: int) -> None:
    style = HARD[size]
    scene = scenes(style, 8, seed=0, number=0)
    long = np.arange(2 * style.contour).reshape(2, -1)
    widths = np.linalg.norm(scene.head - scene.start, axis=-1)
    np.testing.assert_allclose(widths[scene.there], style.length, rtol=1e-4)
    assert scene.there[:, long.ravel()].all()
    assert scene.start[scene.there].min() > 0
    assert scene.head[scene.there].max() < size
    beginnings = np.linalg.norm(scene.start[:, 0] - scene.start[:, style.contour], axis=-1)
    np.testing.assert_allclose(beginnings, style.seed_distance, rtol=1e-3)
    whose = np.arange(style.dashes) // style.contour
    for i in range(8):
        gaps = [np.linalg.norm(scene.start[i, d + 1] - scene.head[i, d]) for path in long for d in path[:-1]]
        assert max(gaps) <= 2 * max(style.margins) + 1e-3
        there = np.flatnonzero(scene.there[i])
        for a in there:
            for b in there[there > a]:
                other = whose[a] != whose[b] or (whose[a] > 1 and (a - 28) // 4 != (b - 28) // 4)
                if other:
                    assert dash_distance(scene, i, a, b) > min(style.margins)


def test_turns_follow_the_continuity() -> None:
    style = HARD[128]
    scene = scenes(style, 6, seed=1, number=0)
    along = scene.head[:, :14] - scene.start[:, :14]
    angle = np.arctan2(along[..., 0], along[..., 1])
    turn = np.abs((np.diff(angle) + np.pi) % (2 * np.pi) - np.pi)
    assert turn.max() <= np.pi / 2 / style.continuity + 1e-3


def test_labels_say_whether_the_discs_share_a_path() -> None:
    style = HARD[32]
    scene = scenes(style, 40, seed=0, number=3)
    assert scene.labels.sum() == 20
    ends = [
        {tuple(scene.start[i, 14 * path]): path for path in (0, 1)}
        | {tuple(scene.head[i, 14 * path + 13]): path for path in (0, 1)}
        for i in range(40)
    ]
    for i in range(40):
        first, second = (ends[i][tuple(disc)] for disc in scene.discs[i])
        assert (first == second) == bool(scene.labels[i])


def test_pictures_are_the_same_for_a_seed_and_differ_between_chunks() -> None:
    style = HARD[32]
    one, again, other = (draw(style, 6, 0, number) for number in (0, 0, 1))
    assert (one[0] == again[0]).all()
    assert (one[1] == again[1]).all()
    assert not (one[0] == other[0]).all()
    assert one[0].dtype == np.uint8
    assert one[0].max() == 255
    assert 0.1 < (one[0] > 0).mean() < 0.35


@pytest.mark.parametrize(("size", "count", "right"), [(32, 12, 11), (128, 4, 4)])
def test_a_solver_without_a_network_gets_them_right(size: int, count: int, right: int) -> None:
    """97 % of small pictures and all large ones in a larger sample; what is wrong is under a disc."""
    style = HARD[size]
    pictures, labels = draw(style, count, 5, 0)
    found = np.array([tracing.solve(picture, style) for picture in pictures])
    assert (found == labels).sum() >= right


def test_the_solver_finds_the_discs() -> None:
    style = HARD[32]
    scene = scenes(style, 10, seed=2, number=0)
    from subquad.tasks.lra.contours import render

    for picture, truth in zip(render(style, scene), scene.discs, strict=True):
        found = np.stack(tracing.discs(picture, style))
        apart = np.linalg.norm(found[:, None] - truth[None], axis=-1).min(1)
        assert apart.max() < 0.2


def test_the_sheet_is_a_picture(tmp_path: Path) -> None:
    pathfinder.sheet(32, tmp_path / "sheet.png", count=7)
    assert (tmp_path / "sheet.png").read_bytes()[:4] == b"\x89PNG"
