"""Define the base class of training objectives: modules that sample random choices and compute a loss.

Letters: b images.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.errors import UserError
from ssvit.models.encoder import UNDECAYED, Encoder
from ssvit.objectives.schedule import ScheduleFunction

EMPTY: Mapping[str, Tensor] = MappingProxyType({})  # scheduled values of an objective without schedules
BACKBONE = "encoder"  # default name of the backbone in a checkpoint
VIEWS = 2  # number of global views of an image


def at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32, for softmax and losses; keep float32 and float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def two_views(batch: Batch) -> Tensor:
    """Return the two "global" views of each image, (b, 2, c, h, w).

    Raises:
        UserError: The batch does not have two global views.
    """
    views = batch.views.get("global")
    if views is None or views.shape[1] != VIEWS:
        raise UserError("data.augment: must return two global views of an image, such as two_crops or multi_crop")
    return views


def scale_gradient(x: Tensor, factor: Tensor | float) -> Tensor:
    """Return the same values with their gradient multiplied by a factor, a number or ()."""
    return x * factor + x.detach() * (1 - factor)


def mlp(widths: Sequence[int], between: Sequence[Callable[[int], nn.Module]]) -> nn.Sequential:
    """Return linear layers, with modules between any two of them.

    Importing the heads of lightly or torchvision would take as long as importing torch.

    Args:
        widths: Width of the input, of each hidden layer, and of the output.
        between: Functions that return a module for the width of a hidden layer.
    """
    layers: list[nn.Module] = []
    for width, output in pairwise(widths):
        layers += [nn.Linear(width, output), *(module(output) for module in between)]
    return nn.Sequential(*layers[: -len(between)])


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    weight_decay: float,
    *,
    layer_decay: float = 1.0,
    encoder: Encoder | None = None,
) -> list[dict[str, Any]]:
    """Group the trained parameters by learning rate and weight decay, highest layer first.

    Matrices decay; biases, norms, positions and tokens do not.

    Args:
        named_parameters: Parameters of an objective with their names.
        weight_decay: Weight decay of matrices.
        layer_decay: Factor of the learning rate for each layer further down, from the highest trained layer (Bao et al.
            2022, section 3.1).
        encoder: Encoder of the objective; parameters outside of it have the learning rate of the recipe.

    Returns:
        Groups for torch's optimisers, with `params`, `weight_decay`, `decays` (whether the group has weight decay) and
        `share` (its learning rate relative to the recipe's, layer_decay to the power of the number of layers above).
    """
    groups: dict[tuple[float, bool], list[Tensor]] = {}
    names = {} if encoder is None else {id(weight): name for name, weight in encoder.named_parameters()}
    undecayed = UNDECAYED if encoder is None else encoder.undecayed
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    above = [0] * len(trained)
    if encoder is not None and layer_decay < 1:
        above = [encoder.layers_above(names[id(weight)]) if id(weight) in names else 0 for _, weight in trained]
    untrained = min(filter(None, above), default=1) - 1
    for (name, parameter), layers in zip(trained, above, strict=True):
        is_matrix = parameter.ndim >= 2 and not any(word in name for word in undecayed)
        groups.setdefault((layer_decay ** max(layers - untrained, 0), is_matrix), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if is_matrix else 0.0, "decays": is_matrix, "share": share}
        for (share, is_matrix), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]


class Objective(nn.Module):
    """Define the base class of training objectives, including fine-tuning.

    A method consists of its code, its options and a row of `ssvit.choices`.

    An objective is constructed with its options and the argument `encoder`. If its options set `needs_target`, it also
    receives `target`; with `needs_labels`, `classes` (the class names) and `labels` (of the training images); with
    `needs_masks`, `classes` (those of the masks) and `masks` (the training images); and with `needs_image_count`,
    `images` (the number of training images).

    Attributes:
        options: Options of the objective.
        encoder: The encoder that is trained.
        schedules: Values that change with the step, by name, such as a teacher's momentum.
    """

    options: Any
    encoder: Encoder
    schedules: Mapping[str, ScheduleFunction] = MappingProxyType({})

    def __init__(self, options: Any = None, encoder: Encoder | None = None) -> None:
        """Keep the options, their schedules, and the encoder, which a subclass may also set itself.

        Raises:
            OptionError: The options do not fit the encoder.
        """
        super().__init__()
        if options is not None and encoder is not None:
            options.check_encoder(encoder.options)
            self.options, self.schedules, self.encoder = options, options.schedules, encoder

    def backbone(self) -> Encoder:
        """Return the encoder that is probed and exported."""
        return self.encoder

    def measured(self) -> "Objective":
        """Return the objective that evaluators measure: this one, or the one inside of it."""
        return self

    def references(self) -> Iterable[nn.Module]:
        """Return frozen modules that `forward` calls without gradients and that are not submodules.

        They are moved to the device and accelerated, but not trained, saved or sharded.
        """
        return ()

    @property
    def metadata(self) -> dict[str, object]:
        """Return the metadata of the model that a checkpoint stores to construct it again."""
        backbone = self.backbone()
        # The name of the backbone among the objective's modules is the prefix of its weights in a checkpoint.
        name = next(name for name, module in self.named_modules() if module is backbone)
        # Activation checkpointing does not change the weights, so a run may be resumed with or without it.
        return {
            "encoder": {key: value for key, value in backbone.arguments.items() if key != "activation_checkpointing"},
            **({} if name == BACKBONE else {"backbone": name}),
            **({} if backbone.lora is None else {"lora": backbone.lora.values()}),
        }

    @property
    def prepared_images(self) -> int:
        """Return the number of images of which `prepare` computes a forward pass."""
        return 0

    def prepare(self, batches: Iterator[Batch]) -> str:
        """Fit buffers to training images once, before the first step.

        The main process calls this in eval mode and broadcasts the buffers to all ranks, which wait for at most a day
        (`launch.timeout` does not apply). A resumed run loads them from its checkpoint.

        Args:
            batches: Endless training batches, from the first image of the run.

        Returns:
            A line for the console, "" for none.
        """
        return ""

    def sample(self, slots: Tensor, *, seed: int) -> Any:
        """Sample every random choice about the images of slots (b,).

        Args:
            slots: Slots of the images, (b,).
            seed: Seed of the run.

        Returns:
            A tuple of tensors whose first dimension is b.
        """
        return ()

    def depth_noise(self, batch: Batch, views: int = 1) -> Tensor | None:
        """Return the random numbers of the encoder's stochastic depth for a micro-batch, see `Encoder.depth_noise`.

        Without them, the encoder samples from torch's generator.
        """
        return self.encoder.depth_noise(batch.slots, seed=batch.seed, views=views)

    def forward(self, batch: Batch, noise: Any, scheduled: Mapping[str, Tensor] = EMPTY) -> dict[str, Tensor]:
        """Compute the loss of a micro-batch.

        Args:
            batch: The micro-batch.
            noise: Result of `sample` for its slots.
            scheduled: Value of each schedule at this step, ().

        Returns:
            Tensors by name: "loss" is minimised, other scalars are logged, and tensors with dimensions are passed to
            `after_step`.
        """
        raise NotImplementedError

    def frozen(self, scheduled: Mapping[str, float]) -> Iterable[Tensor]:
        """Return the parameters that an update must not change.

        Zero gradients would not suffice: weight decay would still apply, and the optimiser would count the step.

        Args:
            scheduled: Value of each schedule at this step.
        """
        return ()

    def after_step(self, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Update state that is not optimised (a teacher, a centre), once per step, after the optimiser.

        Args:
            outputs: Outputs of `forward`, averaged over micro-batches and processes.
            scheduled: Value of each schedule at this step, ().
            applied: Whether the update was applied, () bool. False if it was skipped because of a non-finite value: the
                state must not change.
        """

    def parameter_groups(self, *, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Group the trained parameters for torch's optimisers by the function `parameter_groups`.

        Args:
            weight_decay: Weight decay of matrices.
            layer_decay: Factor of the learning rate for each layer further down.

        Returns:
            Groups for torch's optimisers.
        """
        return parameter_groups(self.named_parameters(), weight_decay, layer_decay=layer_decay, encoder=self.encoder)
