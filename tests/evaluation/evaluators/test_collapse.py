"""Evaluations of methods that compare views: metrics equal plain loops, and each kind of collapse is detected."""

import math
from functools import partial

import pytest
import tiny
import torch
import torch.nn.functional as F
from test_evaluator_contract import build

from ssvit.evaluation.evaluators import collapse, contrast
from ssvit.evaluation.evaluators.held_out import spread_of

small = partial(build, images=20, batch_size=8)


def read(evaluator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images and slots of an evaluation."""
    images, slots = (torch.cat(parts) for parts in zip(*evaluator.batches, strict=True))
    return images, slots


def entropy(probabilities: torch.Tensor) -> float:
    return -sum(p * math.log(p) for p in probabilities.tolist())


def spread(features: torch.Tensor) -> dict[str, float]:
    n = len(features)
    cosines = [float(features[i] @ features[j]) for i in range(n) for j in range(n) if i != j]
    deviations = features.var(0, correction=0).tolist()
    return {"feature_std": math.sqrt(sum(deviations)), "feature_cosine": sum(cosines) / len(cosines)}


def by_loops(teacher: torch.Tensor, student: torch.Tensor, features: torch.Tensor) -> dict[str, float]:
    """The metrics of probabilities (n, k) of teacher and student, and of features (n, d)."""
    n, k = teacher.shape
    of_mean, single = entropy(teacher.mean(0)), sum(map(entropy, teacher)) / n
    choices = teacher.argmax(1).tolist()
    means = zip(teacher.mean(0).tolist(), student.mean(0).tolist(), strict=True)
    return {
        "entropy_of_mean": of_mean, "entropy": single, "entropy_uniform": math.log(k), "information": of_mean - single,
        "information_at_most": math.log(min(n, k)), "prototypes_chosen": len(set(choices)),
        "agreement": sum(a == b for a, b in zip(choices, student.argmax(1).tolist(), strict=True)) / n,
        "agreement_by_chance": sum(a * b for a, b in means),
        **spread(F.normalize(features.float(), dim=-1).double()),
    }  # fmt: skip


@torch.no_grad()
def test_metrics_of_self_distillation_equal_loops():
    objective = tiny.dino().double().eval()
    objective.center += tiny.noise(24, seed=3) * 0.02
    evaluator = small("collapse")
    images, _ = read(evaluator)
    features = objective.backbone().represent(images)
    teacher = ((objective.teacher.module.head(features) - objective.center) / 0.07).softmax(-1)
    student = (objective.head(objective.encoder.represent(images)) / 0.1).softmax(-1)
    assert evaluator(objective).metrics == pytest.approx(by_loops(teacher, student, features), rel=1e-5, abs=1e-7)


@torch.no_grad()
def test_metrics_of_masked_patches_equal_loops():
    objective = tiny.ibot().double().eval()
    objective.patch_center += tiny.noise(24) * 0.02
    objective.mask_token += 0.3
    evaluator = small("patch_collapse")
    teacher, student, features = [], [], []
    for image, slot in zip(*read(evaluator), strict=True):
        ids = objective.sample(slot[None], seed=0).ids[0, 0]
        tokens = objective.teacher.module.encoder(image[None])[0, 1:][ids]
        features.append(tokens)
        teacher.append(((objective.teacher.module.head(tokens) - objective.patch_center) / 0.08).softmax(1))
        embedded = objective.encoder.embed(image[None])
        embedded[0, ids] = objective.mask_token
        student.append((objective.head(objective.encoder.encode(embedded)[0, 1:][ids]) / 0.1).softmax(1))
    expected = by_loops(*map(torch.cat, (teacher, student, features)))
    metrics = evaluator(objective).metrics
    of_patches = {name.removeprefix("patch_"): value for name, value in metrics.items() if name.startswith("patch_")}
    assert of_patches == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert {name: value for name, value in metrics.items() if not name.startswith("patch_")} == small("collapse")(
        objective
    ).metrics


@torch.no_grad()
def test_metrics_of_contrastive_learning_equal_loops():
    from lightly.loss import NTXentLoss

    objective = tiny.simclr().double().eval()
    evaluator = small("contrast")
    images, slots = read(evaluator)
    views = tiny.transform(objective)(images, slots, 0)["global"]
    projections = objective.head(objective.encoder.represent(views.transpose(0, 1).flatten(0, 1)))
    vectors = F.normalize(projections)
    cosines = (vectors @ vectors.T).fill_diagonal_(-2)
    halves = vectors[:20], vectors[20:]
    apart = [[(a - b).square().sum().item() for i, a in enumerate(half) for b in half[:i]] for half in halves]
    logs = [math.log(sum(math.exp(-2 * square) for square in squares) / 190) for squares in apart]
    expected = {
        "loss": NTXentLoss(temperature=0.2)(*projections.split(20)).item(), "loss_by_chance": math.log(39),
        "top1": sum(int(cosines[i].argmax()) == (i + 20) % 40 for i in range(40)) / 40, "top1_by_chance": 1 / 39,
        "alignment": (halves[0] - halves[1]).square().sum(1).mean().item(), "distance": sum(map(sum, apart)) / 380,
        "uniformity": sum(logs) / 2, **spread(F.normalize(objective.encoder.represent(images), dim=-1)),
    }  # fmt: skip
    assert evaluator(objective).metrics == pytest.approx(expected, rel=1e-5, abs=1e-7)


@torch.no_grad()
def test_the_loss_of_contrastive_tuning_is_that_of_the_objective():
    objective = tiny.contrastive_tuning().double().eval()
    evaluator = small("contrast")
    metrics = evaluator(objective).metrics
    assert metrics["loss_by_chance"] == math.log(20)
    views = tiny.transform(objective)(*read(evaluator), 0)["global"]
    assert metrics["loss"] == pytest.approx(objective.losses(objective.project(views)).mean().item())


DIFFERENT = F.normalize(tiny.noise(64, 16).double())
ALIKE = F.normalize(torch.ones(64, 16) + 0.01 * DIFFERENT)


@pytest.mark.parametrize(
    ("probabilities", "features", "collapsed"),
    [
        (torch.eye(32).repeat(2, 1) * 0.9 + 0.1 / 32, DIFFERENT, ""),
        (torch.full((64, 32), 1 / 32), DIFFERENT, "uniformly"),
        (torch.eye(32)[:1].expand(64, -1) * 0.99 + 0.01 / 32, DIFFERENT, "same prototypes"),
        (torch.eye(32).repeat(2, 1) * 0.9 + 0.1 / 32, ALIKE, "same direction"),
    ],
)
def test_each_kind_of_collapse_of_self_distillation_is_detected(probabilities, features, collapsed):
    logs = probabilities.double().log()
    metrics = collapse.measure([(features, logs, logs)])
    conclusion = collapse.describe(metrics)[-1]
    assert conclusion.startswith("COLLAPSED") == bool(collapsed)
    assert collapsed in conclusion
    assert -1e-9 <= metrics["information"] <= metrics["information_at_most"] + 1e-9


PAIRS, STRANGERS = DIFFERENT[:40].repeat(2, 1), F.normalize(tiny.noise(80, 16, seed=1).double())


@pytest.mark.parametrize(
    ("projections", "features", "loss", "start", "conclusion"),
    [
        (PAIRS, DIFFERENT, 1.0, {}, "the model discriminates"),
        (PAIRS, DIFFERENT, 1.0, {"loss": 3.0, "top1": 0.1}, "the model discriminates"),
        (PAIRS, DIFFERENT, 1.0, {"loss": 3.0, "top1": 1.0}, "the model does not"),
        (STRANGERS, DIFFERENT, 9.0, {}, "the model does not"),
        (PAIRS, ALIKE, 1.0, {}, "COLLAPSED"),
    ],
)
def test_the_conclusion_of_contrastive_learning(projections, features, loss, start, conclusion):
    metrics = {"loss": loss, "loss_by_chance": math.log(79), **contrast.measure(projections), **spread_of(features)}
    lines = contrast.describe(metrics, start)
    assert lines[-1].startswith(conclusion)
    assert ["at step 0" in line for line in lines[:2]] == [bool(start)] * 2
