"""The options that every objective has, and what it requires of the other parts of a run."""

from collections.abc import Mapping
from typing import ClassVar

from ssvit.config.declaration import Options, Run
from ssvit.data.sources.base_options import Augmentation
from ssvit.models.encoder_options import Normalized
from ssvit.models.vit_options import ViT
from ssvit.options import RootOptionError, pair, typed
from ssvit.schedule import Between, ScheduleFunction


class Objective(Options):
    """The options of an objective.

    Attributes:
        views: The names of the views that it takes of an image. A single view is called "image".
        takes_local: Whether it also takes local views, of which there may be any number.
        samples_patches: Whether it samples patches by their numbers, so that training images must have the size of the
            encoder's images.
        needs_labels: Whether it is built with the classes and the labels of the training images.
        needs_patches: Whether it needs the outputs of patches, which a ViT alone has.
    """

    built_from: ClassVar[Mapping[str, str]] = {"encoder": "encoder"}
    views: ClassVar[tuple[str, ...]] = ("image",)
    takes_local: ClassVar[bool] = False
    samples_patches: ClassVar[bool] = False
    needs_patches: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = False

    @property
    def schedules(self) -> dict[str, ScheduleFunction]:
        """The options that are schedules, by name."""
        fields = type(self).model_fields
        return {name: value for name, value in self if any(isinstance(m, Between) for m in fields[name].metadata)}

    def fits(self, encoder: ViT) -> None:
        """Check these options against those of the encoder, for `check` and for the constructor of the objective.

        Raises:
            OptionError: The objective cannot train such an encoder.
        """

    def check(self, run: Run) -> None:
        """Check the encoder, the views of the augmentation and their size."""
        if isinstance(run.encoder, Normalized) and not run.encoder.has_patches and self.needs_patches:
            model = getattr(run.encoder, "model", None)
            name, value = ("encoder", run.encoder.label) if model is None else ("encoder.model", model)
            raise RootOptionError(name, value, "has no patches, which the objective needs; supervised needs none")
        if isinstance(run.encoder, ViT):
            self.fits(run.encoder)
        if isinstance(run.augment, Augmentation):
            self._check_views(run.augment)
        if self.samples_patches:
            self.check_size(run)

    def check_size(self, run: Run) -> None:
        """Check that training images have the size of the encoder's images."""
        if isinstance(run.augment, Augmentation) and isinstance(run.encoder, ViT):
            size = pair("image_size", run.encoder.image_size)
            if run.augment.size != size:
                right = f"must be encoder.image_size={typed(size)}: the objective samples patches of such images"
                raise RootOptionError("data.augment.size", run.augment.size, right)

    def _check_views(self, augment: Augmentation) -> None:
        if not set(self.views) <= set(augment.views):
            right = (
                f"gives {' and '.join(augment.views)} views, and the objective takes {' and '.join(self.views)} ones: "
                "add augment@data.augment=…, of which multi_crop and multi_crop_small give global and local ones"
            )
            raise RootOptionError("data.augment", type(augment).__name__, right)
        if augment.number_of_local_views and not self.takes_local:
            right = "must be 0: the objective takes global views alone, as of augment@data.augment=two_crops"
            raise RootOptionError("data.augment.local_views", augment.number_of_local_views, right)
