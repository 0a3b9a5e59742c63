"""Implement classification, for fine-tuning and supervised pre-training, which differ only in the head (section 3.1).

An encoder with a distillation token has a second head, applied to that token's output (DeiT, Touvron et al. 2021).

Letters: b images, c channels, d width, k classes.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.data.sources.base import is_multi_label
from ssvit.engine import private
from ssvit.errors import OptionError, UserError
from ssvit.models import lora
from ssvit.models.block import lecun_normal_
from ssvit.models.encoder import Encoder, frozen, resized
from ssvit.models.vit import ViT
from ssvit.objectives import classify_options
from ssvit.objectives.base import EMPTY, Objective, at_least_float32


def balanced(labels: Tensor, classes: int) -> list[float]:
    """Return balanced class weights for the labels of the training images.

    Args:
        labels: Labels, (n,) int64, or (n, k) bool for multi-label classification.
        classes: Number of classes, k.

    Returns:
        For each class, n / (k * number of its images), or for multi-label classification the number of images without
        the class divided by the number with it; 0 for a class without images.
    """
    if is_multi_label(labels):
        return [(len(labels) - count) / count if count else 0.0 for count in labels.sum(0).tolist()]
    return [len(labels) / (classes * count) if count else 0.0 for count in labels.bincount(minlength=classes).tolist()]


class Distillation:
    """Learn the predictions of a trained classifier, the teacher (Hinton et al. 2015; DeiT, Touvron et al. 2021).

    The teacher is not a submodule, so it is not trained, saved or sharded.

    Args:
        options: Options of the loss.
        teacher: The trained classifier.
    """

    def __init__(self, options: classify_options.Distillation, teacher: "Classify") -> None:
        self.options = options
        self.teacher = teacher.requires_grad_(False).eval()
        frozen(teacher.encoder)

    def check(self, encoder: Encoder, classes: Sequence[str]) -> None:
        """Check that the teacher fits the encoder's images and the classes.

        Args:
            encoder: The encoder that is trained.
            classes: Its classes, in order.

        Raises:
            UserError: The teacher is a multi-label classifier, or has other channels, other classes or another order of
                them.
        """
        if self.teacher.options.loss == classify_options.MULTI_LABEL:
            raise UserError("distillation.teacher: must have been trained with one class for each image")
        channels = self.teacher.encoder.channels
        if channels != encoder.channels:
            expected = f"must have images of {encoder.channels} channels, as this encoder, not of {channels}"
            raise UserError(f"distillation.teacher: {expected}")
        if self.teacher.classes != tuple(classes):
            actual, expected = (", ".join(names[:10]) for names in (self.teacher.classes, classes))
            raise UserError(f"distillation.teacher: must have the classes {expected}, in this order, not {actual}")

    def loss(self, logits: Tensor, images: Tensor) -> Tensor:
        """Return the mean loss of a student's logits against the teacher's predictions.

        hard: cross-entropy with the teacher's most probable class. soft: temperature^2 * KL(teacher || student), both
        softened by the temperature; the factor keeps the gradients at the scale of those of labels (Hinton et al. 2015,
        section 2).

        Args:
            logits: Logits of the student, (b, k).
            images: Images, (b, c, h, w), which are resized to the teacher's image size.

        Returns:
            The loss, ().
        """
        with torch.no_grad():
            teacher_logits = self.teacher.logits(resized(images, self.teacher.encoder.image_size))
        if self.options.kind == "hard":
            return F.cross_entropy(logits, teacher_logits.argmax(1))
        temperature = self.options.temperature
        student, teacher = (F.log_softmax(x / temperature, 1, dtype=logits.dtype) for x in (logits, teacher_logits))
        return temperature**2 * F.kl_div(student, teacher, reduction="sum", log_target=True) / len(logits)


class Classify(Objective):
    """Train a classifier by cross-entropy with the labels and, with a teacher, with its predictions.

    The head's last layer is initialised with zero weights, as in the authors' code.

    Args:
        options: Options of the classifier; `classes` must be set here or by the argument.
        encoder: The encoder.
        classes: Class names; None: as in the options.
        labels: Labels of the training images, as a `Source` has them, which determine class_weights=balanced and the
            loss for multi-label classification. None for a classifier that is not trained.
        teacher: The teacher; None: as in the options.

    Raises:
        UserError: The teacher fits neither the images nor the classes.
        OptionError: An option does not fit the encoder or the labels.
    """

    class_weights: Tensor | None

    def __init__(
        self,
        options: classify_options.Classify,
        *,
        encoder: Encoder,
        classes: Sequence[str] | None = None,
        labels: Tensor | None = None,
        teacher: "Classify | None" = None,
    ) -> None:
        options = options if classes is None else options.changed(classes=classes)
        if labels is not None and is_multi_label(labels):
            options = options.changed(loss=classify_options.MULTI_LABEL)
        elif labels is not None:
            options.check_labels(multi_label=False)
        super().__init__(options, encoder)
        assert options.classes is not None
        self.classes = tuple(options.classes)
        by_width = encoder.width if isinstance(encoder, ViT) else None
        self.hidden = by_width if options.hidden == "width" else options.hidden
        self.distillation: Distillation | None = None
        if options.distillation is not None:
            if teacher is None:
                assert options.distillation.teacher is not None  # the command line requires it
                teacher = options.distillation.teacher.build()
            self.distillation = Distillation(options.distillation, teacher)
            self.distillation.check(encoder, self.classes)
        weights = None
        if options.class_weights is not None:
            if labels is None:
                raise OptionError("class_weights", options.class_weights, "requires the labels of the training images")
            weights = torch.tensor(balanced(labels, len(self.classes)), dtype=torch.float64)
        self.register_buffer("class_weights", weights, persistent=False)
        self.head = self._head()
        self.distilled_head = None if encoder.distillation_token is None else self._head()
        self.mixing: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        if options.mixup or options.cutmix:
            from torchvision.transforms import v2

            transforms = [(v2.MixUp, options.mixup), (v2.CutMix, options.cutmix)]
            mixing = [transform(alpha=alpha, num_classes=len(self.classes)) for transform, alpha in transforms if alpha]
            self.mixing = v2.RandomChoice(mixing) if len(mixing) == 2 else mixing[0]
        lora.restrict(encoder, options.trained, options.lora)

    def references(self) -> Iterable[nn.Module]:
        """Return the teacher, if any."""
        return [] if self.distillation is None else [self.distillation.teacher]

    @property
    def metadata(self) -> dict[str, object]:
        """Return the base class's metadata, "classifier" (options of the heads) and the checksum of the teacher."""
        classifier = {"classes": list(self.classes), "hidden": self.hidden, "loss": self.options.loss}
        teacher = {} if self.distillation is None else {"teacher": self.distillation.teacher.encoder.origin}
        return super().metadata | {"classifier": classifier, **teacher}

    def logits(self, images: Tensor) -> Tensor:
        """Return the mean of the heads' logits (DeiT), in float32 or finer: (b, c, h, w) -> (b, k)."""
        return torch.stack(self.head_logits(images)).mean(0)

    def head_logits(self, images: Tensor, depth_noise: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the logits of each head, the class head first.

        Args:
            images: Images, (b, c, h, w).
            depth_noise: Random numbers of stochastic depth, (b, 2 * depth), or None.

        Returns:
            One or two tensors (b, k), in float32 or finer.
        """
        if self.distilled_head is None:
            return (at_least_float32(self.head(self.encoder.represent(images, depth_noise=depth_noise))),)
        assert isinstance(self.encoder, ViT)  # only a ViT has a distillation token
        outputs = self.encoder(images, depth_noise=depth_noise)
        logits = self.head(self.encoder.pool(outputs)), self.distilled_head(outputs[:, 1])
        return tuple(at_least_float32(x) for x in logits)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities of the classes from logits: (b, k) -> (b, k); multi-label ones need not sum to 1."""
        return logits.sigmoid() if self.options.loss == classify_options.MULTI_LABEL else logits.softmax(-1)

    def forward(self, batch: Batch | Tensor, noise: Any = (), scheduled: Mapping[str, Tensor] = EMPTY) -> Any:
        """Return the mean loss and the accuracy; the label of a mixed image is the class with the larger share.

        For multi_label, "exact_match" replaces the accuracy: the fraction of images whose classes are all predicted
        correctly.

        With loss=binary, each class is predicted independently. As in timm, its target is its share of the image,
        smoothed: (1 - label_smoothing) * share + label_smoothing / k; with target_threshold, it is 1 if this value
        exceeds the threshold, and otherwise 0.

        Class weights multiply the loss of an image, with or without label smoothing, and for a mixed image the share of
        each label. The loss is averaged over images, as without weights, so that micro-batches sum to the batch. (torch
        divides by the sum of the weights, and weights each class over which a smoothed label is spread.)

        Without a teacher, all heads learn the labels. With a teacher, the last head learns its predictions and the
        first head the labels; without a distillation token both are the same head.

        Args:
            batch: Micro-batch with labels; or in eval mode images (b, c, h, w).
            noise: Not used.
            scheduled: Not used.

        Returns:
            Loss and metric by name, or for images in eval mode their `logits`, (b, k).

        Raises:
            UserError: The images have no labels.
        """
        if isinstance(batch, Tensor) and not self.training:
            return self.logits(batch)
        if isinstance(batch, Tensor) or batch.labels is None:
            raise UserError("objective: classification requires labels, which these images do not have")
        images, labels = batch.only_view(), batch.labels
        if self.training and self.mixing is not None:
            images, labels = self._mix(images, labels)
        logits = self.head_logits(images, self.depth_noise(batch))
        if self.distillation is None:
            loss = torch.stack([self._loss(x, labels) for x in logits]).mean()
        else:
            distilled, weight = self.distillation.loss(logits[-1], images), self.distillation.options.weight
            loss = (1 - weight) * self._loss(logits[0], labels) + weight * distilled
        with torch.no_grad():
            mean = torch.stack(logits).mean(0)
            if self.options.loss == classify_options.MULTI_LABEL:
                return {"loss": loss, "exact_match": ((mean > 0) == (labels > 0.5)).all(1).float().mean()}
            truth = labels if labels.ndim == 1 else labels.argmax(1)
            accuracy = (mean.argmax(1) == truth).float().mean()
        return {"loss": loss, "accuracy": accuracy}

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of the logits (b, k) for labels (b,) or shares (b, k)."""
        weights = None if self.class_weights is None else self.class_weights.to(logits.dtype)
        if labels.ndim == 2:
            labels = labels.to(logits.dtype)
        if self.options.loss == classify_options.MULTI_LABEL:
            loss = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weights, reduction="sum")
            return loss / len(logits)
        smoothing = self.options.label_smoothing
        factors = None if weights is None else weights[labels] if labels.ndim == 1 else labels @ weights
        if self.options.loss == classify_options.BINARY:
            shares = labels if labels.ndim == 2 else F.one_hot(labels, logits.shape[1]).to(logits.dtype)
            targets = (1 - smoothing) * shares + smoothing / logits.shape[1]
            if (threshold := self.options.target_threshold) is not None:
                targets = (targets > threshold).to(logits.dtype)
            losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
            return (losses if factors is None else losses * factors).mean()
        if factors is None:
            return F.cross_entropy(logits, labels, label_smoothing=smoothing)
        loss = F.cross_entropy(logits, labels, weights, reduction="sum")
        if smoothing:
            spread = -(factors * logits.log_softmax(1).mean(1)).sum()
            loss = (1 - smoothing) * loss + smoothing * spread
        return loss / len(logits)

    # Excluded from the compiled graph, which would be recompiled for the mixing ratio of each step.
    @private.excluded_from_graphs
    def _mix(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mix each image with another one: images in [0, 1] (b, c, h, w) and labels as shares of the classes (b, k).

        The shares are sampled from torch's global generator, which the training loop seeds from the step and the
        process.
        """
        if images.dtype == torch.uint8:
            images = images / 255
        assert self.mixing is not None
        return self.mixing(images, labels)

    def _head(self) -> nn.Module:
        """Return a head (b, d) -> (b, k) with zero last weights and a LeCun-normal hidden layer, like the authors."""
        width, hidden = self.encoder.width, self.hidden
        output = nn.Linear(hidden or width, len(self.classes))
        nn.init.zeros_(output.weight)
        nn.init.zeros_(output.bias)
        if hidden is None:
            return output
        first = nn.Linear(width, hidden)
        lecun_normal_(first.weight)
        nn.init.zeros_(first.bias)
        return nn.Sequential(OrderedDict(hidden=first, tanh=nn.Tanh(), output=output))
