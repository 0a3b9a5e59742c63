"""Define the options of the command that writes shards."""

import os
from typing import Annotated

from annotated_types import Ge, Le

from ssvit.config.declaration import Count, Name, Options, Part, Positive
from ssvit.data.sources.base_options import DataSet
from ssvit.errors import OptionError, folder_to_write


class Pack(Options):
    """Write a data set as shards."""

    output: Name
    """Folder of the shards, with a subfolder for each split: train, val, test."""
    data: Part[DataSet | None] = None
    """The images: a data set, or the path of a folder."""
    size: Count | None = None
    """Shorter side in pixels to which larger images are resized, stored as JPEG; null: files are copied unchanged."""
    quality: Annotated[int, Ge(1), Le(100)] = 95
    """JPEG quality of resized images."""
    shard_size: Positive = 512
    """Size of a shard in megabytes."""
    workers: Count = 4
    """Number of threads that read and resize images."""
    overwrite: bool = False
    """Whether existing shards may be deleted."""

    def check_consistency(self) -> None:
        """Check the folder to write."""
        if not os.path.isdir(os.path.dirname(os.path.abspath(self.output))):
            raise OptionError("output", self.output, "must be in a folder that exists")
        folder_to_write("output", self.output)
