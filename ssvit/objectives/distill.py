"""Implement distillation without labels: an encoder predicts the features of a frozen encoder, the teacher.

Teacher and encoder see the same view of each image (Beyer et al. 2022). The targets are standardised: dimensions of a
Vision Transformer's features differ in scale by orders of magnitude, and their mean is no information about an image.

Letters: b images, c channels, h, w pixels, y, x rows and columns of patches, d width, n training images.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.engine.randomness import uniform
from ssvit.models.encoder import Encoder, frozen, resized, scaled
from ssvit.models.encoder_options import PATCHES, POOLED
from ssvit.models.vit import ViT
from ssvit.objectives import distill_options
from ssvit.objectives.base import EMPTY, Objective, at_least_float32

_FITTED = 2048  # training images from which the means and standard deviations of the targets are computed
_EPSILON = 1e-6  # of the standard deviation


def features_of(
    encoder: Encoder, images: Tensor, names: tuple[str, ...], noise: Tensor | None = None
) -> dict[str, Tensor]:
    """Return features of the last layer.

    Args:
        encoder: The encoder.
        images: Images, (b, c, h, w), uint8 or float in [0, 1].
        names: Any of pooled and patches.
        noise: Random numbers of stochastic depth, or None.

    Returns:
        Features by name, (b, d) and (b, y, x, d).
    """
    if names == (POOLED,):  # a ViT then computes its last layer only for the pooled tokens
        return {POOLED: encoder.represent(images, depth_noise=noise)}
    outputs = encoder(images, depth_noise=noise) if isinstance(encoder, ViT) else encoder.last_layer(images)
    poolings = {POOLED: encoder.pooling, PATCHES: PATCHES}
    return {name: encoder.pooled(outputs, poolings[name], images) for name in names}


class Distill(Objective):
    """Predict the standardised features of a teacher by a head for each kind of features.

    The teacher is not a submodule, so it is not trained, saved or sharded.

    Args:
        options: Options of the objective.
        encoder: The encoder that is trained.
        images: Number of training images, n.
        teacher: The teacher; None: as in the options.

    Raises:
        UserError: The encoder or the teacher has no features of patches.
    """

    options: distill_options.Distill
    cached: Tensor

    def __init__(
        self, options: distill_options.Distill, *, encoder: Encoder, images: int, teacher: Encoder | None = None
    ) -> None:
        super().__init__(options, encoder)
        teacher = teacher or options.teacher.build()
        self._teacher = [frozen(teacher)]  # a list, so that it is not a submodule
        self.names = (POOLED, PATCHES) if options.features == "both" else (options.features,)
        blank = torch.zeros(1, encoder.channels, *encoder.image_size)
        with torch.no_grad():
            outputs = features_of(encoder.eval(), blank, self.names)
            self.grid = tuple(outputs[PATCHES].shape[1:3]) if PATCHES in outputs else None
            targets = self._targets(blank)
        encoder.train()
        self.heads = nn.ModuleDict()
        for name in self.names:
            width, target = outputs[name].shape[-1], targets[name].shape[-1]
            self.heads[name] = self._head(width, target)
            self.register_buffer(f"{name}_mean", torch.zeros(target))
            self.register_buffer(f"{name}_std", torch.ones(target))
        if options.cached:
            self.register_buffer("cached", torch.zeros(images, targets[POOLED].shape[-1], dtype=torch.float16))

    @property
    def teacher(self) -> Encoder:
        """Return the teacher."""
        return self._teacher[0]

    @property
    def metadata(self) -> dict[str, object]:
        """Return the base class's metadata and "teacher", the checksum of the teacher's checkpoint."""
        return super().metadata | {"teacher": self.teacher.origin}

    def references(self) -> Iterable[nn.Module]:
        """Return the teacher."""
        return self._teacher

    @property
    def prepared_images(self) -> int:
        """Return the images of which the teacher computes features before the first step."""
        return max(_FITTED, len(self.cached)) if self.options.cached else _FITTED

    @torch.no_grad()
    def prepare(self, batches: Iterator[Batch]) -> str:
        """Fit the standardisation of the targets to training images; with `cached`, compute all targets.

        Args:
            batches: Endless training batches.
        """
        cached = self.options.cached
        seen = torch.zeros(len(self.cached) if cached else 0, dtype=torch.bool)
        counts: dict[str, int] = dict.fromkeys(self.names, 0)
        sums = {name: torch.zeros(2, len(getattr(self, f"{name}_mean")), dtype=torch.float64) for name in self.names}
        images, repeated = 0, 0  # the second number counts from the last batch with a new image
        while images < _FITTED or (not seen.all() and repeated < len(seen)):  # unreadable images never come
            batch = next(batches)
            images += len(batch.slots)
            targets = self._targets(batch.only_view())
            if cached:
                assert batch.indices is not None
                indices = batch.indices.cpu()
                new = ~seen[indices]
                repeated = 0 if new.any() else repeated + len(new)
                self.cached[indices[new]] = targets[POOLED][new].to(self.cached.dtype)
                seen[indices] = True
            for name, target in targets.items():
                rows = target.flatten(0, -2).double().cpu()
                counts[name] += len(rows)
                sums[name] += torch.stack([rows.sum(0), rows.square().sum(0)])
        for name, (total, squares) in sums.items():
            mean = total / counts[name]
            if cached:
                self.cached[~seen] = mean.to(self.cached)
            getattr(self, f"{name}_mean").copy_(mean)
            getattr(self, f"{name}_std").copy_((squares / counts[name] - mean.square()).clamp(min=0).sqrt() + _EPSILON)
        stored = f"; stored for {int(seen.sum()):,} images" if cached else ""
        return f"distillation: targets standardised by {images:,} images{stored}"

    def sample(self, slots: Tensor, *, seed: int) -> tuple[Tensor, ...]:
        """Sample the share of each image in its mixture, (b, 1), with `mixup`."""
        return (uniform(seed, "mixup", slots, 1),) if self.options.mixup else ()

    def forward(
        self, batch: Batch, noise: tuple[Tensor, ...] = (), scheduled: Mapping[str, Tensor] = EMPTY
    ) -> dict[str, Tensor]:
        """Return the mean loss over the kinds of features, and the loss of each kind."""
        images = batch.only_view()
        if self.options.mixup:
            (share,) = noise
            images = scaled(images)
            # Each image is mixed with the image before it in the micro-batch.
            images = images.lerp(images.roll(1, 0), 1 - share.to(images.dtype)[..., None, None])
        if self.options.cached:
            assert batch.indices is not None
            targets = {POOLED: self.cached[batch.indices].float()}
        else:
            with torch.no_grad():
                targets = self._targets(images)
        outputs = features_of(self.encoder, images, self.names, self.depth_noise(batch))
        losses = {name: self._loss(name, self.heads[name](outputs[name]), targets[name]) for name in self.names}
        parts = {name: loss.detach() for name, loss in losses.items()} if len(losses) > 1 else {}
        return {"loss": torch.stack(list(losses.values())).mean(), **parts}

    def _targets(self, images: Tensor) -> dict[str, Tensor]:
        """Return the teacher's features in float32 or finer: pooled (b, d), and patches on the encoder's grid."""
        features = features_of(self.teacher, resized(images, self.teacher.image_size), self.names)
        targets = {name: at_least_float32(feature) for name, feature in features.items()}
        if self.grid is not None and targets[PATCHES].shape[1:3] != self.grid:
            patches = targets[PATCHES].movedim(-1, 1)
            # The filter has no effect on an enlarged grid and takes most of the time.
            shrinks = any(old > new for old, new in zip(patches.shape[2:], self.grid, strict=True))
            targets[PATCHES] = F.interpolate(patches, self.grid, mode="bilinear", antialias=shrinks).movedim(1, -1)
        return targets

    def _loss(self, name: str, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the mean difference of a prediction from the standardised target, (..., d) -> ()."""
        target = (target - getattr(self, f"{name}_mean")) / getattr(self, f"{name}_std")
        prediction = at_least_float32(prediction)
        if self.options.loss == "smooth_l1":
            return F.smooth_l1_loss(prediction, target)
        return 1 - F.cosine_similarity(prediction, target, dim=-1).mean()

    def _head(self, width: int, target: int) -> nn.Module:
        """Return a head (..., d) -> (..., d of the teacher)."""
        hidden = self.options.hidden
        if hidden is None:
            return nn.Linear(width, target)
        layers = {"hidden": nn.Linear(width, hidden), "gelu": nn.GELU(), "output": nn.Linear(hidden, target)}
        return nn.Sequential(OrderedDict(layers))
