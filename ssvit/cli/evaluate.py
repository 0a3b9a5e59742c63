"""Measure frozen features by probes.

Usage: ssvit evaluate checkpoint=PATH probes=[knn].
"""

import json
import shlex
from pathlib import Path

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.config import composition
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Tree
from ssvit.data.sources.base_options import SHORT_FORMS, ImageFiles
from ssvit.engine import atomic_io
from ssvit.engine.progress import progress
from ssvit.errors import aligned, folder_to_write, pair, print_lines, within
from ssvit.evaluation.options import FeatureSpec
from ssvit.evaluation.report import against
from ssvit.evaluation.report.folder import folder_of
from ssvit.evaluation.report.options import Evaluate
from ssvit.exchange.options import FOREIGN_OPTIONS
from ssvit.loading.finding import runs_on
from ssvit.loading.pretrained import add_placeholders, select_checkpoint
from ssvit.values import text_of

# Options of a data set that a checkpoint sets.
_OF_ENCODER = ("image_size", "channels", "range", "background", "mean", "std")
_FOREIGN = rf"encoder\.({'|'.join(FOREIGN_OPTIONS)})$"


def run(config: Config) -> Path | None:
    """Print the features' results with their baselines, and write a report to a folder or the numbers to a file.

    Returns the path of the output, or None without output.
    """
    options: Evaluate = config.options
    Tree(options).check()
    checkpoint = options.encoder.checkpoint()
    with within("features"):
        specs = options.features.specs(checkpoint.encoder)
    if options.against is None and options.report and checkpoint.foreign:
        root = getattr(options.data, "root", None)
        found = runs_on(options.outputs, config.choices["data"], root, checkpoint.checksum)
        if found:
            line = f"against={text_of([*map(str, found)])}: the newest runs on these images; against=[] leaves them out"
            config.line.say(line)
        options = options.changed(against=[*map(str, found)])
    if isinstance(options.data, ImageFiles):
        config.line.say(options.data.view.note)
    others = against.others(options, checkpoint)
    if options.report:
        choice = config.line.origin("data", config.choices["data"])
        folder = Path(options.output or folder_of(checkpoint, options.data, choice, options.outputs))
        folder_to_write("output", folder)
    config.line.announce()

    from ssvit.evaluation.report import comparison, frozen, page
    from ssvit.evaluation.report.figures import figures
    from ssvit.evaluation.report.scores import score
    from ssvit.training import launch
    from ssvit.training.recipe import Recipe

    probes = {name: options.build_part(f"probes.{name}") for name in options.chosen}
    data = frozen.images(options, probes)
    encoders = frozen.encoders_of(options, data, checkpoint, specs, others)
    splits = launch.in_all_processes(
        Recipe(precision="32-true"),  # the encoders have a precision of their own
        options.fabric,
        lambda processes: frozen.features_of_probes(options, encoders, probes, processes.device),
    )
    if splits is None:
        return None
    scores = [
        score(name, probe, splits[name], progress(probe.title, " feature sets")) for name, probe in probes.items()
    ]
    split = next(iter(splits.values()))  # splits of the first probe
    feature_sets = tuple(dict.fromkeys(name for split in splits.values() for name in split.feature_sets))
    standings = comparison.compare_encoders(scores, checkpoint.name)
    summary = comparison.comparison_table(scores, standings)
    start = next((other.name for other in others if other.checksum == checkpoint.manifest.get("start")), None)
    conclusion = comparison.conclude(scores, standings, start)
    metadata = page.metadata_of(options, checkpoint, split, scores, others)
    first, *more = page.data(metadata)
    print_lines(f"{metadata['checkpoint']}: {first}", *more)
    if len(scores) == 1:
        print_lines(*aligned(page.scores_table(scores[0], feature_sets)), page.choice(scores[0], feature_sets))
    print_lines(*(conclusion[:1] if start else ()), *aligned(summary), *(conclusion[1:] if start else conclusion))
    if options.report:
        by_name = {spec.name: spec for spec in specs}  # the commands do not apply to features of patches
        best = next((by_name[result.best] for result in scores if result.best in by_name), None)
        commands = [] if best is None else next_commands(best, checkpoint, config)
        written = page.write(
            folder,
            metadata=metadata,
            scores=scores,
            feature_sets=feature_sets,
            figures={} if options.figures == "none" else figures(splits, scores, standings),
            summary=summary,
            standings=standings,
            conclusion=conclusion,
            commands=commands,
        )
        print_lines(f"report: {', '.join(map(str, written))}", *(f"next: {command}" for command in commands[-1:]))
        return folder
    if options.output is None:
        return None
    numbers = {name: getattr(scores[0], name) for name in ("options", "best", "chosen_by", "numbers")}
    atomic_io.replace(Path(options.output), (json.dumps(metadata | numbers, indent=1) + "\n").encode())
    return Path(options.output)


def next_commands(spec: FeatureSpec, checkpoint: Checkpoint, config: Config) -> list[str]:
    """Return the commands that write the features, index them for retrieval, and fine-tune their encoder.

    The commands read the same images as the command of `config`.

    Args:
        spec: The layer and pooling of the features.
        checkpoint: Checkpoint of the encoder.
        config: Configuration of the command.
    """
    line, images = config.line, data_options(config)
    foreign = line.retyped(_FOREIGN)
    encoder = [f"checkpoint={text_of(checkpoint.path)}", *foreign]
    norm = ["features.norm=before"] if spec.norm == "before" else []
    size, trained = config.values["data"]["image_size"], checkpoint.encoder["image_size"]
    is_default = checkpoint.describes_images and pair("image_size", size) == pair("image_size", trained)
    resized = [] if is_default else [f"image_size={text_of(size)}"]
    features = [*encoder, f"features.layer={spec.layer}", f"features.pooling={spec.pooling}", *norm, *resized]
    features += [option for option in images if not option.startswith("data.image_size=")]
    commands = {"finetune": [*encoder, *(images if "data" in line.typed else [])]}
    if config.options.encoder.loaded().channels == checkpoint.encoder["channels"]:  # the others do not convert them
        embed, retrieve = [*features, "output=features.npz"], ["action=index", "store=store", *features]
        commands = {"embed": embed, "retrieve": retrieve, **commands}
    return [" ".join([line.command(name), *map(shlex.quote, options)]) for name, options in commands.items()]


def data_options(config: Config) -> list[str]:
    """Return the typed options of the data set, or those that select the images of the checkpoint's run."""
    line, values = config.line, config.values["data"]
    choice = line.start.choices.get("data") if line.start else None
    if "data" in line.typed or choice is None:
        return line.retyped(r"data(\.|$)")
    defaults = composition.group(line, "data", {"data": choice})
    changed = {
        f"data.{name}": value
        for name, value in values.items()
        if not isinstance(value, dict) and value != defaults.get(name) and name not in _OF_ENCODER
    }
    return [f"data={choice}", *(f"{name}={text_of(value)}" for name, value in changed.items())]


command = Command(
    "evaluate",
    run,
    expansions=SHORT_FORMS,
    before=select_checkpoint,
    stand_in=add_placeholders,
    options=Evaluate,
    aliases={"probes": "probe@probes"},
    common=(
        "checkpoint", "against", "data.root", "data.image_size", "features", "baselines", "duplicates", "train_images",
        "test_images", "output", "k", "shots", "seeds", "l2", "method", "held_out", "standardize", "seed",
        "workers",
    ),
)  # fmt: skip
