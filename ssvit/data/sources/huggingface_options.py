"""The options of data sets of the library `datasets`."""

import os
from collections.abc import Iterable
from functools import cached_property
from importlib.util import find_spec
from typing import Self

from pydantic import model_validator

from ssvit.config.declaration import Name
from ssvit.data.sources import folder, saved_set
from ssvit.data.sources.files_options import ImageFiles, Verify
from ssvit.options import OptionError


class HuggingFace(ImageFiles):
    """A data set of the library `datasets`: see `ssvit.data.sources.saved_set`."""

    root: Name
    """A folder that save_to_disk wrote, or one with files of Parquet, or the name of a set in the cache."""
    config: Name | None = None
    """The configuration of a set that has several."""
    image: Name = folder.AUTO
    """The name of the column of images; auto: the only one."""
    label: Name | None = folder.AUTO
    """The name of the column of labels; auto: label, or the only column of classes; None: none. A column of lists must
    be named: images have several classes, or none."""
    train: Name = folder.AUTO
    """The split to train on; auto: train, or the only other one."""
    validation: Name | None = folder.AUTO
    """The split for choices and curves; auto: val, validation or valid; None: none."""
    test: Name | None = folder.AUTO
    """The split for the reported figure; auto: test; None: none. If there is only one of validation and test, it is
    used for both."""
    verify: Verify = "size"
    """What a run is bound to: its images' labels and sizes (size), or their bytes too (content)."""
    download: bool = False
    """Whether a set that is not in the cache is fetched from the Hugging Face Hub."""

    @model_validator(mode="after")
    def _check_set(self) -> Self:
        if not self.root:
            raise OptionError("root", self.root, "must name a folder, or a data set in the cache")
        if find_spec("datasets") is None:
            raise OptionError("root", self.root, "needs datasets: pip install 'ssvit[huggingface]'")
        if not (self.download or os.path.isdir(self.root) or saved_set.is_cached(self.root)):
            right = "no such folder, nor a data set in the cache; data.download=true fetches one from the Hub"
            raise OptionError("root", self.root, right)
        if self.described is not None:
            if self.config is not None:
                raise OptionError("config", self.config, "must be null: save_to_disk wrote one configuration")
            self.columns_of(self.described[self.splits_of(self.described).train])
        return self

    @cached_property
    def described(self) -> dict[str, saved_set.Features] | None:
        """The splits of a folder and their columns; None if save_to_disk did not write it."""
        return saved_set.described(self.root)

    def splits_of(self, there: Iterable[str]) -> saved_set.Splits:
        """The splits, of those that are there, by what their images are for."""
        names = {"validation": self.validation, "test": self.test}
        return saved_set.splits(self.root, there, train=self.train, **names)

    def columns_of(self, features: saved_set.Features) -> tuple[str, str | None]:
        """The names of the columns of images and of labels, of those that are there."""
        return saved_set.columns(self.root, features, image=self.image, label=self.label)

    @property
    def labelled(self) -> bool | None:
        if self.described is None:
            return None
        label = self.columns_of(self.described[self.splits_of(self.described).train])[1]
        return None if label is not None else False  # a row of the column may have none

    @property
    def multi_label(self) -> bool | None:
        if self.described is None:
            return None
        features = self.described[self.splits_of(self.described).train]
        label = self.columns_of(features)[1]
        return label is not None and saved_set.element(features[label]) is not None

    @property
    def validated(self) -> bool | None:
        return None if self.described is None else self.splits_of(self.described).validation is not None
