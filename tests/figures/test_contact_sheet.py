"""Contact sheets show complete images, frame neighbours by their class, and are limited in size."""

import pytest
import torch
from test_figures import pixels

from ssvit.figures.contact_sheet import contact_sheet, neighbour, query

COLORS = {"blue": (10, 20, 240), "yellow": (240, 240, 10), "pink": (240, 10, 240)}
GREEN, RED = (58, 157, 93), (200, 55, 45)


def plain(name: str, height: int, width: int) -> torch.Tensor:
    return torch.tensor(COLORS[name])[:, None, None].expand(3, height, width) / 255


def areas(same_class: bool | None) -> list[int]:
    """The dots of each colour in a sheet of three images, and of the frames."""
    row = [query(plain("blue", 40, 40), "$sea_"), neighbour(plain("yellow", 10, 60), 0.5, "", same_class),
           neighbour(plain("pink", 90, 30), 0.4, "", same_class)]  # fmt: skip
    sheet = pixels(contact_sheet([row]))
    return [int((abs(sheet - color).max(-1) < 12).sum()) for color in (*COLORS.values(), GREEN, RED)]


def test_images_are_whole_and_frames_do_not_cover_them():
    *images, green, red = areas(None)
    assert (images[0] / images[1], images[0] / images[2]) == pytest.approx((6, 3), rel=0.1)
    assert green == red == 0
    for same_class in (True, False):
        *framed, green, red = areas(same_class)
        assert framed == images
        assert (green > 1000, red > 1000) == (same_class, not same_class)


def test_a_sheet_has_a_maximum_size():
    image = plain("blue", 16, 16)
    rows = [[query(image, "a"), *[neighbour(image, 1.0)] * 12]] * 9
    assert pixels(contact_sheet(rows)).shape == pixels(contact_sheet([row[:11] for row in rows[:8]])).shape
