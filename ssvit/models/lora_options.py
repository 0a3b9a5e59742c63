"""Define the options of low-rank adaptation."""

from typing import Literal

from ssvit.config.declaration import Count, Options, Positive


class Lora(Options):
    """Define low-rank updates of the frozen attention matrices (Hu et al. 2021): W + alpha / rank * B A."""

    rank: Count
    """Rank of the updates: columns of B and rows of A; 4 to 16 are common."""
    alpha: Positive
    """Scale of the update, which is multiplied by alpha / rank; often the rank, or twice the rank."""
    matrices: Literal["attention", "query_value"] = "attention"
    """attention: the packed matrix of queries, keys and values, and the output matrix. query_value: the matrices of
    queries and of values, each with an update of its own (ExPLoRA, Khanna et al. 2024)."""
