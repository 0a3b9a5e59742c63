"""Define the options common to data sets, to data sets of image files and their pixel format, and of a subset."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from annotated_types import Gt, Le, Len
from pydantic import model_validator

from ssvit.config.declaration import FILLED, Count, Expect, Fraction, Name, Options, Pair, Part, Size, Tree, Whole
from ssvit.data.sources.decode_options import PixelFormat, bands
from ssvit.data.sources.splits import AUTO, Splits
from ssvit.errors import OptionError, RootOptionError
from ssvit.models.encoder_options import Normalized

_VIEW: Any = {"_part_": "view/center_crop"}
PERMUTATION, BIJECTION = "permutation", "bijection"  # algorithms of an epoch's order
# Short forms of options, as of `Command.expansions`: data=PATH, data.normalization=FILE and data.fit=NAME.
SHORT_FORMS = dict.fromkeys(("data", "data.normalization", "data.fit"), "ssvit.data.arguments.expand")
VALIDATION = "validation"
NO_LABELS = "the images have no labels to learn: put the images of each class into a separate folder, or set data=…"
NO_MASKS = (
    "has no mask, which segmentation requires: data.masks=PATH names a folder of PNG files, and data=shapes has masks"
)
NO_VALIDATION = "there are no validation images; 0.1 for that fraction of the training images"


class Images(Options):
    """Images as an encoder sees them: their size, their normalisation and their transforms."""

    image_size: Size = 224
    """Pixels of an image's side, or [height, width]."""
    mean: float | Sequence[float] = (0.485, 0.456, 0.406)
    """Mean of the channels, in [0, 1]: one number, or one for each; the default is ImageNet's."""
    std: float | Sequence[float] = (0.229, 0.224, 0.225)
    """Standard deviation of the channels, in [0, 1]: one number, or one for each; the default is ImageNet's."""
    augment: "Part[Augmentation | None]" = None
    """The augmentation of the training images."""
    view: "Part[View]" = _VIEW
    """The transform of evaluation images."""


class Augmentation(Options):
    """The augmentation of training images.

    Attributes:
        views: Names of the views or groups of views of an image. A single view is called "image".
    """

    views: ClassVar[tuple[str, ...]] = ("image",)

    size: Pair = FILLED
    """Pixels of an image's side, or [height, width]."""


class View(Augmentation):
    """The transform of evaluation images."""

    fit: str = "cover"
    """How images of other aspect ratios are shown."""

    @property
    def note(self) -> str:
        """Return a line of output on how images of other aspect ratios are shown."""
        raise NotImplementedError

    def for_size(self, size: tuple[int, int]) -> Self:
        """Return the options of a transform that shows the same part of an image at another size (height, width)."""
        raise NotImplementedError


