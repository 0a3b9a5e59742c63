"""Probe frozen patch features by attention pooling, followed by a linear classifier.

It measures information that mean pooling over the patches dilutes. The head is that of CAPI (Darcet et al. 2025,
eval_classification.py): a learned query attends to the patches, heads are 64 wide, and the classifier is the only layer
after the pooling. There is no augmentation, because features are computed once. The successors of I-JEPA use a full
transformer block instead (Bardes et al. 2024).

Shapes use b images of a batch, n patches, d width, h heads, e width of a head, k classes, r classifiers of the grid.
"""

import copy
import math
from collections.abc import Sequence
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor, nn

from ssvit.engine.randomness import key
from ssvit.evaluation.features import Features
from ssvit.evaluation.probes.linear import Classifiers, Linear, losses
from ssvit.evaluation.probes.options import Attentive as AttentiveOptions
from ssvit.evaluation.probes.scaler import Scaler
from ssvit.evaluation.probes.sgd import batches

_HEAD = 64  # width of a head
_DEVIATION = 0.02  # standard deviation of the initial weights
_WARMUP = 0.1  # fraction of the steps
_SAMPLED = 1024  # images whose patches determine mean and standard deviation


class Attentive(Linear):
    """Train an attention pooling and a classifier for each learning rate and weight decay, on the same batches."""

    options: AttentiveOptions
    name: ClassVar[str] = "attentive"
    features: ClassVar[str] = "patches"

    @torch.enable_grad()
    def train(self, train: Features, rows: Tensor) -> Classifiers:
        """Train a classifier for each setting of the grid on the images at `rows`, all from the same weights.

        AdamW is used, with a linear warm-up over a tenth of the steps and a cosine decay to 0.
        """
        options = self.options
        grid = [
            {"learning_rate": rate, "weight_decay": decay}
            for rate, decay in product(options.learning_rates, options.weight_decays)
        ]
        generator = torch.Generator().manual_seed(key(options.seed, "attentive probe"))
        pooling = AttentionPooling(train.values.shape[-1], len(train.classes), generator)
        heads = [copy.deepcopy(pooling) for _ in grid]
        sampled = train.values[rows[:: -(-len(rows) // _SAMPLED)]].flatten(0, 2).float()  # rows may be sorted by class
        scaler = Scaler.of_features(sampled, options.standardize)

        def logits(values: Tensor, which: Sequence[int]) -> Tensor:
            patches = scaler.scaled(values.flatten(1, 2).float())
            return torch.stack([heads[number](patches).T for number in which])

        groups = [
            {
                "params": [parameter for parameter in head.parameters() if (parameter.ndim > 1) == is_weight],
                "lr": setting["learning_rate"] * options.batch_size / 256,
                "weight_decay": setting["weight_decay"] * is_weight,
            }
            for head, setting in zip(heads, grid, strict=True)
            for is_weight in (True, False)
        ]
        steps = options.epochs * math.ceil(len(rows) / options.batch_size)
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, steps))
        for batch in batches(len(rows), batch_size=options.batch_size, epochs=options.epochs, seed=options.seed):
            chosen = rows[batch]
            each_loss = losses(logits(train.values[chosen], range(len(grid))), train.known_labels[chosen])
            # Losses are summed over classifiers, so that the gradient of each does not depend on the size of the grid.
            optimizer.zero_grad()
            (each_loss.sum() / len(batch)).backward()
            optimizer.step()
            schedule.step()
        return Classifiers(grid, logits, {})


def rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate at a step, in [0, 1]."""
    warmup = max(1, round(_WARMUP * steps))
    decay = (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
    return (step + 1) / warmup if step < warmup else decay


class AttentionPooling(nn.Module):
    """Pool patches by attention with a learned query, and classify the result.

    With a single query, attention is linear in the patches except for its weights. The query is therefore projected by
    the key weights once, patches are averaged before the value projection, and the key bias, which is constant over
    patches, is omitted. The function equals attention with keys and values for each patch, at a fortieth of the cost.

    Args:
        width: Width of the patches, d.
        classes: Number of classes, k.
        generator: Generator of the initial weights.
    """

    def __init__(self, width: int, classes: int, generator: torch.Generator) -> None:
        super().__init__()
        heads = next(heads for heads in range(max(1, width // _HEAD), 0, -1) if width % heads == 0)

        def weights(*shape: int) -> nn.Parameter:
            return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=_DEVIATION, generator=generator))

        self.query, self.key = weights(heads, width // heads), weights(heads, width // heads, width)
        self.value, self.value_bias = weights(heads, width // heads, width), nn.Parameter(torch.zeros(width))
        self.classifier, self.bias = weights(classes, width), nn.Parameter(torch.zeros(classes))

    def forward(self, patches: Tensor) -> Tensor:
        """Return the logits of patches: (b, n, d) -> (b, k)."""
        query = torch.einsum("he,hed->hd", self.query, self.key) / math.sqrt(self.query.shape[1])
        attention = torch.einsum("bnd,hd->bhn", patches, query).softmax(-1)
        pooled = torch.einsum("bhn,bnd->bhd", attention, patches)
        values = torch.einsum("bhd,hed->bhe", pooled, self.value).flatten(1) + self.value_bias
        return values @ self.classifier.T + self.bias
