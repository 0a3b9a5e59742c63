"""The options of LoRA."""

from ssvit.config.declaration import Count, Options, Positive


class Lora(Options):
    """Low-rank updates of attention's frozen matrices (Hu et al. 2021): W + alpha / rank * B A."""

    rank: Count
    """Columns of B and rows of A; 4 to 16 are common."""
    alpha: Positive
    """Scale of the update, which is multiplied by alpha / rank; often the rank, or twice the rank."""
