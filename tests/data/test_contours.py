import dataclasses
from pathlib import Path

import numpy as np
import pytest

from subquad.data.contours import DEGREES, FULL, HARD, Scene, disc, draw, render, scenes, stamps, weights
from subquad.tasks.lra import pathfinder
from tests.data import tracing

# of the public generator: sums of the light and of the masks of all dashes, next directions, the likeliest after a dash
# at an angle of 0.3, directions of a first dash
PUBLISHED = {
    (32, 1): (565.740, 3261.773, 18, 0.237181, 30),
    (128, 2): (3457.990, 18076.123, 41, 0.171703, 354),
    (128, 3): (3503.541, 30604.145, 49, 0.148209, 360),
}
# averages over 1,500 pictures of 32 x 32 by the public generator
LIGHT, LIT, APART, DISTRACTORS = 20.24, 0.158, (12.84, 13.20), 1786 / 1500
ROWS = [1, 4, 8, 12, 16, 20, 24, 28, 30]
LIT_ROWS = [0.014, 0.198, 0.183, 0.204, 0.204, 0.161, 0.133, 0.154, 0.029]


def masks(scene: Scene, size: int, i: int) -> np.ndarray:
    """The pixels that each dash of picture i takes: [P, size, size]"""
    style = HARD[size]
    made = stamps(style, int(scene.margin[i]))
    reach = made.reach
    shown = np.zeros((scene.stamp.shape[1], size + 2 * reach, size + 2 * reach), np.float32)
    for dash in np.flatnonzero(scene.there[i]):
        y, x = scene.place[i, dash]
        shown[dash, y : y + 2 * reach + 1, x : x + 2 * reach + 1] = made.mask[scene.stamp[i, dash]]
    return shown[:, reach:-reach, reach:-reach]


def angles(scene: Scene, size: int, path: int) -> np.ndarray:
    """The directions of the dashes of a long path: [N, 14]"""
    style = HARD[size]
    out = []
    for margin, stamp in zip(scene.margin, scene.stamp[:, 14 * path : 14 * (path + 1)], strict=True):
        made = stamps(style, int(margin))
        out.append(np.concatenate((made.degrees, made.ways))[stamp])
    return np.stack(out)


@pytest.mark.parametrize(("size", "count"), [(32, 24), (128, 6)])
def test_paths_follow_the_published_parameters(size: int, count: int) -> None:
    style = HARD[size]
    scene = scenes(style, count, seed=0, number=0)
    assert scene.there[:, : 2 * style.contour].all()
    assert set(scene.margin) <= set(style.margins)
    assert (scene.stamp[:, [0, style.contour]] < DEGREES).all()
    assert (np.delete(scene.stamp[:, : 2 * style.contour], [0, style.contour], 1) >= DEGREES).all()
    beginnings = np.linalg.norm(scene.place[:, 0] - scene.place[:, style.contour], axis=-1)
    np.testing.assert_allclose(beginnings, style.seed_distance, atol=1)  # to whole pixels
    middle = np.abs(scene.place[:, 0] + 0.5 - size / 2).max()
    assert middle < size / 2 - 2 * style.seed_distance + style.length + 2
    for path in (0, 1):
        turn = np.abs((np.diff(angles(scene, size, path)) + np.pi) % (2 * np.pi) - np.pi)
        assert turn.max() < np.pi / 2 / style.continuity
        places = scene.place[:, 14 * path : 14 * path + 14]
        steps = np.linalg.norm(np.diff(places[:, 1:], axis=1), axis=-1)
        period = style.length + 2 * scene.margin[:, None]
        assert (steps < period + style.length + 1).all()
        assert steps.mean() == pytest.approx(period.mean(), rel=0.25)


@pytest.mark.parametrize(("size", "count"), [(32, 16), (128, 3)])
def test_paths_keep_their_margins(size: int, count: int) -> None:
    """The masks of two dashes overlap only if the later one was placed before the earlier one took its room."""
    scene = scenes(HARD[size], count, seed=1, number=0)
    for i in range(count):
        room = masks(scene, size, i)
        before = np.delete(room[:28], 13, 0).max(0)  # the end of the first path does not count
        for first in range(28, HARD[size].dashes, 4):
            assert (room[first + 1 : first + 4] + before).max() < FULL  # first dashes follow another rule
            before = np.maximum(before, room[first : first + 4].max(0))
        for a in range(28):
            for b in range(a + 1, 28):
                if abs(a % 14 - b % 14) > 1:
                    assert (room[a] + room[b]).max() < FULL


