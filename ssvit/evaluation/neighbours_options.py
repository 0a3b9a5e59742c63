"""Define the options of the indexes of a store."""

from ssvit.config.declaration import AtLeastTwo, Count, Options, Whole
from ssvit.errors import OptionError


class Flat(Options):
    """Search exactly, by comparison with each image of the store."""


class IVF(Options):
    """Search the nearest cells of a spherical k-means clustering, fitted to 64 images for each cell."""

    nlist: Count | None = None
    """Number of cells. None: 4 sqrt(n), as recommended by faiss for up to a million images."""
    nprobe: Count | None = None
    """Number of cells searched. None: sqrt(nlist)."""
    seed: Whole = 0
    """Seed of the k-means clustering."""

    def check_consistency(self) -> None:
        """Raise OptionError if more cells are searched than there are."""
        if self.nlist is not None and self.nprobe is not None and self.nprobe > self.nlist:
            raise OptionError("nprobe", self.nprobe, f"must be at most nlist={self.nlist}")


class HNSW(Options):
    """Search a graph of neighbours (Malkov and Yashunin 2018). Larger values increase recall and time."""

    links: AtLeastTwo = 32
    """Neighbours of an image in the graph (M in the paper; the lowest layer has twice as many)."""
    ef_construction: Count = 80
    """Candidates kept during construction."""
    ef_search: Count = 64
    """Candidates kept during search."""
