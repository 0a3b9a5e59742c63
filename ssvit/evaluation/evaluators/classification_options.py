"""Define the options of the evaluation of a classifier."""

import os

from ssvit.config.declaration import Count, NotNegative, Options, Whole
from ssvit.errors import OptionError


class Classification(Options):
    """Evaluate a classifier."""

    batch_size: Count = 256
    """Batch size of each process."""
    workers: Whole = 0
    """Loader processes of each process."""
    timeout: NotNegative = 300.0
    """Seconds to wait for a batch from the loader processes; 0: no limit."""
    real: str | None = None
    """File of ImageNet's ReaL labels (Beyer et al. 2020), for the metric accuracy_real; None: without it."""

    def check_consistency(self) -> None:
        """Raise OptionError unless the file of ReaL labels exists."""
        if self.real is not None and not os.path.isfile(self.real):
            raise OptionError("real", self.real, "must be a file or null")
