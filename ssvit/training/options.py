"""The options of the commands that train. No torch."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from annotated_types import Gt, Le, MinLen
from pydantic import Field, model_validator

from ssvit.config.declaration import Count, Name, NotNegative, Options, Part, Parts, Positive, Run, Runs, Whole
from ssvit.data.sources.base_options import Subset
from ssvit.devices import Fabric
from ssvit.evaluation.panels.online_options import Probing
from ssvit.models import encoder_options
from ssvit.models.timm_options import is_stored
from ssvit.options import OptionError, within
from ssvit.training.recipe import Recipe

# Short forms of options.
ALIASES = {"evaluator=": "evaluator@evaluators=", **encoder_options.ALIASES}
EMBEDDED = "shapes"  # the data set of the first run
HeldOut = Annotated[float, Gt(0), Le(0.9)]


class RunOptions(Options):
    """The images, the model and the processes of a run."""

    outputs: Runs = "outputs"
    """The folder of all runs."""
    overwrite: bool = False
    """Whether the contents of the run's folder are deleted and the run starts anew."""
    workers: Whole = 0
    """Processes that decode image files, for each process that trains. Data sets in memory need none."""
    loader_timeout: NotNegative = 300
    """Seconds to wait for a micro-batch from these processes before the run stops; 0: no limit."""
    encoder: Part = None
    """The model."""
    data: Part = None
    """The images. The path of a folder stands for data=folder data.root=PATH."""
    subset: Subset = Subset()
    """Fewer of the training images."""
    development: HeldOut | Literal["validation"] | None = None
    """For choosing options without test images. validation: measure on the validation images. A number: the same if
    there are test images too; otherwise measure on this fraction of the training images and do not train on them."""
    evaluators: Parts = Field(default_factory=dict)
    """The evaluators, by name: the objective's, and those that evaluator=[…] adds; label_free needs no labels."""
    logger: Parts = Field(default_factory=dict)
    """Where metrics go besides metrics.jsonl, by the names of the loggers; [] for nowhere else."""
    fabric: Fabric = Fabric()
    """Where the run is trained."""


class Training(RunOptions):
    """A training run."""

    objective: Part = None
    """The method. It may set options of other groups."""
    recipe: Recipe = Recipe()
    """The hyperparameters of the optimisation."""
    target: Part = None
    """What is predicted of a patch, if the objective takes a target."""

    def check(self, run: Run) -> None:
        """Check that a checkpoint can name the class of the encoder."""
        if not is_stored(run.encoder):
            right = "must be a declared choice of the group encoder, whose name a checkpoint stores"
            raise OptionError("encoder", type(self.encoder).__name__, right)


class Pretrain(Training):
    """A pre-training run."""

    name: Name | None = None
    """The run's folder in outputs."""
    checkpoint: Name | None = None
    """Weights to start from: the folder of a run or a checkpoint, a file of another project's weights, or
    hf://OWNER/NAME; null: random weights."""
    preset: Any = None
    """auto: choose model, image size and schedule by the number and size of the images, which data=PATH sets."""
    probe: Parts = Field(default_factory=dict)
    """Probes of the frozen features during training, by name; [] for none."""
    probing: Probing = Probing()
    """Options of all probes."""


class Table4(Options):
    """The choice of a learning rate on validation images, as in the paper's Table 4."""

    learning_rates: Annotated[Sequence[Positive], MinLen(1)] = (0.001, 0.003, 0.01, 0.03)
    """The learning rates to choose from."""
    development: HeldOut = 0.1
    """The fraction of the training images to choose on, if there are not both validation and test images."""


class Finetune(Training):
    """A fine-tuning run, or several that are compared."""

    name: Name | None = None
    """The run's folder in outputs; null: a name made from the run that it starts from."""
    checkpoint: Name = "newest"
    """The folder of a checkpoint or of its run, a file of another project's weights, or hf://OWNER/NAME; newest: the
    pre-training run that finished last; scratch: random weights."""
    compare: Literal["scratch"] | None = None
    """scratch: train also from random weights, and compare the two."""
    seeds: Count = 3
    """Runs of each side of a comparison."""
    scratch: Mapping[str, Any] = Field(default_factory=dict)
    """Options of the recipe that training from random weights changes, as {steps: 600}."""
    sweep: Literal["table4"] | None = None
    """table4: choose the learning rate on validation images, then train on all training images and measure on the test
    images."""
    table4: Table4 = Table4()
    """Options of sweep=table4."""

    @model_validator(mode="after")
    def _check_scratch(self) -> Self:
        with within("scratch"):
            self.recipe.changed(**self.scratch)
        return self

    def check_study(self) -> None:
        """Check the options of several runs together. Those of one of the runs may be different.

        Raises:
            OptionError: The options of a comparison and of a sweep contradict each other.
        """
        if self.compare and self.sweep:
            raise OptionError("sweep", self.sweep, "goes without compare: choose the rate first, then compare")
        if self.compare and self.checkpoint == "scratch":
            raise OptionError("checkpoint", "scratch", "compare=scratch needs a pre-trained side: give checkpoint=PATH")
        if self.sweep and self.development is not None:
            raise OptionError("development", self.development, "sweep=table4 sets it: see table4.development")
