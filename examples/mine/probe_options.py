"""The options of the probe."""

from ssvit.config.declaration import Options, Positive


class NearestMean(Options):
    """The class whose mean is the nearest."""

    norm: Positive = 2.0
    """The order of the norm that measures distances."""
