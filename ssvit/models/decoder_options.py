"""The options of a masked autoencoder's decoder."""

from ssvit.config.declaration import Count, Options
from ssvit.options import OptionError


class Decoder(Options):
    """The light Transformer of a masked autoencoder (He et al. 2022, section 3 and Table 1)."""

    depth: Count
    """Layers."""
    width: Count
    """Width of a token's embedding; a multiple of 4, since positions are sines and cosines of rows and columns."""
    heads: Count
    """Heads of attention."""

    def check_consistency(self) -> None:
        """Check the options against each other."""
        if self.width % 4:
            raise OptionError("width", self.width, "must be a multiple of 4, for sines and cosines of rows and columns")
        if self.width % self.heads:
            raise OptionError("heads", self.heads, f"must divide width={self.width}")
