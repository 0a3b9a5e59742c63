"""The options of a hybrid's stem."""

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from annotated_types import Ge
from pydantic import Field

from ssvit.config.declaration import Count, Expect, Options

Epsilons = Literal["authors", "timm"]
EPSILONS = get_args(Epsilons)  # whose epsilons a hybrid's stem has
GROUPS = 32  # of channels that a hybrid's stem normalises


def stride(layers: Sequence[int]) -> int:
    """The stride of a hybrid's stem with these stages: 4 after the first, doubled by each further one."""
    return 2 ** (1 + max(len(layers), 1))


class Stem(Options):
    """The ResNet of a hybrid (section 3.1)."""

    layers: Annotated[Sequence[Count], Expect("a list, the units of each stage, as [3, 4, 9]")]
    """Units of each stage: [3, 4, 6, 3] for a ResNet-50, [] for the root alone."""
    width: Annotated[int, Ge(1), Field(multiple_of=GROUPS), Expect(f"a multiple of {GROUPS}, the groups of channels")]
    """Channels of the root; each stage doubles them."""
    epsilons: Epsilons = "authors"
    """authors: the epsilons of the authors' code; timm: those of timm, for the weights of its hybrids."""
