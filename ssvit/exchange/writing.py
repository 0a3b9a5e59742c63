"""Our weights by a peer's names: the layouts read backwards.

Letters: t tokens, d width.
"""

import re

import torch
from torch import Tensor

from ssvit.exchange.layout import Layout
from ssvit.models.vit import ViT
from ssvit.objectives.classify import Classify


@torch.no_grad()
def tensors(layout: Layout, encoder: ViT, head: Classify | None = None, prefix: str = "") -> dict[str, Tensor]:
    """The peer's tensors that hold an encoder, under a prefix, and a classifier's head, without one.

    Positions of whatever kind are written as the rows (t, d) that are added, zeros where there are none.
    """
    state = encoder.state_dict()
    count = encoder.num_prefix_tokens + encoder.patches
    rows = encoder.positions[0]() if len(encoder.positions) else torch.zeros(count, encoder.width)
    state["positions.0.embedding"] = rows
    arguments = encoder.arguments
    p, q = encoder.cut
    letters = {
        "c": encoder.patch.in_features // (p * q), "p": p, "q": q, "d": encoder.width, "h": arguments["heads"],
        "k": encoder.width // arguments["heads"], "three": 3,
    }  # fmt: skip
    units = None if encoder.stem is None else arguments["stem"]["layers"]
    places = layout.places(
        depth=len(encoder.blocks),
        class_token=encoder.class_token is not None,
        distillation_token=encoder.distillation_token is not None,
        units=units,
    )
    found = {}
    for place in places:
        for name, value in place.write(state[place.ours], letters).items():
            found[prefix + (name if units else re.sub(*layout.bare, name))] = value
    if head is not None:
        own = head.state_dict()
        for place in layout.head:
            if place.ours in own:
                found |= place.write(own[place.ours], letters)
    # Copies, since safetensors writes no two tensors that share memory.
    return {name: value.detach().clone() for name, value in found.items()}
