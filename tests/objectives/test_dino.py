"""DINO equals lightly's and plain loops: buffers that change once per update, the evaluator, the command line."""

import warnings

import pytest
import tiny
import torch
from lightly.loss import DINOLoss
from lightly.models.modules.heads import DINOProjectionHead
from torchvision.ops import MLP

from ssvit.data.batch import Batch
from ssvit.objectives import dino_options
from ssvit.objectives.dino import Head, cross_entropy, logits, sharpened
from ssvit.objectives.schedule import Progress, Schedule


def random_logits(views: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    """(views, 3 images, 11 prototypes)."""
    return tiny.noise(views, 3, 11, seed=seed).double().to(dtype)


def values() -> dict[str, torch.Tensor]:
    return tiny.scheduled(tiny.dino())


def batch() -> Batch:
    return tiny.views(tiny.dino())


@pytest.mark.parametrize(("teacher_views", "student_views"), [(2, 2), (2, 6), (1, 3)])
def test_the_loss_is_lightlys(teacher_views, student_views):
    teacher, student = random_logits(teacher_views, 0), random_logits(student_views, 1).requires_grad_()
    center = random_logits(1, 2)[0, 0]
    targets = sharpened(teacher, center, torch.tensor(0.05, dtype=torch.float64)).exp()
    loss = cross_entropy(targets, (student / 0.1).log_softmax(-1))
    (gradient,) = torch.autograd.grad(loss, student)

    peer = DINOLoss(output_dim=11, student_temp=0.1).double()
    peer.center = center.view(1, 1, -1).clone()
    expected = peer(list(teacher), list(student), teacher_temp=0.05)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # lightly's temperature is in float32
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, student)[0], rtol=1e-5, atol=1e-9)


def lightlys_head(*widths: int) -> DINOProjectionHead:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return DINOProjectionHead(*widths)


def test_the_head_is_lightlys_with_normalised_prototypes():
    torch.manual_seed(0)
    head, peer = Head(6, dino_options.Dino(hidden=10, bottleneck=5, prototypes=7)).double(), lightlys_head(6, 10, 5, 7)
    # Checkpoints have the names of the weights of torchvision's layers.
    MLP(6, [10, 10, 5], activation_layer=torch.nn.GELU).load_state_dict(head.layers.state_dict())
    for weight, other in zip(peer.double().layers.parameters(), head.layers.parameters(), strict=True):
        weight.data.copy_(other)
    peer.last_layer.weight_v.data.copy_(head.prototypes)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 7, dtype=torch.float64)
    torch.testing.assert_close(head(x), peer(x), rtol=1e-12, atol=1e-12)
    gradients = (
        torch.autograd.grad((module(x) * weight).sum(), [x, last])
        for module, last in ((head, head.prototypes), (peer, peer.last_layer.weight_v))
    )
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_initial_weights_have_lightlys_distributions():
    torch.manual_seed(0)
    head, peer = Head(64, dino_options.Dino(hidden=128, bottleneck=64, prototypes=512)), lightlys_head(64, 128, 64, 512)
    weights = [*head.layers.parameters(), head.prototypes]
    for weight, other in zip(weights, [*peer.layers.parameters(), peer.last_layer.weight_v], strict=True):
        assert weight.std().item() == pytest.approx(other.std().item(), rel=0.1)


def test_the_factor_of_the_gradient_is_that_of_the_prototypes_alone():
    head, x = Head(6, dino_options.Dino(hidden=10, bottleneck=5, prototypes=7)), torch.randn(4, 6)
    whole = torch.autograd.grad(head(x).square().sum(), list(head.parameters()))
    for factor in (0.0, 1.0, 0.25):
        scale = torch.tensor(factor, dtype=torch.float64)
        assert head(x, scale).equal(head(x)) or factor == 0.25
        scaled = torch.autograd.grad(head(x, scale).square().sum(), list(head.parameters()))
        for (name, _), gradient, free in zip(head.named_parameters(), scaled, whole, strict=True):
            torch.testing.assert_close(gradient, free * (factor if name == "prototypes" else 1), rtol=1e-4, atol=1e-7)


def test_a_step_of_a_schedule_is_sudden():
    schedule = Schedule(start=0.0, end=1.0, shape="step", over=0.25)
    assert [schedule(Progress(step, 9)) for step in range(9)] == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert Schedule(start=0.3, end=1.0, shape="step", over=0.01)(Progress(0, 3)) == 0.3


@torch.no_grad()
def test_views_of_one_size_are_encoded_together_with_the_same_result():
    objective, calls = tiny.dino().eval(), []
    objective.encoder.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0].shape))
    views = [batch().views[name] for name in ("global", "local")]
    together = logits(objective, views)
    assert calls == [(8, 3, 16, 16), (8, 3, 8, 8)]
    alone = [objective.head(objective.encoder.represent(group[:, view])) for group in views for view in range(2)]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-4, atol=1e-6)


def test_logits_and_loss_are_in_float32_under_autocast():
    objective, calls = tiny.dino(), []
    objective.head.register_forward_hook(lambda module, inputs, output: calls.append((inputs[0].dtype, output)))
    with torch.autocast("cpu", torch.bfloat16):
        result = objective(batch(), (), values())
        teacher = logits(objective.teacher.module, [batch().views["global"]])
    ((features, student),) = calls
    assert features == torch.bfloat16
    assert {teacher.dtype, student.dtype, *(value.dtype for value in result.values())} == {torch.float32}
    assert not student.detach().equal(student.detach().bfloat16().float())


def test_after_step_updates_the_centre_as_lightly_and_the_teacher():
    objective = tiny.dino().double()
    result = objective(batch(), (), values())
    teacher = logits(objective.teacher.module, [batch().views["global"]])
    peer = DINOLoss(output_dim=24, center_momentum=0.9).double()
    peer.update_center(teacher)
    torch.testing.assert_close(result["teacher_mean"], teacher.flatten(0, 1).mean(0))
    before = objective.teacher.module.head.prototypes.clone()
    with torch.no_grad():
        objective.head.prototypes += 1
        objective.after_step({"teacher_mean": result["teacher_mean"]}, values(), torch.tensor(True))
    torch.testing.assert_close(objective.center, peer.center.flatten(), rtol=1e-7, atol=1e-12)
    momentum = values()["teacher_momentum"]
    expected = momentum * before + (1 - momentum) * objective.head.prototypes
    torch.testing.assert_close(objective.teacher.module.head.prototypes, expected)


def test_a_schedule_may_be_any_function_of_the_progress():
    options = dino_options.Dino(teacher_momentum=lambda progress: progress.step / progress.steps)
    assert options.schedules["teacher_momentum"](Progress(1, 4)) == 0.25
