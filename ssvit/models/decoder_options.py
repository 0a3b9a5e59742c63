"""Define the options of the decoder of a masked autoencoder."""

from ssvit.config.declaration import Count, Options
from ssvit.errors import OptionError


class Decoder(Options):
    """Define the light Transformer decoder of a masked autoencoder (He et al. 2022, section 3 and Table 1)."""

    depth: Count
    """Number of layers."""
    width: Count
    """Width of the token embeddings; a multiple of 4, since positions are sines and cosines of rows and columns."""
    heads: Count
    """Number of attention heads."""

    def check_consistency(self) -> None:
        """Check that the options can be combined."""
        if self.width % 4:
            raise OptionError("width", self.width, "must be a multiple of 4, for sines and cosines of rows and columns")
        if self.width % self.heads:
            raise OptionError("heads", self.heads, f"must divide width={self.width}")
