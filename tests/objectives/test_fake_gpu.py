"""An update of every objective on fake tensors of a GPU: wrong devices, and whatever the host waits for, are errors."""

import pytest
import torch
from test_objective_contract import CASES, batch, build
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built without CUDA"),
    pytest.mark.filterwarnings("ignore:CUDA is not available"),
]


class Copies(TorchDispatchMode):
    """Finds copies from one device to another that the host waits for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if func is torch.ops.aten._to_copy.default and not kwargs.get("non_blocking"):
            self.found += [tuple(result.shape)] * (args[0].device != result.device)
        return result


def update_of(objective, given):
    """Return the outputs of an objective on a fake GPU, after its step, and the copies that the host waited for."""
    with FakeTensorMode() as mode:

        def moved(values):
            return None if values is None else torch.empty(values.shape, dtype=values.dtype, device="cuda")

        mode.allow_non_fake_inputs = True
        for module in (objective, *objective.references()):
            module.to_empty(device="cuda")
        mode.allow_non_fake_inputs = False
        views = {name: moved(view) for name, view in given.views.items()}
        others = {name: moved(getattr(given, name)) for name in ("labels", "slots", "indices")}
        targets = {name: moved(target) for name, target in given.targets.items()} if given.targets else given.targets
        given = given._replace(views=views, targets=targets, **others)
        scheduled = {name: torch.empty((), dtype=torch.float64, device="cuda") for name in objective.schedules}
        with Copies() as copies:
            noise = objective.sample(given.slots, seed=given.seed)
            with torch.autocast("cuda", torch.bfloat16):
                result = objective(given, noise, scheduled)
            outputs = {name: value.detach() for name, value in result.items() if value.ndim}
            with torch.no_grad():
                objective.after_step(outputs, scheduled, result["loss"].isfinite())
        return result, copies.found


@pytest.mark.parametrize("case", CASES)
def test_an_update_stays_on_the_gpu_and_the_host_waits_for_no_part_of_it(case):
    objective = build(case).train()
    outputs, copies = update_of(objective, batch(objective))
    assert outputs["loss"].shape == ()
    assert {value.device.type for value in outputs.values()} == {"cuda"}
    assert not copies


def changed(mistake):
    """An objective that makes a mistake with its images."""
    objective = build("mae").train()
    embed = objective.encoder.embed
    objective.encoder.embed = lambda images, *rest: embed(mistake(images), *rest)
    return objective


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda images: images + torch.arange(images.shape[-1]), RuntimeError),
        (lambda images: images * images.float().mean().item(), DataDependentOutputException),
    ],
)
def test_a_tensor_on_the_cpu_and_a_value_on_the_host_are_errors(mistake, error):
    objective = changed(mistake)
    with pytest.raises(error):
        update_of(objective, batch(objective))


def test_a_copy_that_the_host_waits_for_is_found():
    objective = changed(lambda images: images + torch.arange(images.shape[-1], dtype=torch.uint8).to("cuda"))
    assert update_of(objective, batch(objective))[1] == [(16,)]
