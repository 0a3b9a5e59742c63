"""Define the options that all objectives share, and their requirements for other parts of a run."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MinLen

from ssvit.config.declaration import Count, Expect, Options, Tree
from ssvit.data.sources.base_options import Augmentation
from ssvit.errors import OptionError, RootOptionError, pair, typed
from ssvit.models.encoder_options import ANY_ENCODER, Normalized
from ssvit.models.vit_options import Lora, ViT
from ssvit.objectives.schedule import Between, ScheduleFunction


def check_omits(name: str, value: object, encoder: ViT) -> None:
    """Check that an encoder can omit the patches that an option hides.

    Raises:
        OptionError: The encoder has a stem or local attention.
    """
    if not encoder.omits_patches:
        raise OptionError(name, value, "requires encoder.attention=full and no stem, as hidden patches are not encoded")


def check_trained(trained: object, encoder: Normalized) -> None:
    """Check that an encoder has the layers that an option `trained` selects.

    Raises:
        OptionError: The encoder has fewer layers, or is not a ViT.
    """
    if not isinstance(encoder, ViT):
        if trained != "all":
            raise OptionError("trained", trained, f"must be all with {encoder.label}")
    elif isinstance(trained, int) and trained > encoder.depth:
        raise OptionError("trained", trained, f"must be at most {encoder.depth}, the layers of the encoder")


class Objective(Options):
    """Define the base class of the options of an objective.

    Attributes:
        views: Names of the required views of an image. A single view is called "image".
        accepts_local_views: Whether any number of local views is accepted.
        samples_patches: Whether patches are sampled by index, so that training images must have the size of the
            encoder's images.
        needs_target: Whether the objective is constructed with a target of patches.
        needs_labels: Whether the objective is constructed with the classes and the labels of the training images.
        needs_masks: Whether training batches have masks, and the objective is constructed with `classes`, those of the
            masks, and `masks`, the training images.
        needs_image_count: Whether the objective is constructed with the number of training images.
        needs_patches: Whether the patch outputs of a ViT are required.
        needs_distinct_images: Whether the images of a batch must differ, since each is compared with the others.
        selects_weights: Whether the objective selects the weights of the encoder that are trained.
        needs_standardizing: Whether searches of similar pictures standardise the features, since a few components would
            dominate cosines, as in most masked models.
    """

    views: ClassVar[tuple[str, ...]] = ("image",)
    accepts_local_views: ClassVar[bool] = False
    samples_patches: ClassVar[bool] = False
    needs_patches: ClassVar[bool] = True
    needs_target: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = False
    needs_masks: ClassVar[bool] = False
    needs_image_count: ClassVar[bool] = False
    needs_distinct_images: ClassVar[bool] = False
    selects_weights: ClassVar[bool] = False
    needs_standardizing: ClassVar[bool] = False

    @property
    def schedules(self) -> dict[str, ScheduleFunction]:
        """Return the options that are schedules, by name."""
        fields = type(self).model_fields
        return {name: value for name, value in self if any(isinstance(m, Between) for m in fields[name].metadata)}

    @property
    def reference(self) -> Any:
        """Return the options of an encoder with which the result is compared at the end, or None."""
        return None

    def check_encoder(self, encoder: Any) -> None:
        """Check these options against the encoder's, for `check` and for the constructor of the objective.

        Args:
            encoder: Options of the encoder: a `ViT`, or any `Normalized` if `needs_patches` is False.

        Raises:
            OptionError: The objective cannot train this encoder.
        """

    def check(self, tree: Tree) -> None:
        """Check the encoder, the views of the augmentation and their size, and repeated augmentation.

        Raises:
            OptionError: The objective cannot train this encoder with this augmentation, or with copies of an image.
        """
        if isinstance(tree.encoder, Normalized) and not tree.encoder.has_patches and self.needs_patches:
            expected = f"must be a ViT for this objective; {ANY_ENCODER}"
            raise RootOptionError("encoder", tree.encoder.label, expected)
        if isinstance(tree.encoder, Normalized):
            self.check_encoder(tree.encoder)
        if isinstance(tree.augment, Augmentation):
            self._check_views(tree.augment)
        if self.samples_patches:
            self.check_size(tree)
        if self.needs_distinct_images and (recipe := tree.recipe):
            if recipe.repeats > 1:
                raise RootOptionError("recipe.repeats", recipe.repeats, "must be 1: the objective contrasts images")
            if recipe.batch_size < (least := 2 * recipe.accumulate):
                expected = f"must be at least {least}: the objective contrasts the images of a micro-batch"
                raise RootOptionError("recipe.batch_size", recipe.batch_size, expected)

    def check_size(self, tree: Tree) -> None:
        """Check that training images have the size of the encoder's images.

        Raises:
            OptionError: The sizes differ.
        """
        if isinstance(tree.augment, Augmentation) and isinstance(tree.encoder, ViT):
            size = pair("image_size", tree.encoder.image_size)
            if tree.augment.size != size:
                expected = f"must be encoder.image_size={typed(size)}: the objective samples patches of such images"
                raise RootOptionError("data.augment.size", tree.augment.size, expected)

    def _check_views(self, augment: Augmentation) -> None:
        if not set(self.views) <= set(augment.views):
            expected = (
                f"must give views named {' and '.join(self.views)}, not {' and '.join(augment.views)}: choose "
                "augment@data.augment=two_crops for global views, multi_crop for global and local ones"
            )
            raise RootOptionError("data.augment", type(augment).__name__, expected)
        local_views = getattr(augment, "local_views", 0)
        if local_views and not self.accepts_local_views:
            expected = "must be 0: the objective supports only global views, such as augment@data.augment=two_crops"
            raise RootOptionError("data.augment.local_views", local_views, expected)


class FineTuned(Objective):
    """Define which weights are trained with a head for classes."""

    classes: Annotated[Sequence[str], MinLen(2), Expect("a list of two or more")] | None = None
    """Class names in the order of the labels, or of their numbers in masks; None: as in the data set."""
    trained: Literal["all", "head"] | Annotated[Count, Expect("a number of last layers")] = "all"
    """Weights that are trained in addition to the head. all; head: no others; a number: the last norm and this number
    of last layers. Other weights stay as in the checkpoint."""
    lora: Lora | None = None
    """Low-rank updates of the attention matrices of layers that are not trained, such as {rank: 8, alpha: 16}; None: no
    LoRA."""

    def check_consistency(self) -> None:
        """Check that LoRA updates frozen layers."""
        if self.lora is not None and self.trained == "all":
            raise OptionError("trained", "all", "must be head or a number with lora, which updates frozen layers")

    def check_encoder(self, encoder: Normalized) -> None:
        """Check that the encoder has the layers that are to be trained.

        Raises:
            OptionError: It has fewer layers, or is not a ViT.
        """
        check_trained(self.trained, encoder)
