"""Choose the command that follows a command, complete as it is printed, and the options that may help. No torch."""

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ssvit.config import composition
from ssvit.config.command_line import CONFIGS, CommandLine
from ssvit.config.composed import Config
from ssvit.data.sources.base_options import DataSet
from ssvit.errors import pair, print_lines
from ssvit.exchange.options import FOREIGN_OPTIONS
from ssvit.models.encoder_options import PATCHES
from ssvit.training.options import Pretrain, are_first_images
from ssvit.values import text_of

if TYPE_CHECKING:
    from ssvit.checkpoints.checkpoint import Checkpoint
    from ssvit.evaluation.options import FeatureSpec
    from ssvit.evaluation.report.options import Evaluate
    from ssvit.retrieval.options import Retrieve

# Options of a data set that a checkpoint sets.
_OF_ENCODER = ("image_size", "channels", "range", "background", "mean", "std")
_FOREIGN = rf"encoder\.({'|'.join(FOREIGN_OPTIONS)})$"


def print_next(command: str, *sentences: str) -> None:
    """Print the last lines of a command: its conclusions, and the next command."""
    print_lines(*sentences, f"next: {command}")


def written(line: CommandLine, name: str, options: Iterable[str]) -> str:
    """Return a command with some options, for the folder of runs of the command of `line`."""
    return " ".join([line.command(name), *map(shlex.quote, [*options, *line.retyped("outputs$")])])


def after_pretraining(config: Config, folder: Path, *, labelled: bool) -> str:
    """Return the command after a pre-training in a folder: the experiment that belongs to it, or a general one."""
    options: Pretrain = config.options
    choices, start = config.choices, [f"checkpoint={folder}"]
    if are_first_images(choices["data"], config.values["data"].get("images")):
        return written(config.line, "finetune", start)
    experiment = f"finetune_{choices.get('experiment')}"
    if (CONFIGS / "experiment" / f"{experiment}.yaml").is_file():
        root = getattr(options.data, "root", None)
        roots = [] if root is None else [f"data.root={text_of(root)}"]
        return written(config.line, "finetune", [f"experiment={experiment}", *start, *roots])
    return written(config.line, "evaluate" if labelled else "visualize", start)


def after_finetuning(config: Config, folder: Path) -> str:
    """Return the command after a fine-tuning in a folder: the classes of its images, or its attention."""
    start, is_folder = [f"checkpoint={folder}"], config.line.origin("data", config.choices["data"]) == "folder"
    images = [str(config.options.data.root)] if is_folder else []
    return written(config.line, "predict" if images else "visualize", [*start, *images])


def after_evaluation(spec: "FeatureSpec", checkpoint: "Checkpoint", config: Config) -> list[str]:
    """Return the commands that write the features, index them for retrieval, and fine-tune their encoder.

    The commands read the same images as the command of `config`.

    Args:
        spec: The layer and pooling of the features.
        checkpoint: Checkpoint of the encoder.
        config: Configuration of the command.
    """
    line, images = config.line, _data_options(config)
    encoder = [f"checkpoint={text_of(checkpoint.path)}", *line.retyped(_FOREIGN)]
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
    return [written(line, name, options) for name, options in commands.items()]


def tuning(path: str, config: Config) -> str:
    """Return the command that fine-tunes other weights on the images of an evaluation, in their usual image size."""
    images = (option for option in _data_options(config) if not option.startswith("data.image_size="))
    return written(config.line, "finetune", [f"checkpoint={text_of(path)}", *images])


def _data_options(config: Config) -> list[str]:
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


def after_retrieval(config: Config, pooling: str) -> str:
    """Return a query of the store by the same pictures; for a store of patches, the command for anomaly scores.

    Args:
        config: Configuration of the command.
        pooling: Pooling of the features.
    """
    options: Retrieve = config.options
    line, folder = config.line, text_of(options.store)
    name, store, query = "retrieve", ["action=query", f"store={folder}"], "|k|standardize"
    if pooling == PATCHES:  # which are not searched by pictures
        name, store, query = "embed", [f"anomaly={folder}", "output=anomalies.parquet"], ""
    repeated = line.retyped(rf"(checkpoint|data|images|split|window|overlap{query})$|(encoder|data)\.")
    return written(line, name, [*store, *repeated, "sheet=sheet.png", *line.arguments])


def improvements(options: "Evaluate", checkpoint: "Checkpoint") -> str:
    """Return a sentence on the options that may improve the features of a checkpoint on the images of an evaluation."""
    from ssvit.data.sources import rasters

    own, images, size = checkpoint.describes_images, options.data, min(options.data.view.size)
    sample = images.sample(16) if isinstance(images, DataSet) else None
    has_detail = (rasters.median_side(sample) or 0) > size
    applicable = {
        "existing weights (ssvit evaluate checkpoint=WEIGHTS)": own,
        f"a data.image_size above {size}": has_detail,
        "more recipe.steps": own,
        "standardised features (probes=[knn_standardized])": "knn_standardized" not in options.chosen,
    }
    listed = ", ".join(name for name, applies in applicable.items() if applies)
    return f"Options that may help, in this order: {listed}." if listed else ""
