"""The base of a training method: a module that has an encoder, samples its random choices and computes a loss.

Letters: b images.
"""

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.models.encoder import UNDECAYED, Encoder
from ssvit.schedule import ScheduleFunction

NOTHING: Mapping[str, Tensor] = MappingProxyType({})  # the schedules of an objective that has none


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision as float32, for softmax and losses; anything finer as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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


class Objective(nn.Module):
    """A way of training an encoder; fine-tuning is one too. A method is one module and one YAML file.

    schedules: the numbers that change with the step, by name, such as a teacher's momentum. backbone_name: of the
    module that is probed and exported, also in a checkpoint. compares_images: whether the loss of an image depends on
    the others of its micro-batch, so that the size of a micro-batch changes the loss.

    An objective that learns classes has an option `classes`. It is built with their names, and with the argument
    `labels`, those of the training images.
    """

    encoder: Encoder
    backbone_name: str = "encoder"
    compares_images: bool = False
    schedules: Mapping[str, ScheduleFunction] = MappingProxyType({})

    def backbone(self) -> Encoder:
        """The encoder that is probed and exported."""
        return attrgetter(self.backbone_name)(self)

    @property
    def facts(self) -> dict[str, object]:
        """What a checkpoint says of the model, so that it can be built again."""
        # Activation checkpointing changes no bit of the weights, so a run may go on with it or without.
        own = {name: value for name, value in self.backbone().arguments.items() if name != "activation_checkpointing"}
        return {"encoder": own} | ({} if self.backbone_name == "encoder" else {"backbone": self.backbone_name})

    def prepare(self, batches: Iterator[Batch]) -> str:
        """Fit buffers to training images, once, before the first step; returns a line for the console, "" for none.

        batches: as in training, from the run's first image on, without end. The main process calls it, in eval mode,
        and the others get its buffers. A run that goes on has them from its checkpoint.
        """
        return ""

    def sample(self, slots: Tensor, *, seed: int) -> Any:
        """Every random choice about the images of slots (b,): a tuple of tensors whose first dimension is b."""
        return ()

    def forward(self, batch: Batch, noise: Any, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """The loss of a micro-batch. noise: from `sample`. scheduled: this step's value of each schedule, ().

        "loss" is minimised, other single numbers are logged, and tensors with dimensions go to `after_step` alone.
        """
        raise NotImplementedError

    def frozen(self, scheduled: Mapping[str, float]) -> Iterable[Tensor]:
        """The parameters that an update leaves as they are. scheduled: the step's value of each schedule.

        Gradients of zero alone would not do that: weight decay goes on, and so does the optimiser's count of steps.
        """
        return ()

    def after_step(self, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Change what is no weight (a teacher, a centre), once for each update, after the optimiser.

        outputs: of `forward`, the mean over micro-batches and processes. applied: () bool; false where the update was
        skipped since something was not finite: then nothing may change.
        """

    def parameter_groups(self, *, weight_decay: float, layer_decay: float) -> list[Group]:
        """The parameters to train as torch's optimisers take them; see the function of this name."""
        return parameter_groups(self.named_parameters(), weight_decay, layer_decay=layer_decay, encoder=self.backbone())
