"""Define the options of the first look at a set of images. No torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ssvit.checkpoints.run_folder import RunFolder
from ssvit.config.declaration import Count, Expect, Name, Part, Runs, Seconds
from ssvit.data.sources.base_options import DataSet
from ssvit.devices import Inference
from ssvit.errors import OptionError, folder_to_write

DOWNLOAD = "timm:vit_small_patch14_dinov2.lvd142m"  # Apache-2.0, 22 million weights
_LISTED = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class Try(Inference):
    """Describe a set of images, and measure raw pixels, existing weights and a short pre-training on them."""

    data: Part[DataSet | None] = None
    """The images. data=PATH is short for data=folder data.root=PATH."""
    weights: Annotated[Sequence[Name], _LISTED, Expect("a path, or a list of them")] | None = None
    """Existing weights, as for checkpoint=PATH, or a list of them; []: none. None: files of up to
    400 MB in the caches of Hugging Face, timm and torch."""
    download: bool = False
    """Whether to download timm's vit_small_patch14_dinov2.lvd142m (88 MB, Apache-2.0) and measure it too."""
    stages: Literal["all", "images"] = "all"
    """all: every stage. images: the first one alone, which then checks every file and writes kept.csv, a table for
    data=csv without the defective files that report.html lists."""
    budget: Seconds = Field("10min", validate_default=True)
    """CPU time of all stages: seconds, or 90s, 10min, 1h."""
    train_images: Count = 1000
    """Maximum number of training images of each measurement, balanced over the classes."""
    test_images: Count = 500
    """Maximum number of test images, or of validation images without a test set."""
    name: Name | None = None
    """Folder of the results within outputs. None: try_ and the name of the folder of images."""
    outputs: Runs = "outputs"
    """Folder of all runs."""

    @property
    def path(self) -> str:
        """Return the path of the images: of their table, or of their folder."""
        return str(getattr(self.data, "table", None) or getattr(self.data, "root", ""))

    @property
    def folder(self) -> Path:
        """Return the folder of the results."""
        return Path(self.outputs, self.name or f"try_{Path(self.path).resolve().stem}")

    def check_consistency(self) -> None:
        """Check that there are images, and that the folder of the results can be written."""
        if not self.path:
            raise OptionError("data", None, "must be a folder of images, as in ssvit try PATH")
        RunFolder(self.outputs, self.name or self.folder.name)
        folder_to_write("outputs", self.folder)
