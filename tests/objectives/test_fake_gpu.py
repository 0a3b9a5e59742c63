"""A forward pass of every objective on fake tensors of a GPU: wrong devices and values read by the host are errors."""

import pytest
import tiny
import torch
from test_objective_contract import CASES, batch, build
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built without CUDA")


def pass_of(objective, given):
    """Return the outputs of an objective for a batch, both moved to a fake GPU."""
    with FakeTensorMode() as mode, torch.no_grad():

        def moved(values):
            return None if values is None else torch.empty(values.shape, dtype=values.dtype, device="cuda")

        mode.allow_non_fake_inputs = True
        for module in (objective, *objective.references()):
            module.to_empty(device="cuda")
        mode.allow_non_fake_inputs = False
        views = {name: moved(view) for name, view in given.views.items()}
        others = {name: moved(getattr(given, name)) for name in ("labels", "slots", "indices")}
        given = given._replace(views=views, **others)
        scheduled = {name: torch.empty((), dtype=torch.float64) for name in tiny.scheduled(objective, 6)}
        return objective(given, objective.sample(given.slots, seed=given.seed), scheduled)


@pytest.mark.parametrize("case", CASES)
def test_a_forward_pass_stays_on_the_gpu(case):
    objective = build(case).train()
    outputs = pass_of(objective, batch(objective))
    assert outputs["loss"].shape == ()
    assert {value.device.type for value in outputs.values()} == {"cuda"}


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda images: images + torch.arange(images.shape[-1]), RuntimeError),
        (lambda images: images * images.float().mean().item(), DataDependentOutputException),
    ],
)
def test_a_tensor_on_the_cpu_and_a_value_on_the_host_are_errors(mistake, error):
    objective = build("mae").train()
    embed = objective.encoder.embed
    objective.encoder.embed = lambda images, *rest: embed(mistake(images), *rest)
    with pytest.raises(error):
        pass_of(objective, batch(objective))
