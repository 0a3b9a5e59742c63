"""Find the checkpoint that a user requests: one of ssvit, or a file of foreign weights. No torch."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ssvit.checkpoints import manifest
from ssvit.checkpoints.checkpoint import FINETUNE, PRETRAIN, SCRATCH, Checkpoint, checkpoint_folder
from ssvit.checkpoints.configuration import Configuration
from ssvit.engine.atomic_io import seal
from ssvit.errors import OptionError, UserError, within
from ssvit.exchange.options import FOREIGN_OPTIONS, GRAPH, HUB, SUFFIXES, WEIGHTS
from ssvit.values import value_of

NEWEST = "newest"
_GRAPH = ".onnx"  # suffix of an exported graph


def open_checkpoint(
    path: str | Path, options: Mapping[str, object] | None = None, *, graphs: bool = False
) -> Checkpoint:
    """Open the checkpoint at a path: its folder, the folder of its run (for the newest), or a file.

    Args:
        path: The path, or hf://OWNER/NAME or timm:NAME for foreign weights on the Hugging Face Hub.
        options: As for `ssvit.exchange.reading.read_foreign`.
        graphs: Whether the path may be an exported graph, or the folder of one.

    Raises:
        OptionError: There is no checkpoint, or an option is required or not permitted.
        CheckpointError: The checkpoint is damaged.
        ForeignError: The layout of the file is unknown, or the graph is damaged.
        UserError: An exported graph requires onnxruntime.
    """
    path = _locate(path, graphs)
    set_options = {name: options[name] for name in FOREIGN_OPTIONS if options and options.get(name) is not None}
    if path.is_file() and path.suffix != _GRAPH:
        # The JSON files next to the file describe it.
        described = [(file, file.stat()) for file in (path, *sorted(path.parent.glob("*.json")))]
        version = tuple((file.name, status.st_size, status.st_mtime_ns) for file, status in described)
        return _open_foreign(path, version, json.dumps(set_options, default=list))
    for name, value in set_options.items():
        raise OptionError(name, value, "must not be set: a checkpoint of ssvit contains it")
    if not path.is_file():
        return Checkpoint(path, manifest.read_manifest(path))
    from ssvit.exchange import files, graph

    session, metadata = graph.read_graph(path)
    return Checkpoint(path, {**metadata, "seal": files.digest(path)}, graph=session)


@lru_cache(maxsize=4)
def _open_foreign(path: Path, version: tuple[object, ...], options: str) -> Checkpoint:
    """Return a foreign file with the entries of a manifest, cached by names, sizes and times of the files."""
    from ssvit.exchange import files, reading

    foreign = reading.read_foreign(path, json.loads(options))
    entries = {"step": 0, "encoder": foreign.arguments, "notes": foreign.notes, **foreign.entries}
    checksum = seal({**entries, "file": files.digest(path)})
    return Checkpoint(path, {**entries, "name": foreign.name, "seal": checksum}, foreign.weights)


def find_checkpoint(
    checkpoint: str,
    *,
    outputs: str,
    stage: str,
    say: Callable[[str], None],
    options: Mapping[str, object] | None = None,
    precision: str | int | None = None,
) -> Checkpoint:
    """Find the checkpoint that the option checkpoint= selects.

    Args:
        checkpoint: A path as for `open_checkpoint`, or newest for the last finished run of a stage.
        outputs: Folder of all runs.
        stage: Stage of the run for newest: pretrain or finetune.
        say: Function that prints a line, which names the newest run.
        options: As for `open_checkpoint`.
        precision: Option of a command that applies the model to images, which accepts an exported graph too; None for
            other commands.

    Raises:
        OptionError: There is no checkpoint at the path, or an exported graph has other outputs or another precision.
        UserError: No run of the stage is finished.
    """
    graphs = precision is not None
    if checkpoint == NEWEST and outputs in ("", "null"):
        raise OptionError("outputs", value_of(outputs), "must be the folder of all runs")
    path = _newest(Path(outputs), stage, say) if checkpoint == NEWEST else _locate(checkpoint, graphs)
    with within("encoder"):  # group that contains `options`
        opened = open_checkpoint(path, options, graphs=graphs)
    if opened.graph is not None and opened.has_segmenter:
        raise OptionError("checkpoint", path, "must not be an exported segmentation model, which onnxruntime opens")
    if opened.graph is not None:
        if opened.has_classifier != (stage == FINETUNE):
            expected = "classifier" if stage == FINETUNE else "encoder without a classifier"
            raise OptionError("checkpoint", path, f"must be an exported {expected}")
        if str(precision) not in ("auto", str(opened.precision)):
            raise OptionError("precision", precision, f"must be auto: the graph has precision {opened.precision}")
    return opened


def _locate(checkpoint: str | Path, graphs: bool = False) -> Path:
    """Return the folder of the checkpoint at a path, or the file, which is downloaded if necessary.

    Raises:
        OptionError: There is no checkpoint.
    """
    path = Path(str(checkpoint))
    if str(checkpoint).startswith(HUB):
        from ssvit.exchange import hub

        path = hub.fetch(str(checkpoint))
    try:
        if (folder := checkpoint_folder(path)) is not None:
            return folder
        if graphs and (path / GRAPH).is_file():
            return path / GRAPH
        if path.is_file():
            suffixes = (*SUFFIXES, _GRAPH) if graphs else SUFFIXES
            if path.suffix not in suffixes:
                raise OptionError("checkpoint", path, f"must be a file that ends in {', '.join(suffixes)}")
            return path
        if not path.is_dir():
            expected = "no such folder; must be the folder of a checkpoint (step_…) or of its run, or a file of weights"
            raise OptionError("checkpoint", checkpoint, expected)
        weights = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)
        if WEIGHTS in weights or len(weights) == 1:  # a folder as Hugging Face's libraries write it
            return path / (WEIGHTS if WEIGHTS in weights else weights[0])
        hint = f"; name one of its files, such as {weights[0]}" if weights else ""
        raise OptionError("checkpoint", checkpoint, f"contains no checkpoint (a folder step_…){hint}")
    except OSError as error:
        raise OptionError("checkpoint", checkpoint, f"cannot be read ({error.strerror})") from None


class _Finished(NamedTuple):
    """Describe a finished run; runs are ordered by preference for checkpoint=newest.

    Attributes:
        pretrained: Whether the run is no fine-tuning of random weights.
        written: Time of its last checkpoint.
        path: Folder of that checkpoint.
        start: Checksum of the initial weights, or scratch.
        images: Choice of the data set, and its folder.
    """

    pretrained: bool
    written: float
    path: Path
    start: object
    images: tuple[object, object]


def _finished(outputs: Path, stage: str) -> Iterator[_Finished]:
    """Yield the finished runs of a stage.

    Damaged runs, control runs of a comparison, and runs within another one that have held-out images are left out.
    """
    for file in outputs.rglob("config.yaml"):
        try:
            path = manifest.complete(file.parent)[-1]
            metadata, configuration = manifest.read_manifest(path), Configuration.read(file)
            config, start = configuration.values, metadata.get("start")
            images = configuration.choices.get("data"), (config.get("data") or {}).get("root")
            is_finished = metadata["step"] == config["recipe"]["steps"]
            written = (path / "manifest.json").stat().st_mtime
        except (UserError, OSError, LookupError, TypeError):
            continue
        from_scratch = stage == FINETUNE and start == SCRATCH
        is_control = from_scratch and config.get("compare")
        is_part = config.get("sweep") or (file.parent.parent / "config.yaml").is_file()
        is_trial = is_part and config.get("development") is not None
        if metadata.get("stage") == stage and is_finished and not is_control and not is_trial:
            yield _Finished(not from_scratch, written, path, start, images)


def runs_on(outputs: str | Path, data: str, root: object, start: str) -> list[Path]:
    """Return the newest finished pre-training from random weights on a data set, and the newest from some weights.

    A run on a folder that contains the data set counts.

    Args:
        outputs: Folder of all runs.
        data: Choice of the data set.
        root: Its folder.
        start: Checksum of the weights.

    Returns:
        The folders of at most two runs.
    """
    runs = [run for run in _finished(Path(outputs), PRETRAIN) if _contains(run.images, (data, root))]
    of_starts = ([run for run in runs if run.start == origin] for origin in (SCRATCH, start))
    return [max(found, key=lambda run: run.written).path.parent for found in of_starts if found]


def _contains(first: tuple[object, object], second: tuple[object, object]) -> bool:
    """Return whether two data sets, each a choice and a folder, are equal or the folder of the first has the second."""
    (data, root), (other, folder) = first, second
    inside = root and folder and Path(str(folder)).absolute().is_relative_to(Path(str(root)).absolute())
    return first == second or (data == other and bool(inside))


def _newest(outputs: Path, stage: str, say: Callable[[str], None]) -> Path:
    """Return the last checkpoint of the newest finished run of a stage, and print its path."""
    runs = list(_finished(outputs, stage))
    if not runs:
        hint = f"run the command {stage} first, or set checkpoint=PATH"
        raise UserError(f"checkpoint={NEWEST}: {outputs} contains no finished run of {stage}; {hint}")
    path = max(runs, key=lambda run: run[:3]).path
    say(f"checkpoint={NEWEST}: {path} (of {len(runs)} finished runs of {stage})")
    return path
