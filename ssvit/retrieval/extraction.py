"""Find the checkpoint and the features of the commands on pictures. Torch is imported when the encoder is loaded."""

import json
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.checkpoints.configuration import Configuration
from ssvit.choices import options_of
from ssvit.config.command_line import CommandLine
from ssvit.data.sources.decode_options import PixelFormat, bands
from ssvit.engine.atomic_io import read_json
from ssvit.errors import OptionError, pair, print_lines, typed, within
from ssvit.evaluation.options import AUTO, FeatureSpec, fit_of, precision_of, size_of, spec_of
from ssvit.evaluation.report.folder import report_for
from ssvit.loading.finding import NEWEST, find_checkpoint
from ssvit.loading.options import LoadEncoder, check_feature_spec, checked_size, eval_transform, pixel_format
from ssvit.loading.pretrained import size_of_images
from ssvit.models.encoder_options import PATCHES
from ssvit.models.timm_options import options_from
from ssvit.retrieval.options import Pictures, encoder_of

if TYPE_CHECKING:
    from ssvit.data.sources.base import Data
    from ssvit.figures.display import Display
    from ssvit.retrieval.pictures import Describer


class Extraction:
    """Select the checkpoint and the layer whose outputs are the features of pictures.

    Args:
        options: Options of the command.
        typed_names: Names of the typed options.
        choice: Name of the data set.
        say: Receives lines to print.
        store: Folder of an existing store; its features determine layer, pooling, precision, image size and fit where
            the options leave them open.

    Attributes:
        checkpoint: The checkpoint.
        stored: Identity of the features of the store if they are the checkpoint's, otherwise "".
        pixels: Pixel format of the encoder's input.
        image_size: Height and width of the encoder's input.
        changes: Options of images and channels that differ from the checkpoint's, on which the features depend.
    """

    def __init__(
        self,
        options: Pictures,
        *,
        typed_names: Collection[str],
        choice: str,
        say: Callable[[str], None],
        store: str | None = None,
    ) -> None:
        self.options = options
        encoder = options.encoder.values()
        path, identity = self.options.checkpoint, "" if store is None else encoder_of(store)
        if store is not None and path == NEWEST and Path(of_store := encoder_of(store, "checkpoint")).exists():
            path = of_store or path
        self.checkpoint = find_checkpoint(
            path, outputs=self.options.outputs, stage=PRETRAIN, options=encoder, say=say,
            precision=self.options.precision,
        )  # fmt: skip
        self.stored = identity if identity.startswith(self.checkpoint.checksum[:16]) else ""
        layer, pooling, norm = (getattr(self.options.features, name) for name in ("layer", "pooling", "norm"))
        chosen, origin = self._chosen(choice, store)
        if layer == AUTO:
            layer, origin = chosen.layer if chosen else "last", f" ({origin})"
        if self.stored and chosen and "features.norm" not in typed_names:
            norm = chosen.norm
        with within("features"):
            architecture = options_from(self.checkpoint.encoder)
            pooling = pooling or (chosen.pooling if chosen else architecture.pooling)
            self.spec = FeatureSpec(architecture.depth if layer == "last" else layer, pooling, norm)
            self.spec.check(architecture)
            check_feature_spec(self.checkpoint, self.spec)
        depth = self.checkpoint.encoder.get("depth", 1)
        say(f"features: layer {self.spec.layer} of {depth}, {self.spec.pooling}{origin}")
        self._trained_size = pair("image_size", self.checkpoint.encoder["image_size"])
        self.image_size = checked_size(self.checkpoint, self._size(say, store))
        trained_view = eval_transform(self.checkpoint)
        fit = fit_of(self.stored) or trained_view.fit
        self.pixels = pixel_format(self.checkpoint)
        source = options.data
        if source is not None and "data.view.fit" in typed_names:
            fit = source.view.fit
        resize = {} if fit == "cover" else {"resize": None}
        self.transform = trained_view.for_size(self.image_size).changed(fit=fit, **resize)
        formats = {name: getattr(source, name) for name in PixelFormat.model_fields if f"data.{name}" in typed_names}
        with within("data"):
            self.pixels = self.pixels.changed(**formats)
        self._normalized = self._normalization(typed_names)
        trained = dict(pixel_format(self.checkpoint)) | {
            f"image_{name}": self.checkpoint.encoder[name] for name in ("mean", "std")
        }
        pixels = dict(self.pixels) | self._normalized
        self.changes = {name: value for name, value in pixels.items() if value != trained.get(name, value)}
        if fit != trained_view.fit:
            self.changes["fit"] = fit
        say(self.transform.note)
        self.shown = getattr(self.options.data, "shown", (0, 1, 2))
        bands("data.shown", self.shown, self.pixels.channels)

    def _chosen(self, choice: str, store: str | None) -> tuple[FeatureSpec | None, str]:
        """Return the spec of the store, or that chosen by the first probe of an evaluation, and its origin.

        The spec is None if there is neither; the command then uses the last layer with the encoder's default pooling.
        """
        requested, checksum = self.options.features, self.checkpoint.checksum
        if self.stored:
            return spec_of(self.stored), f"as in {store}"
        if requested.layer != AUTO:
            return None, ""
        if self.checkpoint.graph is not None:
            return None, "the only features of the exported graph"
        file = report_for(self.checkpoint, self.options.data, choice, self.options.outputs)
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            report, _ = read_json(file)
            specs = (spec_of(probe["best"]) for probe in report["measured"])
            of_patches = requested.pooling == PATCHES
            spec = next((spec for spec in specs if spec and (spec.pooling == PATCHES) == of_patches), None)
            same_features = spec and spec.norm == requested.norm and requested.pooling in (None, spec.pooling)
            if same_features and report["metadata"]["checksum"] == checksum:
                return spec, f"chosen by {file}"
        return None, "the last: `ssvit evaluate` has not chosen a layer for these features"

    def _normalization(self, typed: Collection[str]) -> dict[str, Any]:
        """Return the options of `LoadEncoder` that replace the channels and the normalisation of the encoder.

        Args:
            typed: Names of the typed options. Those of the data set that are not typed are the encoder's.

        Raises:
            OptionError: The encoder cannot be used with these options.
        """
        data, checkpoint = self.options.data, self.checkpoint
        renormalize = [name for name in ("mean", "std") if f"data.{name}" in typed]
        is_converted = self.pixels.channels != checkpoint.encoder["channels"]
        names = ("mean", "std") if is_converted else renormalize
        options = {f"image_{name}": getattr(data, name) for name in names}
        if not options:
            return {}
        if checkpoint.graph is not None:
            raise OptionError(f"data.{names[0]}", getattr(data, names[0]), "must not be set with an exported graph")
        options |= {"channels": self.pixels.channels, "renormalize": renormalize}
        try:
            LoadEncoder(path=checkpoint.path, **self.options.encoder.values(), **options).loaded()
        except OptionError as error:
            name = f"data.{error.name.removeprefix('image_')}"
            raise OptionError(name, error.value, error.expectation) from None
        return options

    def _size(self, say: Callable[[str], None], store: str | None) -> object:
        """Return the typed image size, or else that of the store, the checkpoint or the images.

        Raises:
            OptionError: The store has another image size.
        """
        size, default = self.options.image_size, size_of(self.stored) or self._trained_size
        if size is None and not self.checkpoint.describes_images and not self.stored:
            size, line = size_of_images(self.checkpoint, self.options.data, "image_size", self.options.images)
            say(line)
            return size
        if self.stored and size is not None and pair("image_size", size) != default:
            raise OptionError("image_size", size, f"must be {typed(default)}, the image size of store={store}")
        return size or default

    def describer(self) -> "Describer":
        """Load the encoder."""
        import torch

        from ssvit.evaluation.features import Frozen
        from ssvit.kernels.inference import resolved
        from ssvit.loading.encoder import load_encoder, load_model
        from ssvit.retrieval.pictures import Describer

        options, checkpoint = self.options, self.checkpoint
        size = None if self.image_size == self._trained_size else self.image_size
        loading = options.encoder.values() | self._normalized
        encoder = load_model(checkpoint, load_encoder, image_size=size, **loading)
        identity, device, precision = checkpoint.checksum[:16], torch.device("cpu"), options.precision
        if size is not None:
            identity += " {}x{}".format(*size)
        if self.changes:
            identity += f" {json.dumps(self.changes, separators=(',', ':'))}"
        if (of_graph := checkpoint.precision) is not None:
            identity, precision = f"{identity} {of_graph}", 32
        elif precision == "auto" and self.stored:
            precision = precision_of(self.stored)
        frozen = Frozen(encoder, [self.spec], identity=identity)
        frozen.prepare(device, resolved(precision, device))
        print_lines(f"precision: {of_graph or frozen.precision}")
        return Describer(frozen, self.transform.build(), options.batch_size, options.workers)

    def display(self) -> "Display":
        """Return the conversion of pictures to RGB, with the channels of a named data set, else the first three."""
        from ssvit.figures.display import Display

        mean, std = (self._normalized.get(f"image_{name}", self.checkpoint.encoder[name]) for name in ("mean", "std"))
        return Display.of_pixels(self.pixels, mean=mean, std=std, shown=self.shown)

    def needs_standardizing(self, line: CommandLine) -> bool:
        """Return the `needs_standardizing` of the objective of the checkpoint's run; False for weights without a run.

        Args:
            line: The command line, which finds the options of an objective by its name.
        """
        run = Configuration.find(self.checkpoint.path.parent / "config.yaml")
        objective = run and options_of(line.part("objective", str(run.choices.get("objective"))))
        return getattr(objective, "needs_standardizing", False)

    def data_set(self) -> "Data":
        """Build the data set of the options, whose images are decoded in the pixel format of the encoder."""
        assert self.options.data is not None
        source = self.options.data
        return (source.changed(**dict(self.pixels)) if isinstance(source, PixelFormat) else source).build()
