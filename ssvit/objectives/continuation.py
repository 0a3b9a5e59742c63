"""Implement the continuation of pre-training from existing weights, with any objective.

A part of the encoder may be frozen or updated by matrices of low rank (ExPLoRA, Khanna et al. 2024), new heads may be
trained first, and a penalty may keep the features close to those of the initial weights.

Letters: b images, c channels, h, w pixels, n patches, d width.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.models.encoder import Encoder, frozen
from ssvit.models.vit import ViT
from ssvit.objectives import continuation_options
from ssvit.objectives.base import EMPTY, Objective, at_least_float32
from ssvit.objectives.schedule import starting_after

_ENCODER = "encoder_trained"  # scheduled value, 0 during `heads_only`


class Anchor:
    """Measure how the features of an encoder have changed since its initial weights.

    The initial encoder is not a submodule, so it is not trained, saved or sharded.

    Args:
        options: Kind of the comparison.
        encoder: The encoder with its initial weights, which is copied.
    """

    def __init__(self, options: continuation_options.Anchor, encoder: ViT) -> None:
        self.options = options
        self.initial = frozen(copy.deepcopy(encoder))

    def loss(self, encoder: ViT, images: Tensor, depth_noise: Tensor | None = None) -> Tensor:
        """Return the difference of the features, () in float32 or finer.

        Args:
            encoder: The trained encoder.
            images: Images, (b, c, h, w), uint8 or float in [0, 1].
            depth_noise: Random numbers of stochastic depth, (b, 2 * depth), or None.
        """
        with torch.no_grad():
            expected = at_least_float32(self.initial(images))
        outputs = at_least_float32(encoder(images, depth_noise=depth_noise))
        both = outputs, expected.to(outputs.dtype)
        patches, initial_patches = (F.normalize(x[:, encoder.num_prefix_tokens :], dim=-1) for x in both)
        if self.options.kind == "gram":
            with torch.autocast(patches.device.type, enabled=False):  # the loss is small differences of cosines
                return F.mse_loss(patches @ patches.mT, initial_patches @ initial_patches.mT)
        pooled, initial_pooled = (encoder.pool(x) for x in both)
        cosine = F.cosine_similarity(pooled, initial_pooled).mean() + (patches * initial_patches).sum(-1).mean()
        return 1 - cosine / 2


class Continuation(Objective):
    """Continue the training of an encoder with an objective.

    Args:
        options: Options of the continuation.
        objective: The objective, whose encoder has its initial weights and was changed by `ssvit.models.lora.restrict`.
    """

    options: continuation_options.Continuation

    def __init__(self, options: continuation_options.Continuation, *, objective: Objective) -> None:
        super().__init__()
        self.options, self.objective = options, objective
        self.anchor: Anchor | None = None
        if options.anchor is not None:
            assert isinstance(objective.encoder, ViT)  # checked by the options
            self.anchor = Anchor(options.anchor, objective.encoder)
        self.schedules = {**objective.schedules, _ENCODER: starting_after(options.heads_only)}

    @property
    def encoder(self) -> Encoder:  # type: ignore[override]  # a property, since it is a part of the objective
        """Return the encoder of the objective."""
        return self.objective.encoder

    @property
    def metadata(self) -> dict[str, object]:
        """Return the metadata of the objective, with the name of the backbone among the modules of this one."""
        return {**self.objective.metadata, **super().metadata}

    def backbone(self) -> Encoder:
        """Return the encoder that is probed and exported."""
        return self.objective.backbone()

    def references(self) -> Iterable[nn.Module]:
        """Return the encoder with its initial weights, if there is a penalty."""
        return [*self.objective.references(), *([self.anchor.initial] if self.anchor else [])]

    def measured(self) -> Objective:
        """Return the objective without the penalty."""
        return self.objective

    @property
    def prepared_images(self) -> int:
        """Return the images of the objective's preparation."""
        return self.objective.prepared_images

    def prepare(self, batches: Iterator[Batch]) -> str:
        """Fit the objective's buffers."""
        return self.objective.prepare(batches)

    def sample(self, slots: Tensor, *, seed: int) -> Any:
        """Sample the objective's random choices for the images of slots (b,)."""
        return self.objective.sample(slots, seed=seed)

    def forward(self, batch: Batch, noise: Any, scheduled: Mapping[str, Tensor] = EMPTY) -> dict[str, Tensor]:
        """Return the objective's outputs, with the penalty added to the loss."""
        outputs: dict[str, Tensor] = self.objective(batch, noise, scheduled)
        if self.anchor is None or self.options.anchor is None:
            return outputs
        assert isinstance(self.encoder, ViT)
        images = batch.views["global"][:, 0] if "global" in batch.views else batch.only_view()
        penalty = self.anchor.loss(self.encoder, images, self.depth_noise(batch))
        loss = outputs["loss"] + self.options.anchor.weight * penalty
        return {**outputs, "loss": loss, "objective": outputs["loss"].detach(), "anchor": penalty.detach()}

    def frozen(self, scheduled: Mapping[str, float]) -> Iterable[Tensor]:
        """Return the objective's frozen weights, and all weights of the encoder during `heads_only`."""
        yield from self.objective.frozen(scheduled)
        if not scheduled[_ENCODER]:
            yield from self.encoder.parameters()

    def after_step(self, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Update the objective's state that is not optimised."""
        self.objective.after_step(outputs, scheduled, applied)

    def parameter_groups(self, *, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Group the weights of the objective, with a lower learning rate for the weights of the encoder."""
        groups = self.objective.parameter_groups(weight_decay=weight_decay, layer_decay=layer_decay)
        inner, factor = set(map(id, self.encoder.parameters())), self.options.encoder_lr
        split = []
        for group in groups:
            weights: dict[bool, list[Tensor]] = {False: [], True: []}
            for weight in group["params"]:
                weights[id(weight) in inner].append(weight)
            split.append({**group, "params": weights[False]})
            split.append({**group, "params": weights[True], "share": factor * group["share"]})
        return [group for group in split if group["params"]]
