"""The options of the indexes of a store."""

from typing import Annotated, Self

from annotated_types import Ge
from pydantic import model_validator

from ssvit.config.choices import choice
from ssvit.config.declaration import Count, Options, Whole
from ssvit.options import OptionError


@choice("index", "flat")
class Flat(Options):
    """Exact search: a query is compared with every image of the store."""


@choice("index", "ivf")
class IVF(Options):
    """Search in the nearest cells of a spherical k-means on 64 images a cell."""

    nlist: Count | None = None
    """Number of cells; null: 4 sqrt(n), as faiss advises for up to a million images."""
    nprobe: Count | None = None
    """Number of cells that are searched; null: sqrt(nlist)."""
    seed: Whole = 0
    """Seed of the images from which the cells are made."""

    @model_validator(mode="after")
    def _check_cells(self) -> Self:
        if self.nlist is not None and self.nprobe is not None and self.nprobe > self.nlist:
            raise OptionError("nprobe", self.nprobe, f"must be at most nlist={self.nlist}")
        return self


@choice("index", "hnsw")
class HNSW(Options):
    """Search in a graph of neighbours (Malkov and Yashunin 2018). Larger values are slower and more exact."""

    links: Annotated[int, Ge(2)] = 32
    """Neighbours of an image (the paper's M; the lowest layer has twice as many)."""
    ef_construction: Count = 80
    """Candidates kept while the graph is built."""
    ef_search: Count = 64
    """Candidates kept while it is searched."""
