"""Image files that several tests of training read."""

import pytest
import tiny
from torchvision.io import write_png


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Return a folder of the tiny pictures as PNG files."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, picture in enumerate(tiny.pictures()):
        write_png(picture, str(folder / f"{number:02}.png"))
    return folder
