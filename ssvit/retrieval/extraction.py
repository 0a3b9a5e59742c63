"""Find the checkpoint and the features of the commands on pictures. Torch is imported when the encoder is loaded."""

from contextlib import suppress
from typing import TYPE_CHECKING

from ssvit.atomic_io import read_json
from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.checkpoints.configuration import Configuration, ConfigurationError
from ssvit.config.command_line import CommandLine
from ssvit.config.composed import Config
from ssvit.config.declaration import find as find_options
from ssvit.data.sources.decode_options import PixelFormat, bands
from ssvit.evaluation.features_options import AUTO, FOLDER, Features, Reading, precision_of, reading_of
from ssvit.loading.encoder_options import check_reading, eval_transform, pixel_format
from ssvit.loading.finding import find
from ssvit.options import print_lines, within
from ssvit.retrieval.options import Pictures, encoder_of

if TYPE_CHECKING:
    from ssvit.data.sources.base import Data
    from ssvit.figures.display import Display
    from ssvit.retrieval.pictures import Describer


class Extraction:
    """Select the checkpoint and the layer whose outputs are the features of pictures.

    Args:
        config: Composed configuration whose options are a `Pictures`.
        store: Folder of an existing store; its features determine layer, pooling and precision where the options leave
            them open.

    Attributes:
        checkpoint: The checkpoint.
        pixels: Pixel format of the encoder's input.
    """

    def __init__(self, config: Config, *, store: str | None = None) -> None:
        self.options: Pictures = config.options
        self.store = store
        say, encoder = config.line.say, self.options.encoder.values()
        self.checkpoint = find(
            self.options.checkpoint, outputs=self.options.outputs, stage=PRETRAIN, options=encoder, say=say,
            precision=self.options.precision,
        )  # fmt: skip
        layer, pooling, norm = (getattr(self.options.features, name) for name in ("layer", "pooling", "norm"))
        chosen, origin = self._chosen(store)
        if layer == AUTO:
            layer, origin = chosen.layer if chosen else "last", f" ({origin})"
        with within("features"):
            features = Features(layer=layer, pooling=pooling or (chosen.pooling if chosen else None), norm=norm)
            (self.reading,) = features.readings(self.checkpoint.encoder)
            check_reading(self.checkpoint, self.reading)
        depth = self.checkpoint.encoder.get("depth", 1)
        say(f"features: layer {self.reading.layer} of {depth}, {self.reading.pooling}{origin}")
        self.transform, self.pixels = eval_transform(self.checkpoint), pixel_format(self.checkpoint)
        self.shown = getattr(self.options.data, "shown", (0, 1, 2))
        bands("data.shown", self.shown, self.pixels.channels)

    def _chosen(self, store: str | None) -> tuple[Reading | None, str]:
        """Return the reading of the store, or that chosen by the first probe of the last evaluation, and its origin.

        The reading is None if there is neither; the command then uses the last layer with the encoder's default
        pooling.
        """
        requested, checksum = self.options.features, self.checkpoint.checksum
        if store is not None and (encoder := encoder_of(store)).startswith(checksum[:16]):
            return reading_of(encoder), f"as in {store}"
        if requested.layer != AUTO:
            return None, ""
        if self.checkpoint.graph is not None:
            return None, "the only features of the exported graph"
        file = self.checkpoint.home(self.options.outputs) / FOLDER / "report.json"
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            report, _ = read_json(file)
            readings = (reading_of(probe["best"]) for probe in report["measured"])
            reading = next(filter(None, readings), None)
            same_features = reading and reading.norm == requested.norm and requested.pooling in (None, reading.pooling)
            if same_features and report["metadata"]["checksum"] == checksum:
                return reading, f"chosen by {file}"
        return None, "the last: `ssvit evaluate` has not chosen a layer of this checkpoint"

    def describer(self) -> "Describer":
        """Load the encoder."""
        import torch

        from ssvit.evaluation.features import Frozen
        from ssvit.kernels.inference import resolved
        from ssvit.loading.encoder import load_encoder, load_model
        from ssvit.retrieval.pictures import Describer

        options, checkpoint = self.options, self.checkpoint
        encoder = load_model(checkpoint, load_encoder, **options.encoder.values())
        identity, device, precision = checkpoint.checksum[:16], torch.device("cpu"), options.precision
        if (of_graph := checkpoint.precision) is not None:
            identity, precision = f"{identity} {of_graph}", 32
        elif precision == "auto" and self.store is not None and (stored := encoder_of(self.store)):
            precision = precision_of(stored)
        frozen = Frozen(encoder, [self.reading], identity=identity)
        frozen.prepare(device, resolved(precision, device))
        print_lines(f"precision: {of_graph or frozen.precision}")
        return Describer(frozen, self.transform.build(), options.batch_size, options.workers)

    def display(self) -> "Display":
        """Return the conversion of pictures to RGB, with the channels of a named data set, else the first three."""
        from ssvit.figures.display import Display

        mean, std = self.checkpoint.encoder["mean"], self.checkpoint.encoder["std"]
        return Display.of_pixels(self.pixels, mean=mean, std=std, shown=self.shown)

    def needs_standardizing(self, line: CommandLine) -> bool:
        """Return the `needs_standardizing` of the objective of the checkpoint's run; False for weights without a run.

        Args:
            line: The command line, which finds the options of an objective by its name.
        """
        with suppress(FileNotFoundError, ConfigurationError):
            run = Configuration.read(self.checkpoint.path.parent / "config.yaml")
            objective = find_options(line.part("objective", str(run.choices.get("objective"))) or "")
            return getattr(objective, "needs_standardizing", False)
        return False

    def data_set(self) -> "Data":
        """Build the data set of the options, whose images are decoded in the pixel format of the encoder."""
        assert self.options.data is not None
        source = self.options.data.source
        return (source.changed(**dict(self.pixels)) if isinstance(source, PixelFormat) else source).build()
