"""Windows cover an image exactly, and a window of a source is the slice of its image."""

import itertools

import numpy as np
import pytest
import torch
from images import picture, put
from PIL import Image

from ssvit.data.sources.base import Unreadable
from ssvit.data.sources.decode import load
from ssvit.data.sources.files import Files
from ssvit.data.sources.memory import Memory
from ssvit.data.windows import Windows, boxes, parsed_name
from ssvit.data.windows_options import Windowed
from ssvit.errors import OptionError


def fewest(length: int, side: int, overlap: int) -> int:
    """Count windows that are placed one after another until the border is reached."""
    count, end = 1, side
    while end < length:
        end += side - overlap
        count += 1
    return count


SIZES = [(size, overlap) for size in ((1, 1), (3, 5), (8, 8), (30, 7)) for overlap in (0, 1, 4) if overlap < min(size)]


@pytest.mark.parametrize(("size", "overlap"), SIZES)
@pytest.mark.parametrize("image", [(1, 1), (7, 30), (8, 8), (9, 16), (29, 31)])
def test_the_fewest_windows_cover_every_pixel(image, size, overlap):
    windows = [*boxes(image, size, overlap)]
    covered = np.zeros(image, int)
    for top, left, height, width in windows:
        assert (height, width) == tuple(map(min, image, size))
        assert top >= 0 <= left
        for y in range(top, top + height):
            for x in range(left, left + width):
                covered[y, x] += 1  # an IndexError beyond the border
    assert covered.min() == 1
    tops, lefts = (sorted({window[axis] for window in windows}) for axis in (0, 1))
    assert windows == sorted(windows)
    assert [(top, left) for top, left, *_ in windows] == [(top, left) for top in tops for left in lefts]
    for starts, length, side in zip((tops, lefts), image, size, strict=True):
        assert (starts[0], starts[-1]) == (0, max(0, length - side))
        assert len(starts) == (1 if length <= side else fewest(length, side, overlap))
        steps = {after - before for before, after in itertools.pairwise(starts)}
        assert all(step <= side - overlap for step in steps)
        assert not steps or max(steps) - min(steps) <= 1


def test_a_window_of_a_source_is_a_slice_of_its_image(tmp_path, monkeypatch):
    paths = [put(tmp_path / f"{number}.png", picture(number, size=(20, 24 + number))) for number in range(2)]
    broken = put(tmp_path / "broken.png", b"no image")
    source = Files([str(paths[0]), str(broken), str(paths[1])], [0, 1, 1], ("a", "b"))
    opened = []
    monkeypatch.setattr(Files, "read", lambda self, index: opened.append(index) or load(self.paths[index]))
    windows = Windows(source, (16, 16), 4)
    assert opened == [1]  # headers suffice
    assert windows.indices == [0] * 4 + [1] + [2] * 4
    assert windows.labels.tolist() == [0] * 4 + [1] * 5
    for index, (image, box) in enumerate(zip(windows.indices, windows.boxes, strict=True)):
        path, parsed = parsed_name(windows.name(index))
        assert (path, parsed) == (source.name(image), box)
        assert windows.content(index) == source.content(image)
        if image == 1:
            with pytest.raises(Unreadable, match=r"broken\.png"):
                windows.read(index)
        else:
            expected = load(path)[:, box.top : box.top + 16, box.left : box.left + 16]
            assert torch.equal(windows.read(index), expected)
    assert opened == [1, 0, 1, 2]


def test_a_large_image_is_measured_without_a_warning(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    path = put(tmp_path / "large.png", picture(0, size=(20, 24)))  # Pillow warns from 300 and fails from 600 pixels
    assert len(Windows(Files([str(path)]), (10, 8)).boxes) == 6
    assert not [warning for warning in recwarn if "bomb" in str(warning.message)]


def test_images_in_memory_have_windows():
    images = torch.randint(256, (2, 1, 5, 9), dtype=torch.uint8)
    windows = Windows(Memory(images, None), (5, 6))
    assert [windows.name(index) for index in (0, 3)] == ["image 0#xywh=0,0,6,5", "image 1#xywh=3,0,6,5"]
    assert torch.equal(windows.read(3), images[1, :, :, 3:])


@pytest.mark.parametrize("name", ["a.png", "#xywh=", "a#xywh=1,2,3", "a#xywh=1,2,3,x", "a#xywh=1,2,3,-4"])
def test_other_names_are_no_windows(name):
    assert parsed_name(name) == (name, None)


def test_an_overlap_is_less_than_a_window():
    assert Windowed(window=8, overlap=7).window == (8, 8)
    for options in ({"window": [8, 20], "overlap": 8}, {"overlap": 1}):
        with pytest.raises(OptionError, match=r"^overlap="):
            Windowed(**options)
