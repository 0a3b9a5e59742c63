"""The teacher: a plain loop's moving average, frozen, in eval mode, saved, and untouched by a skipped step."""

import torch
from lightly.models.utils import update_momentum
from torch import nn

from ssvit.objectives.teacher import Teacher
from ssvit.training.state import Average


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 3))


def change(student: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for value in student.state_dict().values():
            if value.is_floating_point():
                value += torch.randn(value.shape, generator=generator, dtype=value.dtype)


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


YES = torch.tensor(True)


def test_follows_as_a_plain_loop_in_float64_and_as_lightlys():
    student = network().double()
    teacher, peer = Teacher(student), network().double()
    expected = {name: value.clone() for name, value in student.named_parameters()}
    for step, momentum in enumerate([0.5, 0.9, 0.996, 1.0, 0.0]):
        change(student, step)
        teacher.update(student, number(momentum), YES)
        update_momentum(student, peer, momentum)
        for name, value in student.named_parameters():
            expected[name] = momentum * expected[name] + (1 - momentum) * value
    for (name, own), other in zip(teacher.module.named_parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(own, expected[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
    for name, own in teacher.module.named_buffers():
        assert own.equal(student.get_buffer(name))


def test_has_the_bits_of_the_average_of_a_recipe():
    student = network()
    teacher, average = Teacher(student), Average(student, 0.9971)
    for step in range(3):
        change(student, step)
        teacher.update(student, number(0.9971), YES)
        average.follow(10_000, YES)  # after its rise
    with average.swapped_in():
        for own, other in zip(teacher.module.parameters(), student.parameters(), strict=True):
            assert own.equal(other)


def test_is_frozen_in_eval_mode_and_part_of_the_state():
    student = network()
    teacher = Teacher(student)
    for mode in (True, False, True):
        nn.ModuleList([student, teacher]).train(mode)
        assert student.training is mode
        assert not any(module.training for module in teacher.modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in student.parameters())
    change(student, 0)  # the copy shares nothing
    for name, value in network().state_dict().items():
        assert teacher.state_dict()[f"module.{name}"].equal(value)
