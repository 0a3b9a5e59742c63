"""The options of the commands that evaluate frozen features."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ssvit.config.declaration import Count, Counts, Expect, Name, NotNegative, Options, Part, Parts, Whole
from ssvit.devices import Fabric
from ssvit.evaluation.features_options import Features
from ssvit.evaluation.probes import knn_options, linear_options, ridge_options
from ssvit.loading.finding_options import Pretrained
from ssvit.options import OptionError, file_to_write


class Evaluate(Pretrained):
    """Frozen features of one or several encoders, and the probes by which they are measured."""

    against: Annotated[
        Sequence[Name | Mapping[str, Any]],
        Expect("a list of runs and files of weights, each a path or {path: PATH, image_size: 224}"),
    ] = ()
    """Encoders for comparison: runs, and files of other projects' weights, as [A,B] or [{path: A, image_size: 224}].
    Each encodes images of the size that it was trained on. Runs that differ only in the seed count as one encoder."""
    encoder: Part = None
    """The model: the checkpoint's."""
    data: Part = None
    """The images: those of the checkpoint's run, unless another data set is named."""
    probes: Parts = Field(default_factory=dict)
    """The probes; probes.sgd=null leaves one out."""
    features: Features = Features(layer="all")
    """Which outputs of the encoder are measured."""
    baselines: bool = True
    """Whether the same encoder with random weights, and raw pixels, are measured too."""
    train_images: Count | None = 10_000
    """The most training images, balanced over the classes; null: all."""
    test_images: Count | None = 5_000
    """The most test images, or validation images if there are no test images; null: all."""
    duplicates: bool = True
    """Whether the report names test images that are nearly the same as a training image."""
    precision: Literal["32-true", "bf16-mixed", "auto"] = "32-true"
    """The precision of the encoder; auto: bf16-mixed on devices with native support of it."""
    batch_size: Count = 256
    """Images encoded at a time."""
    workers: Whole = 0
    """Processes that decode image files, for each process that computes features."""
    loader_timeout: NotNegative = 300
    """Seconds to wait for a batch from these processes; 0: no limit."""
    cache: Name | None = "${outputs}/features"
    """The folder where features are stored, so that they are computed once; null: they are not stored."""
    report: bool = True
    """Whether a report is written; false: print the table of a single probe."""
    output: Name | None = None
    """The folder of the report; null: evaluation/ in the run's folder. With report=false: a file for the numbers as
    JSON."""
    fabric: Fabric = Fabric()
    """Where features are computed; the probes are fitted in one process."""

    @property
    def chosen(self) -> list[str]:
        """The names of the probes to evaluate; there may be options of others."""
        return [name for name, part in self.probes.items() if isinstance(part, Options)]

    @model_validator(mode="after")
    def _check_evaluation(self) -> Self:
        if self.checkpoint == "scratch":
            raise OptionError("checkpoint", "scratch", "measured beside a checkpoint by baselines=true; give that")
        if self.output is not None:
            if not Path(self.output).absolute().parent.is_dir():
                raise OptionError("output", self.output, "there is no such folder to write it into")
            if not self.report:
                file_to_write("output", self.output)
        if not self.chosen:
            raise OptionError("probes", "", "name at least one")
        return self


class OneProbe(Evaluate):
    """The evaluation of the last layer's features of all images by one probe, which is printed as a table."""

    features: Features = Features()
    train_images: Count | None = None
    test_images: Count | None = None
    report: bool = False


class FewShot(ridge_options.FewShot, OneProbe):
    """Ridge regression on a few images of each class."""


class Knn(knn_options.Knn, OneProbe):
    """The vote of the nearest training images."""

    k: Counts = (1, 10, 20, 100, 200)


class LinearProbe(linear_options.Linear, OneProbe):
    """Linear layers on frozen features."""

    method: Literal["sgd", "logistic"] = "sgd"
    """sgd: layers trained by SGD, one for each learning rate; logistic: the optimum of a penalised regression."""
    sgd: Part = None
    """Options of method=sgd."""
    logistic: Part = None
    """Options of method=logistic."""
