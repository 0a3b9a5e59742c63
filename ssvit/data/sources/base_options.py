"""The options that every data set has, and those of a part of one."""

from collections.abc import Callable, Sequence
from typing import IO, Annotated, ClassVar, NamedTuple, Self

from annotated_types import Gt, Le, Len
from pydantic import Field, model_validator

from ssvit.config.declaration import Count, Expect, Fraction, From, OneOf, Options, Pair, Part, Run, Size, Whole
from ssvit.models.encoder_options import Normalized
from ssvit.options import OptionError, RootOptionError

FULL, SCALED = DECODINGS = "full", "scaled"  # how much of a JPEG is decoded
PERMUTATION, BIJECTION = ORDERS = "permutation", "bijection"  # how the order of an epoch is made
# Short forms of options, as of `Command.expansions`: data=PATH and data.normalization=FILE.
SHORT_FORMS = dict.fromkeys(("data", "data.normalization"), "ssvit.data.arguments.expand")
VALIDATION = "validation"
NO_LABELS = "the images have no labels to learn: give each class a folder of its own, or another data set (data=…)"
NO_VALIDATION = "there are no validation images; 0.1 for that fraction of the training images"


HeldOutPart = Annotated[float, Gt(0), Le(0.9)]


class Images(Options):
    """The group data, next to the options of its source."""

    image_size: Size = 224
    """Pixels of an image's side, or [height, width]."""
    mean: float | Sequence[float] = (0.485, 0.456, 0.406)
    """Mean of the channels, in [0, 1]: one number, or one for each; the default is that of ImageNet."""
    std: float | Sequence[float] = (0.229, 0.224, 0.225)
    """Standard deviation of the channels, in [0, 1]: one number, or one for each; the default is that of ImageNet."""
    source: Part = None
    """The data set."""
    augment: Part = None
    """The augmentation of the training images."""
    view: Part = Field({"_target_": "ssvit.data.augment.crop.CenterCrop", "size": "${data.image_size}"})
    """The transform of the images that are evaluated."""


class Augmentation(Options):
    """The augmentation of training images.

    Attributes:
        views: The names of the views that it gives of an image. A single view is called "image".
    """

    views: ClassVar[tuple[str, ...]] = ("image",)

    size: Annotated[Pair, From("data.image_size")]
    """Pixels of an image's side, or [height, width]."""

    @property
    def number_of_local_views(self) -> int:
        """Local views of an image."""
        return 0


class FileImages(Images):
    """The group data for images in files."""

    order: Annotated[str, OneOf(ORDERS)] = PERMUTATION
    """How the images of an epoch are ordered. permutation: by a table of all images; bijection: another order, which
    needs no table."""
    decoding: Annotated[str, OneOf(DECODINGS)] = FULL
    """scaled: JPEGs of 1024x768 pixels or more are decoded at a quarter or an eighth of their sides, as far as the
    random crop stays as large as image_size; full: all at full size."""


class Sample(NamedTuple):
    """Some of the training images of a data set, evenly spaced.

    Attributes:
        images: Number of all training images.
        first: Name of the first file, for messages.
        files: Functions that open the file of an image.
    """

    images: int
    first: str
    files: Sequence[Callable[[], IO[bytes]]]


class DataSet(Options):
    """A data set, and what is known of it before its images are read; None for what is not."""

    is_function: ClassVar[bool] = True
    around: ClassVar[type[Options] | None] = Images

    @property
    def image_channels(self) -> int | None:
        """Channels of the images."""
        return None

    @property
    def labelled(self) -> bool | None:
        """Whether the images to train on have labels."""
        return None

    @property
    def multi_label(self) -> bool | None:
        """Whether an image may have several classes."""
        return None

    @property
    def validated(self) -> bool | None:
        """Whether there are validation images."""
        return None

    def count(self, at_most: int) -> int | None:
        """How many images there are to train on, as far as `at_most`."""
        return None

    def sample(self, most: int) -> Sample | None:
        """Return up to about `most` of the training images; None for a data set that is not files."""
        return None

    def check(self, run: Run) -> None:
        """Check the channels of the encoder, and that there are the images that are to be measured on."""
        if isinstance(run.encoder, Normalized) and self.image_channels not in (None, run.encoder.channels):
            self.refuse_channels(run.encoder.channels)
        if self.validated is False and run.development == VALIDATION:
            raise RootOptionError("development", VALIDATION, NO_VALIDATION)

    def refuse_channels(self, channels: int) -> None:
        """Raise the error for an encoder of images with another number of channels."""
        raise RootOptionError("encoder.channels", channels, f"must be {self.image_channels}, as of the images")


class HeldOut(DataSet):
    """A data set that may have training images alone, some of which are then kept to measure on."""

    held_out: HeldOutPart = 0.1
    """Part of the images that is kept from training to test on, where there are neither validation nor test images."""
    seed: Whole = 0
    """Seed of which images are held out: the same for every run."""


class Subset(Options):
    """Fewer images of a source."""

    part: Annotated[Sequence[Fraction], Len(2, 2), Expect("two numbers, [from, to]")] = (0, 1)
    """Those whose hash lies in [from, to): parts that do not overlap share no image."""
    images: Count | None = None
    """Only so many of them, as many of each class as of any other as far as there are; None for all."""

    @model_validator(mode="after")
    def _check_part(self) -> Self:
        if self.part[0] >= self.part[1]:
            raise OptionError("part", self.part, "must be [from, to], and the first is not less than the second")
        return self

    def check(self, run: Run) -> None:
        """Check that there are as many images."""
        if self.images is not None and isinstance(run.source, DataSet):
            images = run.source.count(at_most=self.images)
            if images is not None and self.images > images:
                raise OptionError("images", self.images, f"there are {images} images to choose from")


def check_shares(*, batch_size: int, accumulate: int, processes: int) -> None:
    """OptionError if so many processes cannot share a batch evenly."""
    if batch_size % (processes * accumulate):
        right = f"must be divisible by processes * accumulate = {processes} * {accumulate}"
        fewer = [count for count in range(1, processes) if batch_size % (count * accumulate) == 0]
        hint = f"; {fewer[-1]} of these processes can share it" if fewer else ""
        raise OptionError("batch_size", batch_size, right + hint)
