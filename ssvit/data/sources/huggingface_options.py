"""Define the options of data sets of the library `datasets`."""

import os
from importlib.util import find_spec
from typing import ClassVar

from ssvit.config.declaration import Name
from ssvit.data.sources.files_options import ImageFiles
from ssvit.data.sources.splits import AUTO
from ssvit.errors import OptionError


class HuggingFace(ImageFiles):
    """A data set of the library `datasets`, with its splits; train=auto also selects the only remaining one."""

    root: Name
    """A folder that save_to_disk wrote, a folder of Parquet files, or the name of a data set in the cache."""
    config: Name | None = None
    """The configuration, if the data set has several."""
    image: Name = AUTO
    """The name of the column of images; auto: the only one."""
    label: Name | None = AUTO
    """The name of the column of labels; auto: label, or the only column of classes; None: none. A column of lists must
    be named; an image then has several classes, or none."""
    download: bool = False
    """Whether to fetch a data set that is not in the cache from the Hugging Face Hub."""

    validated: ClassVar[bool | None] = None  # unknown before the data set is read

    def check_consistency(self) -> None:
        """Check the name of the data set and the library that reads it."""
        super().check_consistency()
        if not self.root:
            raise OptionError("root", self.root, "must name a folder, or a data set in the cache")
        if find_spec("datasets") is None:
            raise OptionError("root", self.root, "requires datasets: pip install 'ssvit[huggingface]'")
        if self.is_saved and self.config is not None:
            raise OptionError("config", self.config, "must be null: save_to_disk wrote one configuration")

    @property
    def is_saved(self) -> bool:
        """Return whether save_to_disk wrote the folder."""
        return any(os.path.isfile(os.path.join(self.root, name)) for name in ("state.json", "dataset_dict.json"))
