"""Weight decay and learning rate of each parameter, by its name and layer. No torch."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from torch import Tensor


class Group(TypedDict):
    """Parameters that share their hyper-parameters, as torch's optimisers take them."""

    params: "list[Tensor]"
    weight_decay: float
    decays: bool
    share: float


def layer_of(name: str, depth: int) -> int:
    """A parameter's layer by its name: 0 before the encoder's blocks, 1 to `depth` in them, depth + 1 after them."""
    if block := re.match(r"encoder\.blocks\.(\d+)\.", name):
        return int(block[1]) + 1
    return depth + 1 if name.startswith("encoder.norm.") or not name.startswith("encoder.") else 0


def parameter_groups(
    named_parameters: "Iterable[tuple[str, Tensor]]", weight_decay: float, *, layer_decay: float = 1.0, depth: int = 0
) -> list[Group]:
    """The trained parameters, highest layer first. Matrices decay; biases, norms, positions and tokens do not.

    `decays`: whether a group has weight decay. `share`: its learning rate as a share of the recipe's, layer_decay to
    the power of the number of layers above (Bao et al. 2022, section 3.1).
    """
    groups: dict[tuple[float, bool], list[Tensor]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and not any(word in name for word in ("positions", "token", "relative"))
            share = layer_decay ** (depth + 1 - layer_of(name, depth))
            groups.setdefault((share, is_matrix), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if is_matrix else 0.0, "decays": is_matrix, "share": share}
        for (share, is_matrix), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]
