"""An objective that predicts the patches that it hides: half of each image, as an offset from a running mean."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ssvit.engine.randomness import uniform
from ssvit.models.block import gather_tokens
from ssvit.objectives.base import EMPTY, Objective
from ssvit.objectives.schedule import Schedule


class Hidden(NamedTuple):
    ids: Tensor  # (b, m)


class HiddenPatches(Objective):
    def __init__(self, options, *, encoder, target):
        super().__init__()
        self.encoder, self.target = encoder, target
        self.count = options.count(encoder.patches)
        self.head = nn.Linear(encoder.width, target.width)
        self.register_buffer("mean", torch.zeros(target.width))
        self.schedules = {"rate": Schedule(start=0.5, end=0.05)}

    def sample(self, slots, *, seed):
        return Hidden(uniform(seed, "hidden patches", slots, self.encoder.patches).argsort(1)[:, : self.count])

    def forward(self, batch, noise, scheduled=EMPTY):
        tokens = self.encoder.embed(batch.only_view())
        tokens = tokens.scatter(1, noise.ids[..., None].expand(-1, -1, tokens.shape[-1]), 0.0)
        depth_noise = self.depth_noise(batch)
        prediction = self.mean + self.head(self.encoder.encode(tokens, output_ids=noise.ids, depth_noise=depth_noise))
        truth = gather_tokens(self.target.labels(batch.only_view()), noise.ids)
        return {"loss": self.target.losses(prediction, truth).mean(), "mean": truth.mean((0, 1))}

    def after_step(self, outputs, scheduled, applied):
        mean = torch.lerp(self.mean, outputs["mean"], scheduled["rate"].to(self.mean.dtype))
        self.mean.copy_(torch.where(applied, mean, self.mean))
