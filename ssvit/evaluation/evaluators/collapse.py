"""Detect the collapse of self-distillation by the spread of prototype assignments and of features on held-out images.

A collapsed model assigns all images to the same prototype or uniformly to all prototypes. Both cases show in the mutual
information of assignment and image: the entropy of the mean assignment (low if one prototype dominates) minus the mean
entropy of the assignments (equally high if they are uniform). It is at most the log of the number of prototypes, or of
images.

Shapes use b, n images, d width, k prototypes.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.evaluation.evaluators.base import Shown
from ssvit.evaluation.evaluators.held_out import HeldOut, collapsed_features, describe_spread, spread_of
from ssvit.figures.plot import History, Panel, Plot, curve, feature_spread, level
from ssvit.models.block import gather_tokens
from ssvit.objectives.dino import Dino, IBot, entropy, logits, sharpened
from ssvit.objectives.schedule import Progress

_LEAST_INFORMATION = 0.05  # fraction of its maximum, below which the model counts as collapsed


Outputs = Iterable[tuple[Tensor, Tensor, Tensor]]
"""Features (b, d), log-probabilities of the teacher (b, k) and logits of the student (b, k) of each batch."""


class Collapse(HeldOut):
    """Evaluate a `Dino` model with one view of each image and the final teacher temperature."""

    fewest = 2

    def measure(self, objective: Dino) -> dict[str, float]:
        """Return entropies of the assignments in nats, spread of the features, and agreement of student and teacher."""
        return measure(self._outputs(objective))

    def show(self, objective: Dino, metrics: Mapping[str, float], history: History) -> Shown:
        """Return the figure `collapse`, the metrics over the steps."""
        return describe(metrics), {"collapse": learning(history)}

    def _outputs(self, objective: Dino) -> Outputs:
        device, temperature = objective.center.device, objective.schedules["teacher_temperature"](Progress(1, 2))

        def outputs(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with torch.autocast(device.type, enabled=False):
                views = [images[:, None]]
                teacher = sharpened(logits(objective.teacher.module, views)[0], objective.center, temperature)
                student = logits(objective, views)[0] / objective.options.student_temperature
            return objective.backbone().represent(images), teacher, student

        return (outputs(images.to(device)) for images, _ in self.batches)


class PatchCollapse(Collapse):
    """Evaluate an `IBot` model, including masked patches, with the maximum number of masked patches in each image.

    The teacher receives the masked patches and the student does not, so that their agreement measures what the student
    predicts from the context.
    """

    def measure(self, objective: IBot) -> dict[str, float]:  # type: ignore[override]
        """Return the metrics of `Collapse` for images and, as patch_…, for patches."""
        of_patches = measure(self._patch_outputs(objective))
        return super().measure(objective) | {f"patch_{name}": value for name, value in of_patches.items()}

    def show(self, objective: Dino, metrics: Mapping[str, float], history: History) -> Shown:
        """Return the figures `collapse` of the images and `patch_collapse` of the patches."""
        lines, figures = super().show(objective, metrics, history)
        rows = [
            {name.removeprefix("patch_"): value for name, value in row.items() if name.startswith(("patch_", "step"))}
            for row in history
        ]
        of_patches = {
            name.removeprefix("patch_"): value for name, value in metrics.items() if name.startswith("patch_")
        }
        lines += describe(of_patches, "masked patches")
        return lines, figures | {"patch_collapse": learning(rows, "masked patches")}

    def _patch_outputs(self, objective: IBot) -> Outputs:
        temperature = objective.schedules["patch_temperature"](Progress(1, 2))

        def outputs(images: Tensor, noise: Any) -> tuple[Tensor, Tensor, Tensor]:
            ids = noise.ids[:, 0]
            counts = torch.full((len(ids),), ids.shape[1], device=ids.device)
            with torch.autocast(ids.device.type, enabled=False):
                _, teacher, _ = objective.teacher_logits(images, ids)
                _, student = objective.student_logits(images, ids, counts)
                targets = sharpened(teacher, objective.patch_center, temperature)
            features = gather_tokens(objective.backbone()(images), ids + objective.encoder.num_prefix_tokens)
            logits = student / objective.options.student_temperature
            return features.flatten(0, 1), targets.flatten(0, 1), logits.flatten(0, 1)

        return (outputs(*self.sampled(objective, *batch)) for batch in self.batches)


def measure(outputs: Outputs) -> dict[str, float]:
    """Return the metrics of a collapse, with their maxima and chance levels."""
    batches = []
    for features, teacher, student in outputs:
        sums = (log.exp().double().sum(0, keepdim=True) for log in (teacher, student.log_softmax(-1)))
        of_each = F.normalize(features.float(), dim=-1), teacher.argmax(-1), student.argmax(-1)
        batches.append((*of_each, *sums, entropy(teacher.double())))
    columns = (torch.cat([part.cpu() for part in parts]) for parts in zip(*batches, strict=True))
    features, choices, student_choices, teacher_sums, student_sums, entropies = columns
    n, k = len(features), teacher_sums.shape[1]
    mean, student_mean, mean_entropy = teacher_sums.sum(0) / n, student_sums.sum(0) / n, entropies.mean()
    of_mean = entropy(mean.clamp(min=1e-300).log())
    return {
        "entropy_of_mean": of_mean.item(),
        "entropy": mean_entropy.item(),
        "entropy_uniform": math.log(k),
        "information": (of_mean - mean_entropy).item(),
        "information_at_most": math.log(min(n, k)),
        "prototypes_chosen": len(choices.unique()),
        **spread_of(features),
        "agreement": (choices == student_choices).float().mean().item(),
        "agreement_by_chance": (mean * student_mean).sum().item(),
    }


def describe(metrics: Mapping[str, float], items: str = "images") -> list[str]:
    """Return lines on whether and how the model has collapsed.

    Args:
        metrics: Metrics of `measure`.
        items: Plural noun for the inputs that are assigned to prototypes.
    """
    information, most = metrics["information"], metrics["information_at_most"]
    single, of_mean, uniform = metrics["entropy"], metrics["entropy_of_mean"], metrics["entropy_uniform"]
    lines = [
        f"mutual information of assignments and {items} {information:.2f} nats (maximum {most:.2f}): entropy of the "
        f"mean assignment {of_mean:.2f} minus mean entropy {single:.2f} (uniform: {uniform:.2f})",
        describe_spread(metrics, items),
        f"student and teacher choose the same prototype for {100 * metrics['agreement']:.1f} % of the {items} "
        f"(chance {100 * metrics['agreement_by_chance']:.1f} %); {metrics['prototypes_chosen']:.0f} prototypes chosen",
    ]
    signs = []
    if information < _LEAST_INFORMATION * most:
        assigned = "assigned uniformly to all prototypes" if single > uniform / 2 else "assigned to the same prototypes"
        signs.append(f"all {items} are {assigned} (mutual information below {100 * _LEAST_INFORMATION:.0f} %)")
    signs += collapsed_features(metrics)
    conclusion = f"COLLAPSED, or at the start of training: {'; '.join(signs)}"
    return [*lines, conclusion if signs else f"not collapsed: assignments and features of {items} differ"]


def learning(history: History, items: str = "images") -> Plot:
    """Plot entropies, spread of features and agreement over the steps, with the legends below the curves.

    Args:
        history: Rows of metrics.
        items: Plural noun for the inputs that are assigned to prototypes.
    """
    entropies = (
        curve(history, "entropy_of_mean", "of the mean assignment"),
        curve(history, "entropy", "mean of the assignments", "replaced"),
        curve(history, "information", f"difference: information on the {items}", "unchanged"),
    )
    levels = (
        level(history, "entropy_uniform", "uniform"),
        level(history, "information_at_most", "maximum of the difference", ":"),
    )
    agreement = (
        curve(history, "agreement", "same prototype", scale=100),
        curve(history, "agreement_by_chance", "chance", "ink", 100, "-."),
    )
    panels = (
        Panel("entropy (nats)", entropies, levels),
        feature_spread(history, items),
        Panel(f"student and teacher (% of {items})", agreement),
    )
    return Plot(panels, (13.5, 4.6), legend="under")
