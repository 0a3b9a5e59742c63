"""Fine-tune a pre-trained encoder as a classifier, or with objective=segmentation as a segmentation model.

Usage: ssvit finetune. The default is the newest finished run under outputs/, with its images. The same command
continues a stopped run.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit import advice
from ssvit.checkpoints.checkpoint import FINETUNE, SCRATCH
from ssvit.checkpoints.configuration import Configuration
from ssvit.checkpoints.run_folder import RunFolder, reported_run, rows
from ssvit.choices import PRETRAINED
from ssvit.config.command import Command, named
from ssvit.config.command_line import CommandLine
from ssvit.config.composed import Config
from ssvit.config.declaration import Tree
from ssvit.config.dotted import at
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.engine.processes import is_main_process
from ssvit.errors import print_lines
from ssvit.evaluation.statistics import Interval, error_of_difference, verdict
from ssvit.loading.pretrained import add_placeholders, select_checkpoint_again, with_random_weights
from ssvit.studies import comparison
from ssvit.training import budget, finetuning
from ssvit.training.options import ALIASES, Finetune, are_first_images
from ssvit.training.recipe import Recipe

if TYPE_CHECKING:
    from ssvit.training.session import Session

_FEW = 20  # labelled images of a class, below which frozen features may be better
FIRST = "finetune_shapes"  # default experiment after a pre-training on the images of the first run


def complete(config: Config) -> Config:
    """Check and complete the configuration."""
    options: Finetune = config.options
    budget.check(config)
    options.check_study()
    config = with_schedule(config)
    Tree(config.options).check()
    config = named(config, _default_name(config) if options.name is None else options.name)
    return with_random_weights(config) if options.checkpoint == SCRATCH else config


def with_schedule(config: Config) -> Config:
    """Return the configuration with the schedule for its images and weights."""
    changes, lines = finetuning.chosen_schedule(config.options, config.line.values)
    for line in lines:
        config.line.say(line)
    return config.changed(changes)


def _default_name(config: Config) -> str:
    """Return a name for the run: type of run, checkpoint, and data set if it differs from the checkpoint's."""
    options: Finetune = config.options
    trained = "segmentation" if options.objective.needs_masks else "finetune"
    prefix = "scratch" if options.checkpoint == SCRATCH else trained
    prefix = "compare" if options.compare else options.sweep or prefix
    if checkpoint := options.encoder.checkpoint():
        start = checkpoint.name
    else:
        start = getattr(options.encoder, "model", Path(config.choices["encoder"]).name)
    data = config.choices["data"]
    return "_".join([prefix, start] if data == PRETRAINED else [prefix, start, data])


def dry_run(config: Config) -> Config:
    """Print the sizes, time and memory of the run, write nothing, and return the completed configuration."""
    config = complete(config)
    config.line.announce()
    folder = RunFolder(config.options.outputs, config.options.name)
    session = budget.session_of(config, folder, FINETUNE)
    config = _planned(config, session, folder)
    options: Finetune = config.options
    session().recipes = partial(recipes, config, session())
    session().preview(options)
    if options.compare:
        for side, changes in comparison.sides(options.scratch_recipe).items():
            changed = "".join(f" {name}={value}" for name, value in changes.items())
            print(f"compare: {options.seeds} runs like this one, {side}{changed}")
    elif options.sweep:
        print(f"sweep: {len(options.table4.learning_rates) + 1} runs like this one")
    return config


def _planned(config: Config, session: Callable[[], "Session"], folder: RunFolder) -> Config:
    """Return the configuration with the schedule for its budget, and give the session the recipes of all runs."""
    options: Finetune = config.options
    if options.budget is not None and "scratch_recipe" not in config.line.typed:  # no schedule of an experiment
        rates = {name: value for name, value in options.scratch_recipe.items() if name not in budget.schedule(1)}
        config = config.changed({"scratch_recipe": rates})
    return budget.planned(config, session, folder, **finetuning.LIMITS)


