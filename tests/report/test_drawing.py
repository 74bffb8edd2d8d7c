import io

import torch
from rich.console import Console

from subquad.report.drawing import INK, Drawing


def draw(images: torch.Tensor, width: int = 80, **how: object) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, **how).print(Drawing(images), end="")
    return file.getvalue().splitlines()


def test_without_a_terminal_ink_is_characters() -> None:
    image = torch.tensor([[[0.0, 1.0], [0.0, 1.0], [0.5, 0.0], [0.5, 0.0]]])
    assert draw(image) == [" @", f"{INK[5]} "]
    assert draw(image[:, :3]) == [" @", f"{INK[5]} "]  # an odd number of rows


def test_as_many_images_as_there_is_room_for() -> None:
    images = torch.ones(6, 24, 24)
    for width, count in ((80, 3), (160, 6), (200, 6), (40, 1), (10, 1)):
        lines = draw(images, width, no_color=True)
        if width >= 24:
            assert len(lines) == 12
            assert all(len(line) == 26 * count - 2 <= width for line in lines)


def test_in_a_terminal_two_pixels_share_a_character() -> None:
    image = torch.tensor([[[0.0], [1.0]]])
    (line,) = draw(image, force_terminal=True, color_system="truecolor")
    assert "▀" in line
    assert "38;2;0;0;0" in line
    assert "48;2;255;255;255" in line
    assert draw(image, force_terminal=True, color_system=None) == [INK[5]]  # a terminal without colours


def test_the_drawing_follows_the_images() -> None:
    images = torch.zeros(1, 2, 2)
    drawing = Drawing(images)
    images[0, :, 0] = 1
    file = io.StringIO()
    Console(file=file, width=80).print(drawing, end="")
    assert file.getvalue() == "@ \n"
