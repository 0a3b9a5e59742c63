"""Probe frozen patch features by attention pooling, followed by a linear classifier.

It measures information that mean pooling over the patches dilutes. The head is that of CAPI (Darcet et al. 2025,
eval_classification.py): a learned query attends to the patches, heads are 64 wide, and the classifier is the only layer
after the pooling. There is no augmentation, because features are computed once. The successors of I-JEPA use a full
transformer block instead (Bardes et al. 2024).

Shapes use b images of a batch, n patches, d width, h heads, e width of a head, k classes, r classifiers of the grid.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssvit.data.sources.base import is_multi_label
from ssvit.evaluation.features import Features
from ssvit.evaluation.probes import attentive_options
from ssvit.evaluation.probes.base import Result
from ssvit.evaluation.probes.linear import Linear, LinearScores, best, result, score
from ssvit.evaluation.probes.sgd import batches
from ssvit.options import UserError
from ssvit.randomness import key

_HEAD = 64  # width of a head
_DEVIATION = 0.02  # standard deviation of the initial weights
_WARMUP = 0.1  # fraction of the steps
_IMAGES = 256  # batch size without training


class Attentive(attentive_options.Attentive, Linear):
    """Train an attention pooling and a classifier for each learning rate and weight decay, on the same batches."""

    name: ClassVar[str] = "attentive"
    features: ClassVar[str] = "patches"
    half: ClassVar[bool] = True

    @property
    def most_images(self) -> tuple[int | None, int | None]:
        """Return the maximum number of training and of test images."""
        return self.train_images, self.test_images

    def __call__(self, train: Features, test: Features, *, choose: bool = False) -> Result:
        """Return the accuracy on the training, validation and test images, one column for each."""
        trained, held_out = self.split(train, test)
        grid = list(product(map(float, self.learning_rates), map(float, self.weight_decays)))
        scaled = Scaled.of(train.values, trained, self.standardize)
        labels = train.known_labels.to(train.values.device)
        generator = torch.Generator().manual_seed(key(self.seed, "attentive probe"))
        heads = Heads(train.values.shape[-1], len(train.classes), count=len(grid), generator=generator)
        heads.to(train.values.device)
        order = batches(len(trained), batch_size=self.batch_size, epochs=self.epochs, seed=self.seed)
        steps = self.epochs * math.ceil(len(trained) / self.batch_size)
        shown = ((scaled(train.values, rows), labels[rows]) for rows in map(trained.__getitem__, order))
        with torch.enable_grad():
            self._train(heads, grid, shown, steps)

        def scored(of: Features, rows: Tensor, which: Sequence[int]) -> LinearScores:
            """Score the classifiers `which` on the images at `rows`."""
            parts = (heads(scaled(of.values, part), which).movedim(0, 2) for part in rows.split(_IMAGES))
            return score(parts, of.known_labels.to(of.values.device)[rows])

        with torch.no_grad():
            validated = scored(train, held_out, range(len(grid)))
            chosen = best(validated)
            if validated.losses[chosen] == math.inf:
                raise UserError("no learning rate led to a finite loss: try smaller ones, or standardize=true")
            on_train = scored(train, trained, [chosen])
            on_test = scored(test, torch.arange(len(test.values)), [chosen])
        numbers: dict[str, object] = dict(zip(("learning_rate", "weight_decay"), grid[chosen], strict=True))
        numbers |= {"grid": grid, "validation_grid": validated.accuracies}
        return result(on_train, validated, on_test, chosen, held_out, numbers)

    def _train(
        self, heads: "Heads", grid: Sequence[tuple[float, float]], shown: Iterator[tuple[Tensor, Tensor]], steps: int
    ) -> None:
        """Train by AdamW with a linear warm-up over a tenth of the steps and a cosine decay to 0."""
        groups = []
        for place, (rate, decay) in enumerate(grid):
            for group, weight_decay in ((heads.weights, decay), (heads.biases, 0.0)):
                parameters = [of_grid[place] for of_grid in group]
                groups.append({"params": parameters, "lr": rate * self.batch_size / 256, "weight_decay": weight_decay})
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share(step, steps))
        for x, y in shown:
            logits = heads(x, range(len(grid)))
            # Losses are summed over classifiers, so that the gradient of each does not depend on the size of the grid.
            loss = losses(logits, y).sum() / len(y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each image and classifier.

    Args:
        logits: Logits, (b, r, k).
        labels: Class numbers, (b,), or multi-label targets, (b, k) bool, for which the binary cross-entropy is summed
            over the classes.

    Returns:
        Losses, (b, r).
    """
    if is_multi_label(labels):
        truth = labels[:, None].expand_as(logits).to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, truth, reduction="none").sum(2)
    return F.cross_entropy(logits.movedim(2, 1), labels[:, None].expand(logits.shape[:2]), reduction="none")


