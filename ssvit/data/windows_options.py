"""Options of windows of large images (no torch)."""

from ssvit.config.declaration import Options, Pair, Whole
from ssvit.errors import OptionError


class Windowed(Options):
    """Divide large images into windows."""

    window: Pair | None = None
    """Pixels of a window, or [height, width]: larger images are divided into windows, each of which is an image; null:
    whole images."""
    overlap: Whole = 0
    """Minimum overlap of adjacent windows in pixels."""

    def check_consistency(self) -> None:
        """Check that windows are longer than their overlap."""
        if self.window is None and self.overlap:
            raise OptionError("overlap", self.overlap, "requires window=SIZE")
        if self.window is not None and self.overlap >= min(self.window):
            raise OptionError("overlap", self.overlap, f"must be less than {min(self.window)}, the side of a window")
