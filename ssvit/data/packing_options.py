"""The options of writing shards."""

import os
from typing import Annotated, Self

from annotated_types import Ge, Le
from pydantic import model_validator

from ssvit.config.declaration import Count, Name, Options, Positive
from ssvit.options import OptionError, folder_to_write


class Pack(Options):
    """Shards made of a data set."""

    output: Name
    """The folder; each split gets a subfolder of it."""
    size: Count | None
    """Pixels of the shorter side to which larger images are made smaller; None: files as they are."""
    quality: Annotated[int, Ge(1), Le(100)]
    """Of the JPEGs that are written then, up to 100."""
    shard_size: Positive
    """Megabytes after which the next shard begins."""
    workers: Count
    """Threads that read and resize."""
    verify: bool
    """Whether to compare the checksums of what is there, instead of writing."""
    overwrite: bool
    """Whether shards that are there may be thrown away."""

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        output = self.output
        if self.verify:
            if not os.path.isdir(output):
                raise OptionError("output", self.output, "no such folder")
            return self
        if not os.path.isdir(os.path.dirname(os.path.abspath(output))):
            raise OptionError("output", self.output, "there is no such folder to write it into")
        folder_to_write("output", output)
        return self
