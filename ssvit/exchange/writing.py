"""Convert weights to the tensor names of another project, by its layout.

Letters: t tokens, d width.
"""

import re

import torch
from torch import Tensor

from ssvit.exchange.layout import OPTIONAL, Layout
from ssvit.models.vit import ViT
from ssvit.objectives.classify import Classify


@torch.no_grad()
def tensors(layout: Layout, encoder: ViT, head: Classify | None = None, prefix: str = "") -> dict[str, Tensor]:
    """Return the peer's tensors of an encoder and of a classifier's head.

    Positions of any kind are exported as the rows (t, d) that are added, zeros if there are none. If the layout has
    rows for registers, these are zeros.

    Args:
        layout: Layout of the peer.
        encoder: The encoder.
        head: The classifier; None without one.
        prefix: Prefix of the encoder's names, which is not added to those of the head.
    """
    state = encoder.state_dict()
    zeros = torch.zeros(
        int("class_token" in state) + int("distillation_token" in state) + encoder.patches, encoder.width
    )
    rows = encoder.positions[0]() if len(encoder.positions) else zeros
    state["positions.0.embedding"] = encoder.around_registers(rows) if layout.places_registers else rows
    arguments = encoder.arguments
    p, q = encoder.cut
    letters = {
        "c": encoder.patch.in_features // (p * q), "p": p, "q": q, "d": encoder.width, "h": arguments["heads"],
        "k": encoder.width // arguments["heads"], "three": 3, "two": 2,
    }  # fmt: skip
    units = None if encoder.stem is None else arguments["stem"]["layers"]
    absent = [name for name in OPTIONAL if name.format(i=0) not in state]
    places = layout.places(depth=len(encoder.blocks), absent=absent, units=units)
    written = {}
    for place in places:
        for name, value in place.write(state[place.ours], letters).items():
            written[prefix + (name if units else re.sub(*layout.bare, name))] = value
    heads = {} if head is None else head.state_dict()
    for place in layout.head:
        if place.ours in heads:
            written |= place.write(heads[place.ours], letters)
    # Copies, since safetensors rejects tensors that share memory.
    return {name: value.detach().clone() for name, value in written.items()}