def recipes(config: Config, session: "Session", seconds: float) -> list[Recipe]:
    """Return the recipes of all runs in their order.

    Args:
        config: The configuration.
        session: The session.
        seconds: Seconds of an update.
    """
    options: Finetune = config.options
    recipe = options.recipe
    if options.compare:
        earlier = _pretraining(options)
        added = _schedule(config, recipe.steps + round(earlier.seconds / seconds)) if earlier else {}
        return [recipe, recipe.changed(**{**added, **options.scratch_recipe})] * options.seeds
    if options.sweep:
        return [recipe] * (len(options.table4.learning_rates) + 1)
    compared = _without_test_images(session, config)
    session.compared_steps = compared.options.recipe.steps if compared and _holds_out(session, compared.options) else 0
    return [recipe]


def _schedule(config: Config, steps: int) -> dict[str, int]:
    """Return the schedule of a number of steps, without typed options, which the recipe contains already."""
    schedule = finetuning.schedule(steps)
    return {
        name: value for name, value in schedule.items() if name == "steps" or f"recipe.{name}" not in config.line.typed
    }


def _pretraining(options: Finetune) -> comparison.Spent | None:
    """Return what the pre-training of the checkpoint has spent, if random weights are trained for as long; or None."""
    if options.scratch != "equal_time" or "steps" in options.scratch_recipe:
        return None
    return comparison.Spent.of_checkpoint(options.encoder.checkpoint())


def run(config: Config) -> Path:
    """Check the configuration, lock the run folder, train, and return the folder."""
    config = complete(config)
    options: Finetune = config.options
    with RunFolder(options.outputs, options.name) as folder:
        start_session = budget.session_of(config, folder, FINETUNE)
        config = _planned(config, start_session, folder)
        options = config.options
        if is_main_process():
            folder.open(Configuration.of_run(config), overwrite=options.overwrite)
            config.line.announce()
            print_lines(f"{options.name}: starts from {getattr(options.encoder, 'path', 'random weights')}")
        session = start_session()
        session.recipes = partial(recipes, config, session)

        from ssvit.evaluation import measured

        verdicts: list[str] = []

        def keep(path: Path, options: Finetune, rows: list[dict[str, Any]]) -> None:
            """Keep the result of a classifier with its images, unless they are held out of the training images."""
            if not options.objective.needs_labels:
                return
            scores, data = comparison.scored(rows, comparison.TEST_OR_VALIDATION), session.data(options)
            part, images = data.test_or_validation
            if options.development is None and scores and scores[-1].part == part and is_main_process():
                method = measured.SCRATCH if options.checkpoint == SCRATCH else measured.TUNED
                name = str(path.relative_to(options.outputs))
                result, count = {name: {method: (scores[-1].accuracy, None)}}, len(data.train)
                images_of = options.outputs, images, part
                verdicts.append(measured.keep(*images_of, result, train_images=count, paths={name: str(path)})[0])

        def trained(name: str, changes: Mapping[str, object]) -> list[dict[str, Any]]:
            changed = config.changed(changes)
            changed = with_random_weights(changed) if changed.options.checkpoint == SCRATCH else changed
            trained_rows = session.run(name, changed.options, Configuration.of_run(changed))
            keep(folder.path / name, changed.options, trained_rows)
            return trained_rows

        if options.compare:
            pretraining, batch_size = _pretraining(options), options.recipe.batch_size

            def longer(finetuned: comparison.Rows) -> dict[str, object]:
                """Return the schedule with which random weights are trained for the time of both stages."""
                after = comparison.Spent.on(finetuned, batch_size, last=options.recipe.steps)
                if pretraining is None or not after.seconds:
                    return {}
                steps = round(after.images / batch_size * (1 + pretraining.seconds / after.seconds))
                return {f"recipe.{name}": value for name, value in _schedule(config, steps).items()}

            comparison.compare_sides(
                trained, comparison.sides(options.scratch_recipe), seed=options.recipe.seed, seeds=options.seeds,
                folder=folder.path, earlier_gains=options.earlier_gains, longer=longer,
            )  # fmt: skip
        elif options.sweep:
            comparison.choose(trained, folder=folder.path, **options.table4.values())
        else:
            session.train(options, folder.path)
            finetuned = rows(folder.path)
            keep(folder.path, options, finetuned)
            if without_test := _without_test_images(session, config):
                _check_frozen(session, without_test, finetuned)
                if is_main_process():
                    print_lines(f"CPU time of this run and the comparison: {session.spent}")
        if is_main_process():
            command = advice.after_finetuning(config, reported_run(folder.path))
            advice.print_next(command, *verdicts[-1:])
    return folder.path


