"""Properties of every evaluation during training, whatever it measures."""

import math
from dataclasses import is_dataclass

import pytest
import tiny
import torch
from command import error_of

from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.memory import Memory
from ssvit.errors import UserError
from ssvit.evaluation.evaluators import online
from ssvit.evaluation.evaluators.base import Evaluator, with_metrics
from ssvit.evaluation.evaluators.options import (
    Autoencoding,
    Classification,
    Collapse,
    Contrast,
    LabelFree,
    LatentPrediction,
    PatchCollapse,
    Prediction,
    Probing,
    Segmentation,
)
from ssvit.evaluation.probes.options import Knn
from ssvit.figures.base import Figure
from ssvit.figures.plot import Plot

VIEW = CenterCrop(size=16).build()
# The objective, and the options of its evaluation.
EVALUATORS = {
    "prediction": (tiny.model, Prediction),
    "prediction_of_clusters": (tiny.codebook, Prediction),
    "prediction_by_a_decoder": (tiny.masked_patch_decoder, Prediction),
    "autoencoding": (tiny.mae, Autoencoding),
    "latent": (tiny.latent, LatentPrediction),
    "collapse": (tiny.dino, Collapse),
    "patch_collapse": (tiny.ibot, PatchCollapse),
    "contrast": (tiny.simclr, Contrast),
    "contrast_of_tuning": (tiny.contrastive_tuning, Contrast),
    "label_free": (tiny.model, LabelFree),
    "classification": (tiny.classify, Classification),
    "segmentation": (tiny.segment, Segmentation),
    "probing": (tiny.model, Probing),
}


def build(name: str, source: Memory | None = None, **options: object) -> Evaluator:
    """Evaluate 24 pictures, or the images of a source."""
    source = tiny.labelled() if source is None else source
    chosen = EVALUATORS[name][1](**{"batch_size": 10} | options)
    if isinstance(chosen, Probing):
        return online.Probing(chosen, probes={"knn": Knn(k=3).build()}, train=source, test=source, transform=VIEW)
    augment = {"augment": tiny.transform(tiny.simclr())} if isinstance(chosen, Contrast) else {}
    return chosen.build(source=source, transform=VIEW, **augment)


@torch.no_grad()
@pytest.mark.parametrize("name", EVALUATORS)
def test_an_evaluation_is_repeatable_changes_nothing_and_plots_its_metrics(name):
    objective = EVALUATORS[name][0]().eval()
    states = {key: value.clone() for key, value in objective.state_dict().items()}
    evaluator = build(name)
    torch.manual_seed(1)
    alone = evaluator(objective)
    assert alone.metrics
    assert not any((alone.lines, alone.figures, alone.tables))
    assert all(math.isfinite(value) for value in alone.metrics.values())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    shown = evaluator(objective, [{"step": 0, **alone.metrics}, {"step": 4}])
    assert torch.get_rng_state().equal(state)
    assert shown.metrics == alone.metrics == build(name)(objective).metrics
    assert build(name, batch_size=24)(objective).metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6)
    assert all(torch.equal(value, states[key]) for key, value in objective.state_dict().items())
    assert not objective.training
    assert shown.lines or name == "label_free"  # which has lines only for collapsed features
    assert all("\n" not in line for line in shown.lines)
    plots = [figure for figure in shown.figures.values() if isinstance(figure, Plot)]
    assert plots or name == "label_free"  # whose measures have no figure
    values = list(alone.metrics.values())
    values = [pytest.approx(value) for value in (*values, *(100 * value for value in values))]
    for line in (line for plot in plots for panel in plot.panels for line in panel.lines if line.x):
        assert list(line.x) == [0, 4]
        assert line.y[0] == line.y[1] in values
    for figure in shown.figures.values():
        assert isinstance(figure, Figure)
        assert is_dataclass(figure)
        assert figure.png().startswith(b"\x89PNG")


@torch.no_grad()
@pytest.mark.parametrize("name", ["prediction", "autoencoding", "latent", "patch_collapse", "contrast"])
def test_random_choices_depend_on_the_seed(name):
    objective = EVALUATORS[name][0]().eval()
    metrics = [build(name, seed=seed)(objective).metrics for seed in (0, 1)]
    assert metrics[0] != metrics[1]


@pytest.mark.parametrize("name", EVALUATORS)
@pytest.mark.parametrize(("option", "value"), [("batch_size", 0), ("batch_size", 1.5), ("nothing", 1)])
def test_options_are_refused_by_name(name, option, value):
    assert error_of(EVALUATORS[name][1], **{option: value}).name == option


@torch.no_grad()
@pytest.mark.parametrize("name", EVALUATORS)
def test_images_that_do_not_suffice_are_reported_in_one_line(name):
    source = tiny.labelled().take(torch.arange(0))
    if name == "probing":
        (line,) = build(name, Memory(tiny.pictures())).remarks
    else:
        with pytest.raises(UserError) as error:
            build(name, source)(EVALUATORS[name][0]().eval())
        line = str(error.value)
    assert line
    assert "\n" not in line


@pytest.mark.parametrize("name", ["collapse", "patch_collapse", "contrast"])
def test_a_spread_needs_two_images(name):
    with pytest.raises(UserError), torch.no_grad():
        build(name, images=1)(EVALUATORS[name][0]().eval())


def test_a_history_has_the_metrics_of_its_last_row_and_none_for_values_that_are_not_finite():
    history = [{"step": 0, "a": 1.0}, {"step": 4, "other/a": 2.0}]
    changed = with_metrics(history, {"a": 3.0, "b": math.nan})
    assert changed == [history[0], {"step": 4, "other/a": 2.0, "a": 3.0, "b": None}]
    assert history[1] == {"step": 4, "other/a": 2.0}
