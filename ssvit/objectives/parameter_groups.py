"""Weight decay and learning rate of each parameter, by its name and layer."""

from collections.abc import Iterable
from typing import TypedDict

from torch import Tensor

from ssvit.models.encoder import UNDECAYED, Encoder


class Group(TypedDict):
    """Parameters that share their hyper-parameters, as torch's optimisers take them."""

    params: list[Tensor]
    weight_decay: float
    decays: bool
    share: float


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    weight_decay: float,
    *,
    layer_decay: float = 1.0,
    encoder: Encoder | None = None,
) -> list[Group]:
    """The trained parameters, highest layer first. Matrices decay; biases, norms, positions and tokens do not.

    encoder: its parameters are those whose names begin with "encoder."; None: all stand in one layer. `decays`: whether
    a group has weight decay. `share`: its learning rate as a share of the recipe's, layer_decay to the power of the
    number of layers above (Bao et al. 2022, section 3.1).
    """
    groups: dict[tuple[float, bool], list[Tensor]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            part, _, inner = name.partition(".")
            within = encoder if part == "encoder" else None
            undecayed = UNDECAYED if within is None else within.undecayed
            is_matrix = parameter.ndim >= 2 and not any(word in name for word in undecayed)
            above = within.layers_above(inner) if within is not None and layer_decay < 1 else 0
            groups.setdefault((layer_decay**above, is_matrix), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if is_matrix else 0.0, "decays": is_matrix, "share": share}
        for (share, is_matrix), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]
