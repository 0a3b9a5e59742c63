"""Detect the collapse of self-distillation by the spread of prototype assignments and of features on held-out images.

A collapsed model assigns all images to the same prototype or uniformly to all prototypes. Both cases show in the mutual
information of assignment and image: the entropy of the mean assignment (low if one prototype dominates) minus the mean
entropy of the assignments (equally high if they are uniform). It is at most the log of the number of prototypes, or of
images.

Shapes use b, n images, d width, k prototypes.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ssvit.evaluation.panels.base import Evaluation, with_metrics
from ssvit.evaluation.panels.held_out import HeldOut
from ssvit.evaluation.panels.spread import describe_spread, one_way, spread_of
from ssvit.figures.display import Display
from ssvit.figures.pictures import Gallery, Picture
from ssvit.figures.plot import History, Panel, Plot, curve, level, spread
from ssvit.models.block import gather
from ssvit.objectives.dino import Dino, entropy
from ssvit.objectives.ibot import IBot
from ssvit.schedule import Progress

_LEAST_TOLD = 0.05  # fraction of the maximum mutual information, below which the model counts as collapsed
_ROWS, _ACROSS = 8, 10  # prototypes in the figure, and images of each


class Assignments(NamedTuple):
    """Store outputs of teacher and student for n images."""

    features: Tensor  # (n, d), of unit length
    choices: Tensor  # most probable prototype of the teacher, (n,)
    confidence: Tensor  # its probability, (n,)
    student_choices: Tensor  # (n,)
    mean: Tensor  # mean probabilities of the teacher, (k,)
    student_mean: Tensor  # (k,)
    single: Tensor  # mean entropy of the teacher's probabilities, ()


class Collapse(HeldOut):
    """Evaluate a `Dino` model with one view of each image and the final teacher temperature."""

    fewest = 2

    def __call__(self, objective: Dino, history: History | None = None) -> Evaluation:
        """Return entropies of the assignments in nats, spread of the features, and agreement of student and teacher.

        Figures: `collapse`, these metrics over the steps; `prototypes`, the images most confidently assigned to the
        most frequent prototypes.
        """
        answers = self._answers(objective)
        metrics = measure(answers)
        if history is None:
            return Evaluation(metrics=metrics)
        images = torch.cat([images for images, _ in self.batches])
        figures = {
            "collapse": learning(with_metrics(history, metrics)),
            "prototypes": prototypes(images, answers, self.display),
        }
        return Evaluation(metrics=metrics, lines=describe(metrics), figures=figures)

    def _answers(self, objective: Dino) -> Assignments:
        device, temperature = objective.center.device, objective.schedules["teacher_temperature"](Progress(1, 2))

        def said(images: Tensor) -> tuple[Tensor, ...]:
            with torch.autocast(device.type, enabled=False):
                teacher = objective.targets(objective.teacher_logits([images[:, None]])[0], temperature)
                student = objective.student_logits([images[:, None]])[0] / objective.options.student_temperature
            return objective.backbone().represent(images), teacher, student

        return collect(said(images.to(device)) for images, _ in self.batches)


class PatchCollapse(Collapse):
    """Evaluate an `IBot` model, including masked patches, with the maximum number of masked patches in each image.

    The teacher receives the masked patches and the student does not, so that their agreement measures what the student
    predicts from the context.
    """

    def __call__(self, objective: IBot, history: History | None = None) -> Evaluation:  # type: ignore[override]
        """Return the metrics of `Collapse`, and those of patches as "patch_…".

        Further figures: `patch_collapse` and `patch_prototypes`.
        """
        found = super().__call__(objective, history)
        answers, windows, places = self._patch_answers(objective)
        own = {**measure(answers), "agreement_by_place": agreement_by_place(answers.choices, places)}
        metrics = {**found.metrics, **{f"patch_{name}": value for name, value in own.items()}}
        if history is None:
            return Evaluation(metrics=metrics)
        of_patches = [
            {name.removeprefix("patch_"): value for name, value in row.items() if name.startswith(("patch_", "step"))}
            for row in history
        ]
        what = "masked patches"
        figures = {
            **found.figures,
            "patch_collapse": learning(with_metrics(of_patches, own), what),
            "patch_prototypes": prototypes(windows, answers, self.display, what),
        }
        return Evaluation(metrics=metrics, lines=[*found.lines, *describe(own, what)], figures=figures)

    def _patch_answers(self, objective: IBot) -> tuple[Assignments, Tensor, Tensor]:
        """Return the assignments of patches, windows around them, (n, c, 3 p, 3 q) uint8, and position ids, (n,)."""
        device, temperature = objective.center.device, objective.schedules["patch_temperature"](Progress(1, 2))
        windows, places, own = [], [], objective.options

        def said(images: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
            ids = objective.sample(slots, seed=0).ids[:, 0].to(device)
            counts = torch.full((len(ids),), ids.shape[1], device=device)
            with torch.autocast(device.type, enabled=False):
                _, teacher, _ = objective.teacher_answers(images, ids)
                _, student = objective.student_answers(images, ids, counts)
                targets = objective.patch_targets(teacher, temperature)
            features = gather(objective.backbone()(images), ids + objective.encoder.num_prefix_tokens)
            places.append(ids.flatten().cpu())
            windows.append(gather(around(images, objective.encoder.patch_size).flatten(2), ids))
            return tuple(one.flatten(0, 1) for one in (features, targets, student / own.student_temperature))

        answers = collect(said(images.to(device), slots) for images, slots in self.batches)
        p, q = objective.encoder.patch_size
        shown = rearrange(torch.cat(windows).cpu(), "b m (c p q) -> (b m) c p q", p=3 * p, q=3 * q)
        return answers, shown, torch.cat(places)


def agreement_by_place(choices: Tensor, places: Tensor) -> float:
    """Return the share of patches (n,) that have the most frequent prototype of their position (n,)."""
    best = [choices[places == place].unique(return_counts=True)[1].max() for place in places.unique()]
    return torch.stack(best).sum().item() / len(choices)


def around(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return each patch with its eight neighbours, padded by the nearest pixel: (b, c, h, w) -> (b, n, c, 3 p, 3 q)."""
    p, q = patch
    padded = F.pad(images.float(), (q, q, p, p), mode="replicate").to(images.dtype)
    return rearrange(padded.unfold(2, 3 * p, p).unfold(3, 3 * q, q), "b c y x p q -> b (y x) c p q")


