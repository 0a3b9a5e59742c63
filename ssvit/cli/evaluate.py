"""Measure frozen features by probes: ssvit evaluate checkpoint=PATH probes=[knn]"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit import atomic_io
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.finding import open_checkpoint
from ssvit.checkpoints.pretrained import offer, stand_in
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Run
from ssvit.data import arguments
from ssvit.evaluation import against, baselines, features_options
from ssvit.evaluation.against import Other
from ssvit.evaluation.options import Evaluate
from ssvit.evaluation.significance import NOTHING_YET
from ssvit.models.timm_options import ALIASES as TIMM_ALIASES
from ssvit.options import folder_to_write, pair, print_lines, within
from ssvit.progress import progress

if TYPE_CHECKING:
    from ssvit.evaluation.scores import Scores, Split

_PAIRS = 1000  # of near-duplicates that are named in a file
_EXAMPLES = 3  # images in both sets that are named
# What may be typed for an option: a short form of its group.
_ALIASES = {"probes=": "probe@probes=", **TIMM_ALIASES}


def run(config: Config) -> Path | None:
    """Print how far the features are above the baselines; write a report into a folder, or the numbers into a file.

    Returns what was written, None where that is nothing.
    """
    options: Evaluate = config.options
    checkpoint, readings, others = check(options)
    if options.report:
        folder = Path(options.output or checkpoint.home(options.outputs) / features_options.FOLDER)
        folder_to_write("output", folder)
    config.line.announce()

    from ssvit.evaluation import frozen, report
    from ssvit.evaluation.conclusion import conclude
    from ssvit.evaluation.scores import score
    from ssvit.evaluation.side_by_side import SideBySide
    from ssvit.training import runtime
    from ssvit.training.recipe import Recipe

    probes = {name: config.build(f"probes.{name}") for name in options.chosen}
    data = frozen.images(config, probes)
    encoders = frozen.encoders_of(config, checkpoint, readings, others)
    splits = runtime.in_all_processes(
        Recipe(precision=options.precision),
        options.fabric,
        lambda fabric: frozen.read(options, data, encoders, probes, fabric),
    )
    if splits is None:
        return None
    scores = [
        score(name, probe, splits[name], progress(probe.title, " feature sets")) for name, probe in probes.items()
    ]
    split = next(iter(splits.values()))
    feature_sets = tuple(dict.fromkeys(name for split in splits.values() for name in split.own))
    compared = SideBySide(scores, against.groups(checkpoint, others, baselines=options.baselines))
    measured = facts(options, checkpoint, split, readings[0].pooling, others)
    if split.duplicates is not None:
        measured["near_duplicates"] = near_duplicates(split, scores)
    first, *more = report.data(measured)
    print_lines(f"{measured['checkpoint']}: {first}", *more)
    if len(scores) == 1:
        print_lines(*describe(scores[0], split).split("\n"))
    if options.report:
        figures = report.figures(splits, scores, compared)
        by_name = {reading.name: reading for reading in readings}  # features of patches have no such command
        best = next((by_name[one.best] for one in scores if one.best in by_name), None)
        commands = [] if best is None else commands_of(best, str(checkpoint.path), config.line.command)
        written = report.write(
            folder,
            facts=measured,
            scores=scores,
            own=feature_sets,
            compared=compared,
            figures=figures,
            commands=commands,
        )
        if len(scores) > 1:
            print_lines(*table(report.summary(scores)).split("\n"))
        print_lines(*conclude(scores, compared), *compared.sentences())
        print_lines(f"report: {', '.join(map(str, written))}")
        if best is not None:
            print_lines(f"{best.name} in other commands:", *(f"  {line}" for line in commands))
        return folder
    if options.output is None:
        return None
    numbers = {name: getattr(scores[0], name) for name in ("options", "best", "chosen_by", "numbers")}
    atomic_io.replace(Path(options.output), (json.dumps(measured | numbers, indent=1) + "\n").encode())
    return Path(options.output)


def commands_of(reading: features_options.Reading, checkpoint: str, command: Callable[[str], str]) -> list[str]:
    """Return the commands that write these features, store them for retrieval, and fine-tune their encoder.

    command: spells a command by its name.
    """
    encoder = f"checkpoint={shlex.quote(checkpoint)}"
    before = " features.norm=before" if reading.norm == "before" else ""
    features = f"{encoder} features.layer={reading.layer} features.pooling={reading.pooling}{before} data=PATH"
    return [
        f"{command('embed')} {features} output=features.npz",
        f"{command('retrieve')} action=index store=STORE {features}",
        f"{command('finetune')} {encoder}",
    ]


def check(options: Evaluate) -> tuple[Checkpoint, list[features_options.Reading], list[Other]]:
    """Return the checkpoint, which of its features are evaluated, and what it is compared with.

    Raises:
        OptionError: The encoder, the images and the features do not fit each other.
        UserError: A checkpoint cannot be read.
    """
    Run.of({name: getattr(options, name) for name in ("encoder", "data", "probes")}).check()
    checkpoint = open_checkpoint(options.encoder["path"], options.encoder)
    with within("features"):
        readings = options.features.readings(checkpoint.encoder)
    return checkpoint, readings, against.others(options, checkpoint)


def facts(
    options: Evaluate, checkpoint: Checkpoint, split: "Split", pooling: str, others: Sequence[Other]
) -> dict[str, Any]:
    """What was measured, for a file, and what the checkpoint is compared with.

    copies: test images that are training images too, and the first of them.
    """
    from ssvit.evaluation.features import copies

    train, test = split.train, split.test
    found = copies(train, test)
    examples = [{"test": test.picture(one), "train": train.picture(other)} for one, other in found[:_EXAMPLES]]
    return {
        "checkpoint": options.encoder["path"],
        "checksum": checkpoint.checksum,
        "data": named(options.data),
        "train_images": len(train),
        "test_images": len(test),
        "measured_on": split.part,
        "chance": split.chance,
        "classes": list(split.classes),
        **({"multi_label": True} if split.is_multi_label else {}),
        "features": {**options.features.values(), "pooling": pooling},
        "precision": options.precision,
        "image_size": list(pair("data.view.size", options.data["view"].get("size"))),
        "against": {other.name: other.facts for other in others},
        "versions": {name: version(name) for name in ("ssvit", "torch")},
        "copies": {"test_images_in_train": len(found), "examples": examples},
    }


def near_duplicates(split: "Split", scores: "Sequence[Scores]") -> dict[str, Any]:
    """Test images that are nearly the same as a training image, and what the first probe finds without them."""
    from ssvit.evaluation.duplicates import without

    pairs = split.duplicates or ()
    named = [
        {"test": split.test.picture(pair.test), "train": split.train.picture(pair.train), "cosine": pair.cosine}
        for pair in pairs[:_PAIRS]
    ]
    per_image = {one.title: one.per_image[baselines.OWN] for one in scores[:1] if baselines.OWN in one.per_image}
    kept = {probe: without(values, pairs) for probe, values in per_image.items() if len(values) == len(split.test)}
    return {"test_images": len(pairs), "without": kept if pairs else {}, "pairs": named}


def named(data: Mapping[str, Any]) -> str:
    """What a data set is called, and where it lies: cifar10 in /data, synthetic."""
    source = data["source"]
    name = str(source.get("name", source["_target_"].rpartition(".")[2]))
    return f"{name} in {data['root']}" if data.get("root") else name


def describe(found: "Scores", split: "Split") -> str:
    """What one probe found, for the console: a row for each feature set, the chosen one, whether it is above chance."""
    rows = [["features", *found.columns]]
    for name, values in found.values.items():
        rows.append([name, *map(_percent, values, found.deviations[name])])
    lines = [table(rows)]
    if len(split.own) > 1:
        lines.append(f"best: {found.best}, chosen by {found.chosen_by}, without {split.part} labels")
    if not found.tells:
        lines.append(f"{found.best}: not {NOTHING_YET}")
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns, the first left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row, widths[1:], strict=True))])
        for first, *row in rows
    )


def _percent(share: float, deviation: float | None = None) -> str:
    """0.523 -> 52.3 %."""
    return f"{100 * share:.1f} %" + (f" ± {100 * deviation:.1f}" if deviation is not None else "")


command = Command(
    "evaluate",
    run,
    expand=arguments.expand,
    before=offer,
    stand_in=stand_in,
    options=Evaluate,
    aliases=_ALIASES,
    common=(
        "checkpoint", "against", "data.root", "data.image_size", "features", "baselines", "duplicates", "train_images",
        "test_images", "output", "protocol", "k", "shots", "seeds", "l2", "method", "held_out", "standardize", "seed",
        "workers",
    ),
)  # fmt: skip
