"""Does it collapse? Self-distillation on held-out images: how the assignments to prototypes and the features spread.

A collapsed model says the same of every image, either one prototype or all alike. Both show in one number, how much
an assignment tells of its image: the entropy of the mean assignment (low where one prototype serves all) less the mean
entropy of the single ones (as high where they are uniform). It is at most the log of the prototypes, or of the images.

Letters: b, n images, d width, k prototypes.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.batch import EvalTransform
from ssvit.data.source import Source
from ssvit.evaluation import options
from ssvit.evaluation.base import Evaluation, HeldOut, History, with_metrics
from ssvit.figures import collapse as figures
from ssvit.objectives.dino import Dino, entropy
from ssvit.options import make
from ssvit.schedule import Progress

_LEAST_TOLD = 0.05  # of what assignments could tell of their images: less is a collapse
_LEAST_DEVIATION = 0.1  # of the features: less is a collapse, where the mean cosine of two images is above 0.99


class Answers(NamedTuple):
    """What teacher and student say of n images."""

    features: Tensor  # (n, d) of length 1
    choices: Tensor  # the teacher's first choice, (n,)
    confidence: Tensor  # its probability, (n,)
    student_choices: Tensor  # (n,)
    mean: Tensor  # the teacher's mean probabilities, (k,)
    student_mean: Tensor  # (k,)
    single: Tensor  # the mean entropy of the teacher's probabilities, ()


class Collapse(HeldOut):
    """The panel of a `Dino` model, with one view of each image and the teacher's temperature at the end of a run."""

    def __init__(self, *, source: Source, transform: EvalTransform, **given: object) -> None:
        super().__init__(source, transform, make(options.Collapse, given))

    def __call__(self, objective: Dino, history: History | None = None) -> Evaluation:
        """Entropies of the assignments in nats, spread of the features, agreement of student and teacher.

        Figures: `collapse`, these over the steps; `prototypes`, the images most surely assigned to the most chosen.
        """
        answers = self._answers(objective)
        metrics = measure(answers)
        if history is None:
            return Evaluation(metrics=metrics)
        images = torch.cat([images for images, _ in self.batches])
        pictures = {
            "collapse": figures.learning(with_metrics(history, metrics)),
            "prototypes": figures.prototypes(images, answers.choices, answers.confidence),
        }
        return Evaluation(metrics=metrics, lines=describe(metrics), figures=pictures)

    def _answers(self, objective: Dino) -> Answers:
        device, temperature = objective.center.device, objective.schedules["teacher_temperature"](Progress(1, 2))
        batches = []
        for images in (images.to(device) for images, _ in self.batches):
            views = [images[:, None]]
            with torch.autocast(device.type, enabled=False):
                teacher = objective.targets(objective.teacher_logits(views)[0], temperature)
                student = (objective.student_logits(views)[0] / objective.options.student_temperature).log_softmax(-1)
            features = F.normalize(objective.backbone().represent(images).float(), dim=-1)
            confidence, choices = teacher.exp().max(-1)
            sums = (logs.exp().double().sum(0, keepdim=True) for logs in (teacher, student))
            batches.append((features, choices, confidence, student.argmax(-1), *sums, entropy(teacher.double())))
        columns = (torch.cat([part.cpu() for part in parts]) for parts in zip(*batches, strict=True))
        features, choices, confidence, guesses, teacher, student, single = columns
        of_images = features, choices, confidence, guesses
        return Answers(*of_images, teacher.sum(0) / len(single), student.sum(0) / len(single), single.mean())


def measure(answers: Answers) -> dict[str, float]:
    """Numbers of a collapse, and what they would be at most or by chance."""
    n = len(answers.features)
    spread = entropy(answers.mean.clamp(min=1e-300).log())
    return {
        "entropy_of_mean": spread.item(),
        "entropy": answers.single.item(),
        "entropy_uniform": math.log(len(answers.mean)),
        "told": (spread - answers.single).item(),
        "told_at_most": math.log(min(n, len(answers.mean))),
        "prototypes_chosen": len(answers.choices.unique()),
        **spread_of(answers.features),
        "agreement": (answers.choices == answers.student_choices).float().mean().item(),
        "agreement_by_chance": (answers.mean * answers.student_mean).sum().item(),
    }


def spread_of(features: Tensor) -> dict[str, float]:
    """How far features of length 1, (n, d), differ from image to image."""
    n, center = len(features), features.double().mean(0)
    deviation = (features.double() - center).square().mean(0).sum().sqrt()
    # Of each number of a feature, times the square root of d: 1 where features go in all directions alike.
    cosine = (n * center.square().sum() - 1) / (n - 1)
    return {"feature_std": deviation.item(), "feature_cosine": cosine.item()}


def describe_spread(metrics: Mapping[str, float]) -> str:
    """The numbers of `spread_of` in words."""
    return (
        f"features: standard deviation {metrics['feature_std']:.2f} (1: in all directions alike), mean cosine of two "
        f"images {metrics['feature_cosine']:.2f}"
    )


def one_way(metrics: Mapping[str, float]) -> list[str]:
    """The sign that features have collapsed, if they have."""
    if metrics["feature_std"] >= _LEAST_DEVIATION:
        return []
    return [f"all features point one way (standard deviation below {_LEAST_DEVIATION})"]


def describe(metrics: Mapping[str, float]) -> list[str]:
    """Whether it has collapsed, and how, in words."""
    told, most = metrics["told"], metrics["told_at_most"]
    single, spread, uniform = metrics["entropy"], metrics["entropy_of_mean"], metrics["entropy_uniform"]
    lines = [
        f"entropy of the mean assignment {spread:.2f}, mean entropy of the single ones {single:.2f}, uniform "
        f"{uniform:.2f} nats; {metrics['prototypes_chosen']:.0f} prototypes are an image's first choice",
        f"an assignment tells {told:.2f} nats of its image, of {most:.2f} at most",
        describe_spread(metrics),
        f"student and teacher have the same first choice of {100 * metrics['agreement']:.1f} % of the images, "
        f"by chance of {100 * metrics['agreement_by_chance']:.1f} %",
    ]
    signs = []
    if told < _LEAST_TOLD * most:
        how = "all prototypes alike" if single > uniform / 2 else "the same few prototypes"
        signs.append(f"every image has {how} (less than {100 * _LEAST_TOLD:.0f} % of what assignments could tell)")
    signs += one_way(metrics)
    fine = "not collapsed: assignments and features differ from image to image"
    return [*lines, f"COLLAPSED, or hardly begun: {'; '.join(signs)}" if signs else fine]