def share(step: int, steps: int) -> float:
    """Return the factor in [0, 1] by which the schedule multiplies the learning rate at a step."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


class Scaled(NamedTuple):
    """Standardise patches by the mean and standard deviation (d,) over the training patches."""

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, values: Tensor, trained: Tensor, standardize: bool) -> "Scaled":
        """Compute the statistics of the images at some rows.

        Args:
            values: Patch features, (n, y, x, d).
            trained: Rows of the training images, whose patches are used.
            standardize: If false, patches are left unchanged.
        """
        zeros = torch.zeros(values.shape[-1], dtype=torch.float64, device=values.device)
        if not standardize:
            return cls(zeros.float(), zeros.float() + 1)
        count = len(trained) * values.shape[1] * values.shape[2]

        def moment(power: int, center: Tensor) -> Tensor:
            parts = (values[rows].double().flatten(0, 2) for rows in trained.split(_IMAGES))
            return torch.stack([(part - center).pow(power).sum(0) for part in parts]).sum(0) / count

        mean = moment(1, zeros)
        deviation = moment(2, mean).sqrt()
        varies = deviation > 8 * torch.finfo(values.dtype).eps * mean.abs()  # by more than rounding errors
        return cls(mean.float(), torch.where(varies, 1 / deviation, 0).float())

    def __call__(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return the standardised patches of the images at `rows`: (n, y, x, d) -> (b, y x, d) float32."""
        return (values[rows].flatten(1, 2).float() - self.mean) * self.scale


class Heads(nn.Module):
    """Compute the classifiers of a grid together, each with its attention pooling.

    With a single query, attention is linear in the patches except for its weights. The query is therefore projected by
    the key weights once, patches are averaged before the value projection, and the key bias, which is constant over
    patches, is omitted. The function equals attention with keys and values for each patch, at a fortieth of the cost.
    """

    def __init__(self, width: int, classes: int, *, count: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = next(heads for heads in range(max(1, width // _HEAD), 0, -1) if width % heads == 0)

        def parameters(*shape: int, deviation: float = _DEVIATION) -> nn.ParameterList:
            made = torch.zeros(shape)
            if deviation:
                nn.init.trunc_normal_(made, std=deviation, generator=generator)
            return nn.ParameterList(nn.Parameter(made.clone()) for _ in range(count))

        self.query, self.key, self.value = parameters(width), parameters(width, width), parameters(width, width)
        self.classifier = parameters(classes, width)
        self.value_bias, self.bias = parameters(width, deviation=0), parameters(classes, deviation=0)

    @property
    def weights(self) -> tuple[nn.ParameterList, ...]:
        """Return the parameters of each classifier that are subject to weight decay."""
        return self.query, self.key, self.value, self.classifier

    @property
    def biases(self) -> tuple[nn.ParameterList, ...]:
        """Return the biases of each classifier, which are not subject to weight decay."""
        return self.value_bias, self.bias

    def forward(self, patches: Tensor, which: Sequence[int]) -> Tensor:
        """Return the logits (b, r, k) of the classifiers `which` for patches (b, n, d)."""
        split = {"h": self.heads}

        def of(parameters: nn.ParameterList) -> Tensor:
            return torch.stack([parameters[place] for place in which])

        query = rearrange(of(self.query), "r (h e) -> r h e", **split)
        asked = torch.einsum("rhe,rhed->rhd", query, rearrange(of(self.key), "r (h e) d -> r h e d", **split))
        asked = asked / math.sqrt(query.shape[-1])
        attention = torch.einsum("bnd,rhd->brhn", patches, asked).softmax(-1)
        pooled = torch.einsum("brhn,bnd->brhd", attention, patches)
        values = torch.einsum("brhd,rhed->brhe", pooled, rearrange(of(self.value), "r (h e) d -> r h e d", **split))
        vectors = values.flatten(2) + of(self.value_bias)
        return torch.einsum("brd,rkd->brk", vectors, of(self.classifier)) + of(self.bias)
