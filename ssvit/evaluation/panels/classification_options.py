"""The options of the evaluation of a classifier."""

import os
from typing import Self

from pydantic import model_validator

from ssvit.config.declaration import Count, NotNegative, Options, Whole
from ssvit.options import OptionError


class Classification(Options):
    """How a classifier is evaluated."""

    batch_size: Count = 256
    """Images classified at a time, by each process."""
    workers: Whole = 0
    """Processes that read files, for each process."""
    timeout: NotNegative = 300.0
    """Seconds to wait for a batch from these processes; 0: no limit."""
    real: str | None = None
    """A file of ImageNet's ReaL labels, which are then evaluated too (Beyer et al. 2020)."""

    @model_validator(mode="after")
    def _check_real(self) -> Self:
        if self.real is not None and not os.path.isfile(self.real):
            raise OptionError("real", self.real, "no such file; null for none")
        return self
