"""Does it collapse? Self-distillation on held-out images: how the assignments to prototypes and the features spread.

A collapsed model says the same of every image, either one prototype or all alike. Both show in one number, how much
an assignment tells of its image: the entropy of the mean assignment (low where one prototype serves all) less the mean
entropy of the single ones (as high where they are uniform). It is at most the log of the prototypes, or of the images.

Letters: b, n images, c channels, h, w pixels, d width, k prototypes.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.loader import evaluation_batches
from ssvit.evaluation.base import Evaluation, Evaluator, History, with_metrics
from ssvit.figures import collapse as figures
from ssvit.objectives.dino import Dino, entropy
from ssvit.options import UserError, whole
from ssvit.schedule import Progress

TOLD = 0.05  # of what assignments could tell of their images: less is a collapse
SPREAD = 0.1  # standard deviation of features: less is a collapse, where the mean cosine of two images is above 0.99


class Answers(NamedTuple):
    """What the teacher and the student say of images.

    features: (n, d) of length 1. choices, confidence: the teacher's first choice, (n,), and its probability. own: the
    student's first choice, (n,). mean, own_mean: the mean probabilities of each, (k,). single: mean entropy, ().
    """

    features: Tensor
    choices: Tensor
    confidence: Tensor
    own: Tensor
    mean: Tensor
    own_mean: Tensor
    single: Tensor


class Collapse(Evaluator):
    """The panel of a `Dino` model on `images` images of a source, always the same, each in one view.

    The teacher's temperature is that of the end of a run, so that evaluations can be compared.
    """

    def __init__(self, *, source: Any, transform: Any, images: int = 1024, batch_size: int = 128) -> None:
        whole("images", images, 2)
        whole("batch_size", batch_size)
        self.source, self.transform, self.images, self.batch_size = source, transform, images, batch_size

    @cached_property
    def _batches(self) -> list[Tensor]:
        """The images as bytes, (b, c, h, w), read once."""
        read = evaluation_batches(self.source, self.transform, batch_size=self.batch_size, limit=self.images)
        batches = [batch.images for batch in read]
        if sum(map(len, batches)) < 2:
            raise UserError("fewer than two of the held-out images can be read, so there is nothing to evaluate on")
        return batches

    def __call__(self, objective: Dino, history: History | None = None) -> Evaluation:
        """Entropies of the assignments in nats, spread of the features, agreement of student and teacher.

        Figures: `collapse`, these over the steps; `prototypes`, the images that the most chosen prototypes are surest
        of.
        """
        answers = self._answers(objective)
        metrics = measure(answers)
        if history is None:
            return Evaluation(metrics=metrics)
        pictures = {
            "collapse": figures.learning(with_metrics(history, metrics)),
            "prototypes": figures.prototypes(torch.cat(self._batches), answers.choices, answers.confidence),
        }
        return Evaluation(metrics=metrics, lines=describe(metrics), figures=pictures)

    def _answers(self, objective: Dino) -> Answers:
        device, temperature = objective.center.device, objective.schedules["teacher_temperature"](Progress(1, 2))
        found: dict[str, list[Tensor]] = {}
        for images in (batch.to(device) for batch in self._batches):
            views = [images[:, None]]
            with torch.autocast(device.type, enabled=False):
                told = objective.targets(objective.teacher_logits(views)[0], temperature)
                said = (objective.student_logits(views)[0] / objective.options.student_temperature).log_softmax(-1)
            confidence, choices = told.exp().max(-1)
            parts = {
                "features": F.normalize(objective.backbone().represent(images).float(), dim=-1),
                "choices": choices,
                "confidence": confidence,
                "own": said.argmax(-1),
                "mean": told.exp().double().sum(0, keepdim=True),
                "own_mean": said.exp().double().sum(0, keepdim=True),
                "single": entropy(told.double()),
            }
            for name, value in parts.items():
                found.setdefault(name, []).append(value.cpu())
        whole = {name: torch.cat(values) for name, values in found.items()}
        images = len(whole["choices"])
        means = {name: whole[name].sum(0) / images for name in ("mean", "own_mean")}
        return Answers(**{**whole, **means, "single": whole["single"].mean()})


def measure(answers: Answers) -> dict[str, float]:
    """Numbers of a collapse, and what they would be at most or by chance."""
    n = len(answers.features)
    spread = entropy(answers.mean.clamp(min=1e-300).log())
    center = answers.features.double().mean(0)
    deviation = (answers.features.double() - center).square().mean(0).sum().sqrt()
    return {
        "entropy_of_mean": spread.item(),
        "entropy": answers.single.item(),
        "entropy_uniform": math.log(len(answers.mean)),
        "told": (spread - answers.single).item(),
        "told_at_most": math.log(min(n, len(answers.mean))),
        "prototypes_chosen": len(answers.choices.unique()),
        # Of each number of a feature, times the square root of d: 1 where features go in all directions alike.
        "feature_std": deviation.item(),
        "feature_cosine": ((n * center.square().sum() - 1) / (n - 1)).item(),
        "agreement": (answers.choices == answers.own).float().mean().item(),
        "agreement_by_chance": (answers.mean * answers.own_mean).sum().item(),
    }


def describe(metrics: Mapping[str, float]) -> list[str]:
    """Whether it has collapsed, and how, in words."""
    told, most = metrics["told"], metrics["told_at_most"]
    single, spread, uniform = metrics["entropy"], metrics["entropy_of_mean"], metrics["entropy_uniform"]
    lines = [
        f"entropy of the mean assignment {spread:.2f}, mean entropy of the single ones {single:.2f}, uniform "
        f"{uniform:.2f} nats; {metrics['prototypes_chosen']:.0f} prototypes are an image's first choice",
        f"an assignment tells {told:.2f} nats of its image, of {most:.2f} at most",
        f"features: standard deviation {metrics['feature_std']:.2f} (1: in all directions alike), mean cosine of two "
        f"images {metrics['feature_cosine']:.2f}",
        f"student and teacher have the same first choice of {100 * metrics['agreement']:.1f} % of the images, "
        f"by chance of {100 * metrics['agreement_by_chance']:.1f} %",
    ]
    signs = []
    if told < TOLD * most:
        how = "all prototypes alike" if single > uniform / 2 else "the same few prototypes"
        signs.append(f"every image has {how} (less than {100 * TOLD:.0f} % of what assignments could tell)")
    if metrics["feature_std"] < SPREAD:
        signs.append(f"all features point one way (standard deviation below {SPREAD})")
    fine = "not collapsed: assignments and features differ from image to image"
    lines.append(f"COLLAPSED, or hardly begun: {'; '.join(signs)}" if signs else fine)
    return lines
