"""Build the feature extractor of the commands that store image features; torch is imported only when it is built."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ssvit.atomic_io import read_json
from ssvit.checkpoints.checkpoint import PRETRAIN, Checkpoint
from ssvit.checkpoints.configuration import Configuration, ConfigurationError
from ssvit.config.command_line import CommandLine
from ssvit.config.composed import Config
from ssvit.config.declaration import find as find_options
from ssvit.data.decode_options import PixelFormat, bands
from ssvit.data.sources.base_options import Images
from ssvit.evaluation.features_options import AUTO, FOLDER, Features, Reading, reading_of
from ssvit.loading.encoder_options import LoadEncoder, eval_transform, pixel_format
from ssvit.loading.finding import find
from ssvit.options import within
from ssvit.retrieval.options import Pictures, encoder_of

if TYPE_CHECKING:
    from ssvit.data.sources.base import Data
    from ssvit.retrieval.gallery import Describer

_FIRST = (0, 1, 2)  # channels


def check(config: Config, *, store: str | None = None) -> "tuple[Checkpoint, Callable[..., Describer], PixelFormat]":
    """Resolve the checkpoint and the feature reading (one layer) of a command on pictures.

    Args:
        config: Composed configuration whose options are a `Pictures`.
        store: Folder of an existing store; its features determine layer and pooling where the options leave them open.

    Returns:
        The checkpoint, a function that loads the encoder and returns a `Describer` (it takes keyword arguments of that
        class), and the pixel format of the encoder's input.
    """
    options: Pictures = config.options
    encoder, say = options.encoder.values(), config.line.say
    checkpoint = find(options.checkpoint, outputs=options.outputs, stage=PRETRAIN, options=encoder, say=say)
    layer, pooling, norm = options.features.layer, options.features.pooling, options.features.norm
    chosen, origin = _chosen(options, checkpoint, store)
    if layer == AUTO:
        layer, origin = chosen.layer if chosen else "last", f" ({origin})"
    else:
        origin = ""
    with within("features"):
        features = Features(layer=layer, pooling=pooling or (chosen.pooling if chosen else None), norm=norm)
        found = features.readings(checkpoint.encoder)
    say(f"features: layer {found[0].layer} of {checkpoint.encoder.get('depth', 1)}, {found[0].pooling}{origin}")
    transform, pixels = eval_transform(checkpoint), pixel_format(checkpoint)
    shown = _shown(options.data, checkpoint)
    bands("data.shown", shown, pixels.channels)

    def make(**describing: Any) -> "Describer":
        from ssvit.evaluation.features import Frozen
        from ssvit.figures.display import Display
        from ssvit.loading.encoder import load_encoder
        from ssvit.retrieval.gallery import Describer

        mean, std = checkpoint.encoder["mean"], checkpoint.encoder["std"]
        display = Display.of_pixels(pixels, mean=mean, std=std, shown=shown)
        loaded = load_encoder(LoadEncoder(path=checkpoint.path, **encoder))
        frozen = Frozen(loaded, found, identity=checkpoint.checksum[:16])
        return Describer(frozen, transform.build(), display=display, **describing)

    return checkpoint, make, pixels


def _chosen(options: Pictures, checkpoint: Checkpoint, store: str | None) -> tuple[Reading | None, str]:
    """Return the reading of the store's features, or the best one of the last evaluation's first probe, and its origin.

    The reading is None if neither can be used; the command then uses the last layer with the encoder's default pooling.
    """
    wanted, file = options.features, checkpoint.home(options.outputs) / FOLDER / "report.json"
    if store is not None and (encoder := encoder_of(store)).startswith(checkpoint.checksum[:16]):
        return reading_of(encoder), f"as in {store}"
    if wanted.layer != AUTO:
        return None, ""
    try:
        report, _ = read_json(file)
        if report["facts"].get("checksum") != checkpoint.checksum:
            return None, f"the last: {file} is of another checkpoint"
        reading = next(filter(None, (reading_of(probe["best"]) for probe in report["measured"])), None)
    except FileNotFoundError:
        return None, "the last: the command evaluate has chosen none"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None, f"the last: {file} cannot be read"
    if reading is None:
        return None, f"the last: {file} is of patches"
    if reading.norm != wanted.norm or wanted.pooling not in (None, reading.pooling):
        return None, f"the last: {file} chose {reading.name}"
    return reading, f"chosen by {file}"


def needs_standardizing(checkpoint: Checkpoint, line: CommandLine) -> bool:
    """Return the `needs_standardizing` of the objective of a checkpoint's run; False for weights without a run."""
    with suppress(FileNotFoundError, ConfigurationError):
        run = Configuration.read(checkpoint.path.parent / "config.yaml")
        objective = find_options(line.part("objective", str(run.choices.get("objective"))) or "")
        return getattr(objective, "needs_standardizing", False)
    return False


def data_set(config: Config, pixels: PixelFormat) -> "Data":
    """Build a data set whose images are decoded in the pixel format of an encoder."""
    source = config.options.data.source
    return (source.changed(**dict(pixels)) if isinstance(source, PixelFormat) else source).build()


def _shown(data: Images | None, checkpoint: Checkpoint) -> Sequence[int]:
    """Return the channels that pictures show as red, green and blue, from `data` or from the checkpoint's run."""
    if data is not None:
        return getattr(data, "shown", _FIRST)
    with suppress(FileNotFoundError):  # weights without their run
        values = Configuration.read(checkpoint.path.parent / "config.yaml").values
        return (values.get("data") or {}).get("shown", _FIRST)
    return _FIRST