def _without_test_images(session: "Session", config: Config) -> Config | None:
    """Return the configuration of a run without test images, if frozen features are compared with fine-tuning.

    Half of the training images are held out unless there are validation images.
    """
    options: Finetune = config.options
    needed = options.check_frozen and options.objective.needs_labels and options.is_evaluated
    if not needed or options.checkpoint == SCRATCH:
        return None
    from ssvit.data.sources.base import is_multi_label

    train, is_study = session.data(options).train, options.development is not None
    if is_study or len(train) >= _FEW * len(train.classes) or train.labels is None or is_multi_label(train.labels):
        return None
    changed = config.changed({"development": 0.5})
    changed = changed.changed(finetuning.chosen_schedule(changed.options, changed.line.values)[0])
    return None if changed.options.recipe.batch_size > len(session.data(changed.options).train) else changed


def _holds_out(session: "Session", options: Finetune) -> bool:
    """Return whether a run without test images has other validation images than a run with them."""
    return session.data(options).validation is not session.data(options.changed(development=None)).validation


def _check_frozen(session: "Session", config: Config, finetuned: comparison.Rows) -> None:
    """Print whether ridge regression on frozen features is better than fine-tuning, measured without test images.

    Args:
        session: The session.
        config: The configuration of `_without_test_images`.
        finetuned: Rows of the run on all training images, which are used if no training images are held out.
    """
    options: Finetune = config.options
    is_halved = _holds_out(session, options)
    if (frozen := session.frozen(options)) is None:
        if is_main_process():
            print_lines("few labels: not compared with frozen features, which requires two labels of each class")
        return
    if is_halved:
        finetuned = session.run("half", options, Configuration.of_run(config))
    (*_, tuned) = comparison.scored(finetuned, comparison.VALIDATION_OR_TEST)
    if tuned.images is None or not is_main_process():
        return
    images = "held-out training" if is_halved else "validation"
    error = error_of_difference(frozen, (tuned.accuracy, tuned.images))
    words = verdict(Interval.around(frozen[0] - tuned.accuracy, error))
    advice = "; ssvit evaluate measures it on the test images" if frozen[0] > tuned.accuracy else ""
    print_lines(
        f"few labels: on {tuned.images} {images} images, ridge regression on frozen features "
        f"({100 * frozen[0]:.1f} %) is {words} fine-tuning ({100 * tuned.accuracy:.1f} %){advice}"
    )


def before(line: CommandLine) -> None:
    """Add the checkpoint's encoder and images; on those of the first run, also the comparison with random weights."""
    select_checkpoint_again(line)
    typed = line.typed
    named = {"data", "experiment", "objective", "compare", "sweep"} & typed.keys() or typed.get("checkpoint") == SCRATCH
    start = line.start
    if start and not named and are_first_images(start.choices.get("data"), at(start.groups, "data.images")):
        line.say(f"experiment={FIRST}: the rendered shapes, with few labels")
        line.implied["experiment"] = FIRST


command = Command(
    "finetune",
    run,
    expansions=SHORT_FORMS,
    before=before,
    stand_in=add_placeholders,
    aliases=ALIASES,
    options=Finetune,
    dry_run=dry_run,
    results="ssvit.studies.sweep.Sweep",
    common=(
        "checkpoint", "name", "budget", "overwrite", "compare", "seeds", "sweep", "data.root", "data.image_size",
        "objective.trained", "objective.lora", "objective.mixup", "recipe.steps", "recipe.batch_size", "recipe.lr",
        "recipe.warmup", "recipe.seed", "recipe.evaluate_every", "subset.images", "launch.devices", "workers",
    ),
)  # fmt: skip
