"""Build the evaluators and the probes of a training run."""

from pathlib import Path
from typing import Any

from ssvit.data.sources.base import Data
from ssvit.engine.processes import is_main_process
from ssvit.errors import print_lines, within
from ssvit.evaluation.evaluators.base import Evaluator, interval
from ssvit.evaluation.evaluators.online import Probing
from ssvit.evaluation.evaluators.options import Classification, Contrast, LabelFree
from ssvit.evaluation.features_options import AUTO
from ssvit.figures.display import Display
from ssvit.training.options import Pretrain, Training
from ssvit.training.recipe import Recipe


def build_evaluators(options: Training, data: Data, run_folder: Path | None = None) -> dict[str, Evaluator]:
    """Build the evaluators and the probes of a run, and print the remarks of the probes.

    The evaluator of a classifier becomes two: "validation" during training and "test" at the end. If one of the two
    splits is missing, the evaluator of the available split runs during training and at the end.

    Args:
        options: Options of the run.
        data: Images of the run.
        run_folder: Folder of the run, if it has the fingerprints of the images of the pre-training, with which a
            classifier's images are compared.

    Returns:
        Evaluators by name. Those with an automatic interval come last, and it is a multiple of the probes' interval.
    """
    view: dict[str, Any] = {"transform": options.data.view.build(), "display": Display.of_data(options.data)}
    probing = _probing(options, data, **view)
    multiple = next((probe.every for probe in probing.values() if probe.every), options.recipe.evaluate_every)
    held_out, evaluators = data.validation_or_test, dict[str, Evaluator]()
    for name, part in options.evaluators.items():
        with within(f"evaluators.{name}"):
            if isinstance(part, Classification):
                splits = {"validation": data.validation, "test": data.test}
                for split, source in splits.items():
                    at_end = split == "test" and None not in splits.values()
                    if source is not None:
                        evaluators[split] = part.build(
                            source=source, part=split, at_end=at_end, run_folder=run_folder, **view
                        )
                continue
            needs: dict[str, Any] = {}
            if isinstance(part, Contrast):
                needs["augment"] = options.data.augment.build()
            if isinstance(part, LabelFree):
                affordable = _interval(options.recipe, min(part.images, len(held_out)))
                needs["automatic"] = -(-affordable // multiple) * multiple
            evaluators[name] = part.build(source=held_out, **view, **needs)
    automatic = [name for name, part in options.evaluators.items() if getattr(part, "every", None) == AUTO]
    last = {name: evaluators.pop(name) for name in automatic}
    return evaluators | probing | last


def _probing(options: Training, data: Data, **view: Any) -> dict[str, Evaluator]:
    """Build the probes of a pre-training run, and print their remarks."""
    if not isinstance(options, Pretrain) or not options.probes:
        return {}
    train, test, sizes = data.train, data.validation_or_test, options.probing
    images = min(sizes.train_images, len(train)) + min(sizes.test_images, len(test))
    probes = {}
    for name, part in options.probes.items():
        with within(f"probes.{name}"):
            probes[name] = part.build()
    probing = Probing(
        options.probing,
        probes=probes,
        train=train,
        test=test,
        transform=view["transform"],
        pretrained=options.encoder.checkpoint() is not None,
        automatic=_interval(options.recipe, images),
    )
    if is_main_process():
        print_lines(*probing.remarks)
    return {"probe": probing} if probing.probes else {}


def _interval(recipe: Recipe, images: int) -> int:
    return interval(
        images=images, steps=recipe.steps, batch_size=recipe.batch_size, evaluate_every=recipe.evaluate_every
    )
