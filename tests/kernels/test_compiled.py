"""recipe.backend=compile: one graph for each image shape, no breaks, nothing compiled again as a run goes on."""

import pytest
import tiny
import torch

from ssvit.data.augment.crop import CenterCrop
from ssvit.evaluation.panels import prediction_options
from ssvit.evaluation.panels.prediction import Prediction
from ssvit.models.block import Block
from ssvit.randomness import uniform

RANDOM = ("model", "mae", "ibot", "latent", "simclr")  # they have a `sample`
METHODS = (*RANDOM, "dino", "contrastive_tuning", "classify")


@pytest.fixture
def graphs(monkeypatch):
    """How many graphs were compiled so far, each by plain torch; a break is an error."""
    found, compile = [], torch.compile

    def count(graph, inputs):
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda model, **_: compile(model, backend=count, fullgraph=True))
    yield found
    torch._dynamo.reset()


@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_one_graph_and_one_that_samples(tmp_path, graphs, method):
    """With schedules that change at every step, micro-batches, an average and a checkpoint."""
    tiny.train(tmp_path, objective=getattr(tiny, method)(0.1), backend="compile", accumulate=2, steps=4, warmup=1)
    assert len(graphs) == (2 if method in RANDOM else 1)


def test_evaluations_use_compiled_layers_and_compile_once(tmp_path, graphs):
    """Their last batch is smaller, so the first evaluation may compile a layer anew; the later ones do not."""
    evaluator = Prediction(
        prediction_options.Prediction(batch_size=10), source=tiny.source(), transform=CenterCrop(size=16)
    )
    counts, plain = [], evaluator.__class__.__call__

    class Counting(Prediction):
        def __call__(self, *inputs):
            before = len(graphs)
            found = plain(self, *inputs)
            counts.append(len(graphs) - before)
            return found

    evaluator.__class__ = Counting
    _, objective = tiny.train(
        tmp_path / "compiled", backend="compile", evaluate_every=4, evaluators={"held_out": evaluator}
    )
    assert counts[0] > 0
    assert counts[1:] == [0] * 3
    assert all(part._compiled_call_impl for part in objective.modules() if isinstance(part, Block))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_numbers_are_the_same_in_a_compiled_graph():
    """Their products have to wrap at 64 bits, which torch's compiler does not do with numbers that it knows."""
    torch._dynamo.reset()
    slots = torch.arange(5) + (1 << 40)
    assert torch.compile(uniform, fullgraph=True)(3, "test", slots, 7, 1).equal(uniform(3, "test", slots, 7, 1))
