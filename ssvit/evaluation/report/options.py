"""Define the options of the commands that evaluate frozen features."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ssvit.config.declaration import FILLED, Count, Counts, Expect, Figures, Name, Options, Part, Parts, Seconds
from ssvit.data.sources.base_options import DataSet, Development
from ssvit.devices import Inference, Launch, Workers
from ssvit.errors import OptionError, file_to_write
from ssvit.evaluation.options import Features
from ssvit.evaluation.probes import options
from ssvit.loading.options import LoadEncoder, Pretrained


class Evaluate(Pretrained, Inference, Workers):
    """Evaluate frozen features of one or more encoders by probes."""

    against: Annotated[
        Sequence[Name | Mapping[str, Any]] | None,
        Expect("a list of runs and files of weights, each a path or {path: PATH, image_size: 224}"),
    ] = None
    """Encoders for comparison: runs, and weight files of other projects, as [A,B] or [{path: A, image_size: 224}]. Each
    encoder receives images of its training size. None: for weights of other projects, the newest run from random
    weights and the newest run from these weights on the same images, if there are any."""
    encoder: Part[LoadEncoder] = FILLED
    """The model. None: the checkpoint's."""
    data: Part[DataSet] = FILLED
    """The data set. None: the data set of the checkpoint's run."""
    development: Development = None
    """For choosing options without test images, as in ssvit pretrain. None: the test images are used."""
    probes: Parts[Options] = Field(default_factory=dict)
    """The probes; probes.sgd=null removes one."""
    features: Features = Features(layer="all")
    """Outputs of the encoder that are used as features."""
    baselines: bool = True
    """Whether to evaluate the same encoder with random weights, and raw pixels."""
    train_images: Count | None = 10_000
    """Maximum number of training images, balanced over the classes. None: all."""
    test_images: Count | None = 5_000
    """Maximum number of test images, or of validation images without a test set. None: all."""
    budget: Seconds | None = None
    """CPU time of the evaluation: seconds, or 90s, 10min, 1h. If all images take longer, training and test images are
    reduced to the same share. None: no limit."""
    duplicates: bool = True
    """Whether the report lists near-duplicates of training images among the test images."""
    figures: Figures = "end"
    """When figures are drawn: at the end of the evaluation, or none."""
    batch_size: Count = 256
    """Batch size of the encoder."""
    cache: Name | None = "auto"
    """Folder in which features are cached. auto: features/ in the folder of all runs; None: they are not cached."""
    report: bool = True
    """Whether to write a report; false: print the table of a single probe."""
    output: Name | None = None
    """Folder of the report. None: evaluation/ in the run's folder, with a subfolder for each data set other than the
    run's. With report=false: a JSON file for the numbers."""
    launch: Launch = Launch()
    """Devices and processes that compute features; probes are fitted in one process."""

    @property
    def chosen(self) -> list[str]:
        """Return the names of the enabled probes."""
        return [name for name, part in self.probes.items() if isinstance(part, Options)]

    @property
    def cache_folder(self) -> Path | None:
        """Return the folder in which features are cached; None: they are not cached."""
        if self.cache == "auto":
            return Path(self.outputs, "features")
        return None if self.cache is None else Path(self.cache)

    def check_consistency(self) -> None:
        """Raise OptionError unless there are a checkpoint, a place for the output and a probe."""
        if self.checkpoint == "scratch":
            raise OptionError("checkpoint", "scratch", "must be a checkpoint; baselines=true adds random weights")
        if self.output is not None:
            if not Path(self.output).absolute().parent.is_dir():
                raise OptionError("output", self.output, "must be in a folder that exists")
            if not self.report:
                file_to_write("output", self.output)
        if not self.chosen:
            raise OptionError("probes", [], "must name at least one probe")


class OneProbe(Evaluate):
    """Evaluate the last layer's features of all images by one probe and print the result as a table."""

    features: Features = Features()
    train_images: Count | None = None
    test_images: Count | None = None
    report: bool = False


class FewShot(options.Ridge, OneProbe):
    """Fit ridge regression to a few images of each class."""

    shots: options.Shots = Field(5, validate_default=True)


class Knn(options.Knn, OneProbe):
    """Classify by the vote of the nearest training images."""

    k: Counts = (1, 10, 20, 100, 200)


class LinearProbe(options.Linear, OneProbe):
    """Train linear layers on frozen features."""

    method: Literal["sgd", "logistic"] = "sgd"
    """sgd: layers trained by SGD, one for each learning rate; logistic: logistic regression solved to convergence."""
    sgd: Part[Options | None] = None
    """Options of method=sgd."""
    logistic: Part[Options | None] = None
    """Options of method=logistic."""
