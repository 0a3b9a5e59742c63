"""What every evaluation of a model in training does, whatever it measures."""

import math
import subprocess
import sys
from dataclasses import is_dataclass

import pytest
import tiny
import torch

from ssvit.config.declaration import Options
from ssvit.data.augment.crop import CenterCrop
from ssvit.data.sources.memory import Memory
from ssvit.evaluation.panels import (
    autoencoding_options,
    classification_options,
    collapse_options,
    contrast_options,
    label_free_options,
    latent_options,
    online_options,
    prediction_options,
)
from ssvit.evaluation.panels.base import Evaluator
from ssvit.evaluation.probes.knn import Knn
from ssvit.figures.base import Figure
from ssvit.options import OptionError, UserError

VIEW = CenterCrop(size=16)
# The objective, and the options of its evaluation.
PANELS = {
    "prediction": (tiny.model, prediction_options.Prediction),
    "autoencoding": (tiny.mae, autoencoding_options.Autoencoding),
    "latent": (tiny.latent, latent_options.LatentPrediction),
    "collapse": (tiny.dino, collapse_options.Collapse),
    "patch_collapse": (tiny.ibot, collapse_options.PatchCollapse),
    "contrast": (tiny.simclr, contrast_options.Contrast),
    "label_free": (tiny.model, label_free_options.LabelFree),
    "classification": (tiny.classify, classification_options.Classification),
    "probing": (tiny.model, online_options.Probing),
}
MODULES = sorted({options.__module__.removesuffix("_options") for _, options in PANELS.values()})


def build(name: str, source: Memory | None = None, **options: object) -> Evaluator:
    """The evaluation of 24 pictures, or of those of a source."""
    source = tiny.labelled() if source is None else source
    kind: type[Options] = PANELS[name][1]
    images = {"probes": {"knn": Knn(k=3)}, "train": source, "test": source} if name == "probing" else {"source": source}
    if name == "contrast":
        images["augment"] = tiny.transform(tiny.simclr())
    return kind(**{"batch_size": 10} | options).build(**images, transform=VIEW)


@torch.no_grad()
@pytest.mark.parametrize("name", PANELS)
def test_an_evaluation_has_metrics_words_and_figures_and_changes_nothing(name):
    objective = PANELS[name][0]().eval()
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
    assert shown.lines
    assert all("\n" not in line for line in shown.lines)
    for figure in shown.figures.values():
        assert isinstance(figure, Figure)
        assert is_dataclass(figure)
        assert figure.png().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", PANELS)
@pytest.mark.parametrize(("option", "value"), [("batch_size", 0), ("batch_size", 1.5), ("nothing", 1)])
def test_options_are_refused_by_name(name, option, value):
    with pytest.raises(OptionError) as raised:
        PANELS[name][1](**{option: value})
    assert raised.value.name == option
    assert "\n" not in str(raised.value)


@torch.no_grad()
@pytest.mark.parametrize("name", PANELS)
def test_images_that_do_not_suffice_are_reported_in_one_line(name):
    source = tiny.labelled().take(torch.arange(0))
    if name == "probing":
        source = Memory(tiny.pictures())
        (line,) = build(name, source).refused
    else:
        with pytest.raises(UserError) as raised:
            build(name, source)(PANELS[name][0]().eval())
        line = str(raised.value)
    assert line
    assert "\n" not in line


def test_evaluations_are_built_and_measured_without_matplotlib():
    modules = ["ssvit.analysis.inside", "ssvit.studies.scaling", "ssvit.evaluation.report.figures"]
    check = f"import sys, {', '.join([*MODULES, *modules])}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
