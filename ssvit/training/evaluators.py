"""Build the evaluators and the probes of a training run."""

from pathlib import Path

from ssvit.data.sources.base import Data, Source
from ssvit.engine.processes import is_main_process
from ssvit.errors import print_lines
from ssvit.evaluation.evaluators.base import Evaluator, interval
from ssvit.evaluation.evaluators.online import Probing
from ssvit.evaluation.evaluators.options import Contrast, LabelFree, Supervised
from ssvit.evaluation.options import AUTO
from ssvit.figures.display import Display
from ssvit.training.options import Pretrain, Training


def build_evaluators(options: Training, data: Data, run_folder: Path | None = None) -> dict[str, Evaluator]:
    """Build the evaluators and the probes of a run, and print the remarks of the probes.

    The evaluator of a supervised model becomes two: "validation" during training and "test" at the end. If one of the
    two splits is missing, the evaluator of the available split runs during training and at the end.

    Args:
        options: Options of the run.
        data: Images of the run.
        run_folder: Folder of the run, if it has the fingerprints of the images of the pre-training, with which a
            classifier's images are compared.

    Returns:
        Evaluators by name. Those with an automatic interval come last, and it is a multiple of the probes' interval.
    """
    recipe, transform, test = options.recipe, options.build_part("data.view"), data.validation_or_test
    run = {"steps": recipe.steps, "batch_size": recipe.batch_size, "evaluate_every": recipe.evaluate_every}
    probes: dict[str, Evaluator] = {}
    if isinstance(options, Pretrain) and options.probes:
        sizes = options.probing
        probing = Probing(
            sizes,
            probes={name: options.build_part(f"probes.{name}") for name in options.probes},
            train=data.train,
            test=test,
            transform=transform,
            pretrained=options.encoder.checkpoint() is not None,
            automatic=interval(
                images=min(sizes.train_images, len(data.train)) + min(sizes.test_images, len(test)), **run
            ),
        )
        if is_main_process():
            print_lines(*probing.remarks)
        probes = {"probe": probing} if probing.probes else {}
    multiple = next((probe.every for probe in probes.values() if probe.every), recipe.evaluate_every)
    evaluators: dict[str, Evaluator] = {}
    automatic: dict[str, Evaluator] = {}
    display = Display.of_data(options.data)

    def built(name: str, source: Source, **needs: object) -> Evaluator:
        objects = {"source": source, "transform": transform, "display": display, **needs}
        evaluator: Evaluator = options.build_part(f"evaluators.{name}", **objects)
        return evaluator

    # Within a budget, the accuracy at the start, which is that of a random classifier, is the first to be left out.
    is_short = options.budget is not None and recipe.evaluate_every >= recipe.steps
    for name, part in options.evaluators.items():
        if isinstance(part, Supervised):
            splits = {"validation": data.validation, "test": data.test}
            sources = {split: source for split, source in splits.items() if source is not None}
            for split, source in sources.items():
                at_end = (split == "test" and len(sources) == 2) or is_short
                evaluators[split] = built(name, source, part=split, at_end=at_end, run_folder=run_folder)
        elif isinstance(part, Contrast):
            evaluators[name] = built(name, test, augment=options.build_part("data.augment"))
        elif isinstance(part, LabelFree):
            affordable = interval(images=min(part.images, len(test)), **run)
            group = automatic if part.every == AUTO else evaluators
            group[name] = built(name, test, automatic=-(-affordable // multiple) * multiple)
        else:
            evaluators[name] = built(name, test)
    return evaluators | probes | automatic
