"""Apply encoders, classifiers and segmentation models to images in Python, as in the evaluation.

Letters: b images, c channels, h, w pixels, y, x rows and columns of patches, d width, k classes.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image as PILImage
from PIL import ImageOps
from torch import Tensor

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.data.sources import decode, folder, rasters
from ssvit.data.sources.base import Unreadable
from ssvit.data.sources.decode_options import RGB, PixelFormat
from ssvit.devices import Inference, Precision
from ssvit.errors import OptionError, one_of, whole
from ssvit.evaluation.features import Frozen
from ssvit.evaluation.options import FeatureSpec
from ssvit.evaluation.segmentation import LabelMaps
from ssvit.figures.display import Display
from ssvit.kernels import inference
from ssvit.kernels.fused import version
from ssvit.loading.encoder import load_classifier, load_encoder, load_model, load_segmenter
from ssvit.loading.options import (
    LoadEncoder,
    check_feature_spec,
    checked_size,
    eval_transform,
    pixel_format,
    usual_size,
)
from ssvit.models import encoder as encoders
from ssvit.models.encoder_options import PATCHES
from ssvit.objectives.classify import Classify
from ssvit.objectives.classify_options import MULTI_LABEL
from ssvit.objectives.segment import Segment

T = TypeVar("T")
_FILES = 4  # images, which may be large, whose label maps are predicted together
Picture = str | os.PathLike[str] | PILImage.Image | np.ndarray | Tensor
Pictures = Picture | Sequence[Picture]
"""One image or several: a file, a folder of files, a PIL image, an array (h, w), (h, w, c) or (b, h, w, c), or a tensor
(c, h, w) or (b, c, h, w). Arrays and tensors are uint8, or floating-point in [0, 1], which is rounded to uint8; for an
encoder trained with data.range, they must have the values of the files."""


def pictures(images: Pictures, pixels: PixelFormat = RGB) -> Iterator[Tensor]:
    """Yield each image as (c, h, w) uint8, or float32 in [0, 1], in order; the files of a folder are sorted by path.

    Args:
        images: One image or several.
        pixels: Pixel format of the encoder. If it has a range, arrays and tensors must have the values of the files.

    Raises:
        OptionError: The argument is not an image.
        Unreadable: A file cannot be decoded.
    """
    if isinstance(images, str | os.PathLike):
        yield from (decode.load(path, pixels) for path in folder.paths([os.fspath(images)]))
    elif isinstance(images, PILImage.Image):
        with suppress(Exception):  # damaged metadata
            images = ImageOps.exif_transpose(images)  # as files are read
        if pixels.is_photo:
            try:
                converted = (decode.rgb if pixels.channels == 3 else decode.grey)(images, pixels.background)
            except ValueError as error:
                raise OptionError("images", f"mode {images.mode}", str(error)) from None
            yield torch.from_numpy(converted).permute(2, 0, 1)
        else:
            yield _taken(rasters.bands(images), pixels)
    elif isinstance(images, np.ndarray):
        if images.ndim not in (2, 3, 4):
            raise OptionError("images", tuple(images.shape), "must be (h, w), (h, w, c) or (b, h, w, c)")
        if images.dtype.kind not in "buif" or images.dtype.itemsize > 8:  # torch has no others
            raise OptionError("images", images.dtype, "must be numbers of at most 64 bits")
        array = images[:, :, None] if images.ndim == 2 else images
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        yield from pictures(torch.from_numpy(native).movedim(-1, -3), pixels)
    elif isinstance(images, Tensor):
        if images.ndim not in (3, 4):
            raise OptionError("images", tuple(images.shape), "must be (c, h, w) or (b, c, h, w)")
        batch = images if images.ndim == 4 else images[None]
        if pixels.range is None:
            yield from _bytes(batch)
        else:
            batch = batch.float() if batch.dtype == torch.bfloat16 else batch  # which numpy does not have
            yield from (_taken(image, pixels) for image in batch.detach().cpu().numpy())
    elif isinstance(images, Sequence):
        for image in images:
            yield from pictures(image, pixels)
    else:
        raise OptionError("images", type(images).__name__, "must be paths, PIL images, arrays or tensors")


def _taken(array: np.ndarray, pixels: PixelFormat) -> Tensor:
    try:
        return torch.from_numpy(rasters.converted(array, pixels))
    except ValueError as error:
        raise OptionError("images", "x".join(map(str, array.shape)), str(error)) from None


def _bytes(images: Tensor) -> Tensor:
    if images.dtype == torch.uint8:
        return images.cpu()
    expected = "must be uint8, or floating-point in [0, 1]"
    if not images.is_floating_point():
        raise OptionError("images", images.dtype, expected)
    if images.numel() and not (images.min() >= 0 and images.max() <= 1):  # also false for NaNs
        raise OptionError("images", f"{images.min():.4g} to {images.max():.4g}", expected)
    return (images * 255).round().to("cpu", torch.uint8)


class _Model:
    """Implement what all trained models share: images and files in batches."""

    _prepared: tuple[list[tuple[int, int | None]], Any] | None = None  # the last result of `prepared`, and its state

    @staticmethod
    def _load(options: LoadEncoder) -> Any:
        raise NotImplementedError

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str = "cpu",
        batch_size: int = 64,
        precision: Literal["auto"] | Precision = "auto",
        **options: Any,
    ) -> None:
        if options.get("image_size") is None:
            options["image_size"] = usual_size(checkpoint)
        else:
            checked_size(checkpoint, options["image_size"])
        module = load_model(checkpoint, self._load, **options)
        encoder: encoders.Encoder = module if isinstance(module, encoders.Encoder) else module.encoder
        whole("batch_size", batch_size)
        precision = Inference(precision=precision).precision
        try:
            self.device = torch.device(device)
            self.module = module.to(self.device).eval()
        except (RuntimeError, TypeError, AssertionError) as error:  # unknown or unavailable device
            expected = f"must be a device of this machine, such as cpu or cuda:0 ({' '.join(str(error).split())[:100]})"
            raise OptionError("device", device, expected) from None
        if checkpoint.graph is not None:
            one_of("device", self.device.type, ["cpu"])
            precision = 32  # of images and outputs; that of the layers is fixed in the graph
        self.checkpoint, self.batch_size = checkpoint, batch_size
        self.pixels = pixel_format(checkpoint).changed(channels=encoder.channels)
        self.precision = inference.resolved(precision, self.device)
        # The transform of the evaluation; for another image size, its resizing is scaled in proportion.
        self.transform = eval_transform(checkpoint).for_size(encoder.image_size).build()

    @property
    def prepared(self) -> Any:
        """Return the module for passes without gradients in `precision`, see `ssvit.kernels.inference.prepared`.

        It is prepared again if weights or buffers of `module` have changed.
        """
        state = [(id(tensor), version(tensor)) for tensor in (*self.module.parameters(), *self.module.buffers())]
        if self._prepared is None or self._prepared[0] != state:
            self._prepared = state, inference.prepared(self.module, self.precision)
        return self._prepared[1]

    def _context(self) -> AbstractContextManager[object]:
        return inference.autocast(self.precision, self.device)

    def prepare(self, images: Pictures) -> Tensor:
        """Resize and crop images for the model.

        Args:
            images: One image or several.

        Returns:
            (b, c, h, w), uint8 or float32 in [0, 1].

        Raises:
            OptionError: There are no images.
        """
        return torch.cat(list(self._batches(images)))

    def _resized(self, picture: Tensor) -> Tensor:
        if not picture.numel():
            raise OptionError("images", "x".join(map(str, picture.shape)), "must have a height and a width above 0")
        return self.transform([picture])

    def _batches(self, images: Pictures) -> Iterator[Tensor]:
        resized, count = map(self._resized, pictures(images, self.pixels)), 0  # a batch of photographs takes gigabytes
        while batch := list(islice(resized, self.batch_size)):
            count += len(batch)
            channels = batch[0].shape[1]
            for image in batch:
                if image.shape[1] != channels:
                    expected = f"must have {channels} channels, as the images before it"
                    raise OptionError("images", f"{image.shape[1]} channels", expected)
            yield torch.cat(batch)
        if not count:
            raise OptionError("images", type(images).__name__, "must contain at least one image")

    def _of_files(
        self,
        paths: Sequence[str],
        apply: Callable[[list[Tensor]], Iterable[T]],
        count: int,
        prepare: Callable[[Tensor], Tensor] = lambda image: image,
    ) -> Iterator[tuple[str, T | Unreadable]]:
        """Yield the path of each file with its result, or with the error if it cannot be read.

        Args:
            paths: The files.
            apply: Returns a result for each of some prepared images.
            count: Number of files that are read together.
            prepare: Applied to each image, (c, h, w) of any size, when it has been read.
        """
        for start in range(0, len(paths), count):
            part = paths[start : start + count]
            read: dict[int, Tensor] = {}
            answers: dict[int, T | Unreadable] = {}
            for index, path in enumerate(part):
                try:
                    read[index] = prepare(decode.load(path, self.pixels))
                except Unreadable as failure:
                    answers[index] = failure
            if read:
                answers |= zip(read, apply(list(read.values())), strict=True)
            yield from ((path, answers[index]) for index, path in enumerate(part))


class Encoder(_Model):
    """Compute features of images with a pre-trained encoder. `module` is the `ViT` or the `Timm`, in eval mode.

    Args:
        checkpoint: The checkpoint.
        device: Name of the device, such as cpu or cuda:0.
        batch_size: Maximum number of images in a batch.
        precision: bf16, 32 or auto, as in `ssvit embed`.
        options: Options of `LoadEncoder`, such as image_size=[96, 96].
    """

    module: encoders.Encoder
    _load = staticmethod(load_encoder)

    def features(self, images: Pictures, *, layer: int | None = None) -> Tensor:
        """Return one feature vector per image, pooled as in the training of the encoder.

        Args:
            images: One image or several.
            layer: Number of the layer, from 1; None for the last. The encoder's final norm is applied to any layer.

        Returns:
            (b, d) float32.
        """
        return self._read(images, self.module.pooling, layer)

    def class_token(self, images: Pictures, *, layer: int | None = None) -> Tensor:
        """Return the output of the class token.

        Args:
            images: One image or several.
            layer: Number of the layer, from 1; None for the last.

        Returns:
            (b, d) float32.

        Raises:
            OptionError: The encoder has no class token.
        """
        return self._read(images, "class_token", layer)

    def patch_features(self, images: Pictures, *, layer: int | None = None) -> Tensor:
        """Return one feature vector per patch.

        Args:
            images: One image or several.
            layer: Number of the layer, from 1; None for the last.

        Returns:
            (b, y, x, d) float32.
        """
        return self._read(images, PATCHES, layer)

    def _read(self, images: Pictures, pooling: str, layer: int | None) -> Tensor:
        spec = FeatureSpec(layer=self.module.depth if layer is None else layer, pooling=pooling)
        check_feature_spec(self.checkpoint, spec)
        frozen = Frozen(self.prepared, [spec], identity="")
        with self._context():
            return torch.cat([frozen(batch.to(self.device))[spec.name].cpu() for batch in self._batches(images)])


class Prediction(NamedTuple):
    """Prediction for one image.

    Attributes:
        name: Name of the most probable class.
        probability: Its probability, in [0, 1].
        probabilities: Probability of each class by name.
    """

    name: str
    probability: float
    probabilities: dict[str, float]


class Classifier(_Model):
    """Classify images with a fine-tuned classifier. `module` is the `Classify` objective, in eval mode.

    Args:
        checkpoint: The checkpoint.
        device: Name of the device, such as cpu or cuda:0.
        batch_size: Maximum number of images in a batch.
        precision: bf16, 32 or auto, as in `ssvit predict`.
        options: Options of `LoadEncoder`, such as image_size=[96, 96].
    """

    module: Classify
    _load = staticmethod(load_classifier)

    @property
    def classes(self) -> list[str]:
        """Return the names of the classes, in the order of `probabilities`."""
        return list(self.module.classes)

    @property
    def is_multi_label(self) -> bool:
        """Return whether an image may have several classes or none; probabilities then do not sum to 1."""
        return self.module.options.loss == MULTI_LABEL

    def probabilities(self, images: Pictures) -> Tensor:
        """Return the probabilities of the classes.

        Args:
            images: One image or several.

        Returns:
            (b, k) float32.
        """
        return torch.cat([self._probabilities(batch) for batch in self._batches(images)])

    @torch.no_grad()
    def _probabilities(self, batch: Tensor) -> Tensor:
        with self._context():
            logits = self.prepared.logits(batch.to(self.device))
        return self.module.probabilities(logits.float()).cpu()

    def name_files(self, paths: Sequence[str]) -> Iterator[tuple[str, Tensor | Unreadable]]:
        """Yield the path of each file with its class probabilities, (k,), or with the error if it cannot be read."""
        return self._of_files(
            paths, lambda images: self._probabilities(torch.cat(images)), self.batch_size, self._resized
        )

    def predict(self, images: Pictures) -> list[Prediction]:
        """Return a prediction for each image.

        Args:
            images: One image or several.
        """
        answers = []
        for row in self.probabilities(images).tolist():
            by_name = dict(zip(self.classes, row, strict=True))
            best = max(by_name, key=by_name.__getitem__)
            answers.append(Prediction(best, by_name[best], by_name))
        return answers


class Segmenter(_Model):
    """Predict the class of each pixel with a fine-tuned model. `module` is the `Segment` objective, in eval mode.

    Args:
        checkpoint: The checkpoint.
        device: Name of the device, such as cpu or cuda:0.
        batch_size: Maximum number of windows in a batch.
        precision: bf16, 32 or auto, as in `ssvit predict`.
        options: Options of `LoadEncoder`, such as image_size=[96, 96], the size of a window.
    """

    module: Segment
    _load = staticmethod(load_segmenter)

    @property
    def display(self) -> Display:
        """Return the conversion of images to RGB."""
        mean, std = (self.module.encoder.arguments[name] for name in ("mean", "std"))
        return Display.of_pixels(self.pixels, mean=mean, std=std, shown=(0, 1, 2))

    @property
    def classes(self) -> list[str]:
        """Return the names of the classes, in the order of the numbers in label maps."""
        return list(self.module.classes)

    def predict(self, images: Pictures) -> list[Tensor]:
        """Return the class number of each pixel of each image, (h, w) uint8.

        Args:
            images: One image or several, of any size.
        """
        return [answer for image in pictures(images, self.pixels) for answer in self._label_maps([image])]

    def label_files(self, paths: Sequence[str]) -> Iterator[tuple[str, tuple[Tensor, Tensor] | Unreadable]]:
        """Yield the path of each file with its image, (c, h, w), and label map, (h, w) uint8, or with the error."""
        return self._of_files(paths, lambda images: zip(images, self._label_maps(images), strict=True), _FILES)

    def _label_maps(self, images: Sequence[Tensor]) -> list[Tensor]:
        return LabelMaps(self.module, self.transform, self._scores, self.batch_size)(images)

    def _scores(self, windows: Tensor) -> Tensor:
        with self._context():
            return self.prepared.scores(windows.to(self.device)).cpu()