def test_labels_say_whether_the_discs_share_a_path() -> None:
    scene = scenes(HARD[32], 40, seed=0, number=3)
    assert scene.labels.sum() == 20
    for i in range(40):
        begins, ends = ([tuple(scene.place[i, 14 * path + at]) for path in (0, 1)] for at in (0, 13))
        first, second = begins.index(tuple(scene.discs[i, 0])), ends.index(tuple(scene.discs[i, 1]))
        assert (first == second) == bool(scene.labels[i])


def test_pictures_are_the_same_for_a_seed_and_differ_between_chunks() -> None:
    style = HARD[32]
    one, again, other = (draw(style, 6, 0, number) for number in (0, 0, 1))
    assert (one[0] == again[0]).all()
    assert (one[1] == again[1]).all()
    assert not (one[0] == other[0]).all()
    assert one[0].dtype == np.uint8
    assert one[0].max() == 255


def test_dashes_discs_and_turns_are_as_published() -> None:
    """Figures of the public generator. Its discs lie half a pixel above and to the left of their places."""
    light = np.round(255 * stamps(HARD[32], 1).light[180]).astype(int)  # straight to the right
    assert light[4].tolist() == [0, 0, 2, 0, 102, 135, 116, 0, 0]
    assert light.sum() == light[4].sum()
    assert np.round(255 * disc(HARD[32])).astype(int)[3:7, 3:7].tolist() == [
        [0, 28, 65, 3], [28, 228, 254, 133], [66, 255, 255, 190], [0, 132, 178, 55]
    ]  # fmt: skip
    for (size, margin), known in PUBLISHED.items():
        made = stamps(HARD[size], margin)
        turns = weights(HARD[size], made, np.array([0.3]))[0]
        found = made.light.sum(), made.mask.sum(), len(made.ends), (turns / turns.sum()).max(), made.first.sum()
        np.testing.assert_allclose(found, known, rtol=1e-4)


def test_pictures_are_on_average_as_published() -> None:
    """Compares with 1,500 pictures of the public generator with the same parameters."""
    scene = scenes(HARD[32], 600, 3, 0)
    pictures, labels = render(HARD[32], scene), scene.labels
    lit = pictures > 20
    assert pictures.mean() == pytest.approx(LIGHT, rel=0.04)
    assert lit.mean() == pytest.approx(LIT, abs=0.005)
    np.testing.assert_allclose(lit.mean((0, 2))[ROWS], LIT_ROWS, atol=0.02)
    apart = np.hypot(*(scene.discs[:, 0] - scene.discs[:, 1]).T)
    assert apart[labels == 0].mean() == pytest.approx(APART[0], abs=0.9)
    assert apart[labels == 1].mean() == pytest.approx(APART[1], abs=0.9)
    assert scene.there[:, 28::4].sum(1).mean() == pytest.approx(DISTRACTORS, abs=0.12)


@pytest.mark.parametrize(("size", "count", "right"), [(32, 100, 95), (128, 6, 6)])
def test_a_solver_without_a_network_gets_them_right(size: int, count: int, right: int) -> None:
    """98 % of 600 small pictures and all large ones; in the others two paths touch."""
    style = HARD[size]
    pictures, labels = draw(style, count, 5, 0)
    found = np.array([tracing.solve(picture, style) for picture in pictures])
    assert (found == labels).sum() >= right


@pytest.mark.parametrize("size", [32, 128])
def test_the_solver_finds_the_discs(size: int) -> None:
    scene = scenes(HARD[size], 10, seed=2, number=0)
    for picture, truth in zip(render(HARD[size], scene), scene.discs, strict=True):
        found = np.stack(tracing.discs(picture, HARD[size])[0])
        assert sorted(found.tolist()) == sorted(truth.tolist())


def test_the_sheet_is_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    pathfinder.sheet(pathfinder.Pathfinder(train=8, held_out=2), tmp_path / "sheet.png", count=7)
    assert (tmp_path / "sheet.png").read_bytes()[:4] == b"\x89PNG"


def test_a_picture_too_small_for_its_paths_says_so() -> None:
    with pytest.raises(ValueError, match="no room"):
        draw(dataclasses.replace(HARD[32], size=16), 2, 0, 0)