def collect(said: Iterable[tuple[Tensor, ...]]) -> Assignments:
    """Join batches of features (b, d), log-probabilities of the teacher (b, k) and logits of the student (b, k)."""
    batches = []
    for features, teacher, student in said:
        confidence, choices = teacher.exp().max(-1)
        logs = teacher, student.log_softmax(-1)
        sums = (one.exp().double().sum(0, keepdim=True) for one in logs)
        found = F.normalize(features.float(), dim=-1), choices, confidence, student.argmax(-1)
        batches.append((*found, *sums, entropy(teacher.double())))
    columns = (torch.cat([part.cpu() for part in parts]) for parts in zip(*batches, strict=True))
    features, choices, confidence, guesses, teacher, student, single = columns
    of_each = features, choices, confidence, guesses
    return Assignments(*of_each, teacher.sum(0) / len(single), student.sum(0) / len(single), single.mean())


def measure(answers: Assignments) -> dict[str, float]:
    """Return the metrics of a collapse, with their maxima and chance levels."""
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


def describe(metrics: Mapping[str, float], what: str = "images") -> list[str]:
    """Return lines on whether and how the model has collapsed.

    Args:
        metrics: Metrics of `measure`.
        what: Plural noun for what is assigned to prototypes.
    """
    told, most = metrics["told"], metrics["told_at_most"]
    single, spread, uniform = metrics["entropy"], metrics["entropy_of_mean"], metrics["entropy_uniform"]
    lines = [
        f"entropy of the mean assignment {spread:.2f}, mean entropy of the single ones {single:.2f}, uniform "
        f"{uniform:.2f} nats; {metrics['prototypes_chosen']:.0f} prototypes are a first choice",
        f"an assignment tells {told:.2f} nats of the {what}, of {most:.2f} at most",
        describe_spread(metrics, what),
        f"student and teacher have the same first choice of {100 * metrics['agreement']:.1f} % of the "
        f"{what}, by chance of {100 * metrics['agreement_by_chance']:.1f} %",
    ]
    if (place := metrics.get("agreement_by_place")) is not None:
        lines.append(f"the most frequent choice of each place in the image would be right of {100 * place:.1f} %")
    signs = []
    if told < _LEAST_TOLD * most:
        how = "all prototypes alike" if single > uniform / 2 else "the same few prototypes"
        signs.append(f"all {what} have {how} (less than {100 * _LEAST_TOLD:.0f} % of what assignments could tell)")
    signs += one_way(metrics)
    fine = f"not collapsed: assignments and features of {what} differ"
    return [*lines, f"COLLAPSED, or hardly begun: {'; '.join(signs)}" if signs else fine]


def learning(history: History, what: str = "images") -> Plot:
    """Plot entropies, spread of features and agreement over the steps."""
    entropies = (
        curve(history, "entropy_of_mean", "of the mean assignment"),
        curve(history, "entropy", "of a single one, mean", "replaced"),
        curve(history, "told", f"difference: told of the {what}", "unchanged"),
    )
    levels = (
        level(history, "entropy_uniform", "uniform"),
        level(history, "told_at_most", "most that can be told", ":"),
    )
    agreement = (
        curve(history, "agreement", "same first choice", scale=100),
        curve(history, "agreement_by_chance", "by chance", "ink", 100, "-."),
        curve(history, "agreement_by_place", "by the place alone", "ink", 100, ":"),
    )
    same = Panel(f"student and teacher (% of {what})", agreement)
    return Plot((Panel("entropy (nats)", entropies, levels), spread(history, what), same), (13.5, 3.8))


def prototypes(images: Tensor, answers: Assignments, display: Display, what: str = "images") -> Gallery:
    """Return a gallery with one row for each of the most frequent prototypes, in descending order of confidence.

    Args:
        images: Images, (n, c, h, w).
        answers: Assignments of the images.
        display: Conversion to RGB images.
        what: Plural noun for the images.
    """
    numbers, counts = answers.choices.unique(return_counts=True)
    rows = []
    for place in counts.argsort(descending=True, stable=True)[:_ROWS]:
        members = (answers.choices == numbers[place]).nonzero()[:, 0]
        best = members[answers.confidence[members].argsort(descending=True, stable=True)][:_ACROSS]
        captions = [(f"prototype {numbers[place]}", f"{counts[place]} {what.split()[-1]}"), *[()] * (len(best) - 1)]
        rows.append([Picture(image, caption) for image, caption in zip(display(images[best]), captions, strict=True)])
    title = f"{len(numbers)} prototypes are a first choice of {len(images)} held-out {what}; the most confident first"
    return Gallery(rows, title, tile=110)