class Sample(NamedTuple):
    """Evenly spaced images, as of the training images of a data set.

    Attributes:
        images: Number of all images.
        first: Name of the first file, for messages.
        files: Functions that open the file of an image.
    """

    images: int
    first: str
    files: Sequence[Callable[[], IO[Any]]]

    @classmethod
    def of_paths(cls, paths: Sequence[str], most: int) -> "Sample":
        """Return up to about `most` of the files at some paths."""
        chosen = paths[:: max(1, len(paths) // most)]
        return cls(len(paths), paths[0], [partial(open, path, "rb") for path in chosen])


class DataSet(Images):
    """The options of a data set, with the properties that are known before its images are read; None where unknown."""

    order: Literal["permutation", "bijection"] = "permutation"
    """Algorithm of an epoch's order. permutation: a table of all images; bijection: another order, without a table."""

    @property
    def image_channels(self) -> int | None:
        """Return the number of channels of the images."""
        return None

    @property
    def labelled(self) -> bool | None:
        """Return whether the training images have labels."""
        return None

    @property
    def multi_label(self) -> bool | None:
        """Return whether an image may have several classes."""
        return None

    @property
    def validated(self) -> bool | None:
        """Return whether there are validation images."""
        return None

    def count(self, at_most: int) -> int | None:
        """Return the number of training images, counting up to `at_most`; None if unknown."""
        return None

    def sample(self, most: int) -> Sample | None:
        """Return up to about `most` training images; None for a data set that does not consist of files."""
        return None

    def check(self, tree: Tree) -> None:
        """Check the number of channels against the encoder, and that validation images exist if they are required."""
        if isinstance(tree.encoder, Normalized) and self.image_channels not in (None, tree.encoder.channels):
            expected = f"must be {self.image_channels}, the channels of the images"
            raise RootOptionError("encoder.channels", tree.encoder.channels, expected)
        if self.validated is False and tree.development == VALIDATION:
            raise RootOptionError("development", VALIDATION, NO_VALIDATION)


class HeldOut(DataSet):
    """A data set that may consist of training images alone; a fraction of them is then held out for testing."""

    held_out: Annotated[float, Gt(0), Le(0.9)] = 0.1
    """Fraction of the images to hold out for testing if there are neither validation nor test images."""
    seed: Whole = 0
    """Seed of the choice of held-out images, the same for every run."""


HoldOut = Annotated[float, Gt(0), Le(0.9)]
Development = HoldOut | Literal["validation"] | None


class Subset(Options):
    """A subset of the images of a source."""

    part: Annotated[Sequence[Fraction], Len(2, 2), Expect("two numbers, [from, to]")] = (0, 1)
    """Interval [from, to) of hashes of the images to take: intervals that do not overlap share no image."""
    images: Count | None = None
    """Number of images to take, balanced over the classes as far as possible; None for all."""

    def check_consistency(self) -> None:
        """Check the order of the ends of the part."""
        if self.part[0] >= self.part[1]:
            raise OptionError("part", self.part, "must be [from, to] with from < to")

    def check(self, tree: Tree) -> None:
        """Check that the source has enough images."""
        if self.images is not None and isinstance(tree.data, DataSet):
            images = tree.data.count(at_most=self.images)
            if images is not None and self.images > images:
                raise OptionError("images", self.images, f"must be at most {images}, the number of images")


def count_images(tree: Tree, at_most: int) -> int | None:
    """Return the number of training images of a run, counting files up to `at_most`; None if unknown."""
    if isinstance(tree.subset, Subset) and tree.subset.images is not None:
        return tree.subset.images
    return tree.data.count(at_most=at_most) if isinstance(tree.data, DataSet) else None


def check_shares(*, batch_size: int, accumulate: int, processes: int) -> None:
    """Check that the processes can share a batch evenly.

    Args:
        batch_size: Global batch size.
        accumulate: Micro-batches per step.
        processes: Number of processes.

    Raises:
        OptionError: The batch size is not divisible by processes * accumulate.
    """
    if batch_size % (processes * accumulate):
        expected = f"must be divisible by processes * accumulate = {processes} * {accumulate}"
        fewer = [count for count in range(1, processes) if batch_size % (count * accumulate) == 0]
        hint = f"; {fewer[-1]} of these processes can share it" if fewer else ""
        raise OptionError("batch_size", batch_size, expected + hint)


class ImageFiles(HeldOut, PixelFormat):
    """A data set of image files with named splits; see `ssvit.data.sources.splits`."""

    train: Name | None = AUTO
    """The training split; auto: train, training or seg_train, if one exists. null: all images in no other split; of a
    folder, the complete folder."""
    validation: Name | None = AUTO
    """The validation split, for choices and curves; auto: val, validation, valid, dev or eval. null: none."""
    test: Name | None = AUTO
    """The test split, for the reported figure; auto: test, testing or seg_test. null: none. If only one of validation
    and test exists, it is used for both."""
    shown: Sequence[Whole] = (0, 1, 2)
    """The channels that pictures show as red, green and blue if images have more than three; 0 is the first."""

    @model_validator(mode="before")
    @classmethod
    def _with_background(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace background=mean by the mean of the channels."""
        if values.get("background") == "mean":
            return {**values, "background": values.get("mean", cls.model_fields["mean"].default)}
        return values

    def check(self, tree: Tree) -> None:
        """Check also that the images have the channels of the option `shown`."""
        super().check(tree)
        bands("shown", self.shown, self.channels)

    @property
    def names(self) -> Mapping[str, str | None]:
        """Return the names of the splits, as they were typed."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    @property
    def splits(self) -> Splits:
        """Return the items of the data set by purpose."""
        raise NotImplementedError

    @property
    def validated(self) -> bool | None:
        """Return whether there are validation images."""
        return bool(self.splits.validation)

    @property
    def image_channels(self) -> int:
        """Return the number of channels of the images."""
        return self.channels

    @property
    def pixels(self) -> PixelFormat:
        """Return the pixel format of the images."""
        return PixelFormat(channels=self.channels, range=self.range, background=self.background)
