"""The base of a training method: a module that has an encoder, samples its random choices and computes a loss.

Letters: b images.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.models.encoder import UNDECAYED, Encoder
from ssvit.schedule import ScheduleFunction

NOTHING: Mapping[str, Tensor] = MappingProxyType({})  # the schedules of an objective that has none
BACKBONE = "encoder"  # the name of the backbone in a checkpoint that stores none


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
    encoders: Iterable[Encoder] = (),
) -> list[Group]:
    """Group the trained parameters, highest layer first. Matrices decay; biases, norms, positions and tokens do not.

    Args:
        named_parameters: Parameters of an objective with their names.
        weight_decay: Weight decay of matrices.
        layer_decay: Factor of the learning rate for each layer further down (Bao et al. 2022, section 3.1).
        encoders: Encoders of the objective; parameters outside of them have the learning rate of the highest layer.

    Returns:
        Groups for torch's optimisers. `decays`: whether a group has weight decay. `share`: its learning rate as a share
        of the recipe's, layer_decay to the power of the number of layers above.
    """
    groups: dict[tuple[float, bool], list[Tensor]] = {}
    owners = {id(one): (encoder, name) for encoder in encoders for name, one in encoder.named_parameters()}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            encoder, inner = owners.get(id(parameter), (None, name))
            undecayed = UNDECAYED if encoder is None else encoder.undecayed
            is_matrix = parameter.ndim >= 2 and not any(word in name for word in undecayed)
            above = encoder.layers_above(inner) if encoder is not None and layer_decay < 1 else 0
            groups.setdefault((layer_decay**above, is_matrix), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if is_matrix else 0.0, "decays": is_matrix, "share": share}
        for (share, is_matrix), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]


class Objective(nn.Module):
    """A way of training an encoder; fine-tuning is one too. A method is one module and one YAML file.

    An objective that learns classes has an option `classes`. It is built with their names, and with the argument
    `labels`, those of the training images.

    Attributes:
        encoder: The encoder that is trained.
        schedules: Values that change with the step, by name, such as a teacher's momentum.
        compares_images: Whether the loss of an image depends on the others of its micro-batch, so that the size of a
            micro-batch changes the loss.
    """

    options: Any
    encoder: Encoder
    compares_images: bool = False
    schedules: Mapping[str, ScheduleFunction] = MappingProxyType({})

    def __init__(self, options: Any = None, encoder: Encoder | None = None) -> None:
        """Keep the options, their schedules, and the encoder, which a subclass may also set itself.

        Raises:
            OptionError: The options do not fit the encoder.
        """
        super().__init__()
        if options is not None and encoder is not None:
            options.fits(encoder.options)
            self.options, self.schedules, self.encoder = options, options.schedules, encoder

    @property
    def encoders(self) -> Sequence[Encoder]:
        """The trained encoders, whose layers `parameter_groups` counts."""
        return (self.encoder,)

    def backbone(self) -> Encoder:
        """Return the encoder that is probed and exported."""
        return self.encoder

    @property
    def backbone_name(self) -> str:
        """The name of the backbone among the objective's modules, and so of its weights in a checkpoint."""
        backbone = self.backbone()
        return next(name for name, module in self.named_modules() if module is backbone)

    @property
    def facts(self) -> dict[str, object]:
        """What a checkpoint stores of the model, so that it can be built again."""
        # Activation checkpointing changes no bit of the weights, so a run may be resumed with it or without.
        arguments = self.backbone().arguments
        name = self.backbone_name
        return {
            "encoder": {key: value for key, value in arguments.items() if key != "activation_checkpointing"},
            **({} if name == BACKBONE else {"backbone": name}),
        }

    def prepare(self, batches: Iterator[Batch]) -> str:
        """Fit buffers to training images, once, before the first step; returns a line for the console, "" for none.

        batches: as in training, from the run's first image on, without end. The main process calls it, in eval mode,
        and the others get its buffers. A run that goes on has them from its checkpoint.
        """
        return ""

    def sample(self, slots: Tensor, *, seed: int) -> Any:
        """Every random choice about the images of slots (b,): a tuple of tensors whose first dimension is b."""
        return ()

    def depth_noise(self, batch: Batch, views: int = 1) -> Tensor | None:
        """Return the random numbers of the encoder's stochastic depth for a micro-batch, see `Encoder.depth_noise`.

        Without them, the encoder samples them from torch's generator.
        """
        return self.encoder.depth_noise(batch.slots, seed=batch.seed, views=views)

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
        """Return the trained parameters as torch's optimisers take them; see the function of this name."""
        return parameter_groups(self.named_parameters(), weight_decay, layer_decay=layer_decay, encoders=self.encoders)
