"""Define the options of the commands that train. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import Field

from ssvit.config.declaration import FILLED, Count, Figures, Name, Options, Part, Parts, Positive, Runs, Seconds, Tree
from ssvit.data.sources.base_options import DataSet, Development, HoldOut, Subset
from ssvit.data.sources.shapes_options import Shapes
from ssvit.devices import Launch, Workers
from ssvit.errors import OptionError, within
from ssvit.evaluation.evaluators.options import Probing
from ssvit.models.encoder_options import Encoder
from ssvit.models.timm_options import is_stored
from ssvit.objectives.base_options import Objective
from ssvit.objectives.continuation_options import Continuation
from ssvit.objectives.targets_options import Target
from ssvit.training.recipe import Recipe

# Other names of options.
ALIASES = {"evaluator": "evaluator@evaluators"}


def are_first_images(choice: object, images: object) -> bool:
    """Return whether a choice and number of images are those of the first run: the rendered shapes as by default."""
    return choice == "shapes" and images == Shapes.model_fields["images"].default


class RunOptions(Workers):
    """The images, the model and the processes of a run."""

    outputs: Runs = "outputs"
    """Folder of all runs."""
    overwrite: bool = False
    """Delete the contents of the run's folder and start a new run."""
    encoder: Part[Encoder] = FILLED
    """The model."""
    data: Part[DataSet] = FILLED
    """The images. data=PATH is short for data=folder data.root=PATH."""
    subset: Subset = Subset()
    """A subset of the training images."""
    development: Development = None
    """For choosing options without test images. validation: measure on the validation images. A number: the same if
    there are also test images; otherwise hold out this fraction of the training images and measure on it. None: the
    test images are used."""
    evaluators: Parts[Options] = Field(default_factory=dict)
    """Evaluators by name: the evaluators of the objective, and others added by evaluator=[…]; label_free requires no
    labels."""
    logger: Parts[Options] = Field(default_factory=dict)
    """Loggers by name, in addition to metrics.jsonl; [] for none."""
    launch: Launch = Launch()
    """Devices and processes of the run."""


class Training(RunOptions):
    """A training run."""

    objective: Part[Objective] = FILLED
    """The method. It may set options of other groups."""
    budget: Seconds | None = None
    """CPU time of the steps of each run: seconds, or 90s, 10min, 1h. The number of steps and the warm-up follow from
    the measured cost of a step, and evaluations take at most a tenth of the budget in addition. None: recipe.steps."""
    recipe: Recipe = Recipe()
    """The hyperparameters of the optimisation."""
    target: Part[Target | None] = None
    """Prediction target of a patch, if the objective has one."""
    figures: Figures = "end"
    """When figures are drawn: at the end of the run, after each evaluation, or none."""

    def check(self, tree: Tree) -> None:
        """Check that a checkpoint can store the class of the encoder by name."""
        if not is_stored(tree.encoder):
            expected = "must be a declared choice of the group encoder, whose name a checkpoint stores"
            raise OptionError("encoder", type(self.encoder).__name__, expected)


class Pretrain(Training):
    """A pre-training run."""

    name: Name | None = None
    """Name of the run's folder in outputs."""
    checkpoint: Name | None = None
    """Initial weights: the folder of a run or a checkpoint, a file of foreign weights, hf://OWNER/NAME, or timm:NAME;
    None: random weights."""
    continuation: Part[Continuation | None] = None
    """How training continues from the weights of checkpoint=…; safe: few weights are trained, slowly; full: all are.
    None: safe for simclr (the default), mae and diet, unless other options set the optimiser, the learning rate or the
    target (docs/starting.md)."""
    preset: Literal["auto"] | None = None
    """auto: choose model, image size and schedule from the number and size of the images; the default with
    data=PATH."""
    forgetting: Name | None = None
    """Folder of other labelled images, such as those that the weights of checkpoint=… were trained on, on which the
    features are compared with those of the start at the end; None: no such comparison."""
    probes: Parts[Options] = Field(default_factory=dict)
    """Probes of the frozen features during training, by name; [] for none."""
    probing: Probing = Probing()
    """Options of all probes."""

    def check_consistency(self) -> None:
        """Check that the images of `forgetting` exist."""
        if self.forgetting is None:
            return
        if self.checkpoint is None:
            raise OptionError("forgetting", self.forgetting, "must be null without checkpoint=…")
        if not Path(self.forgetting).is_dir():
            raise OptionError("forgetting", self.forgetting, "must be a folder of images")


class Table4(Options):
    """Selection of a learning rate on validation images, as in the paper's Table 4."""

    learning_rates: Annotated[Sequence[Positive], MinLen(1)] = (0.001, 0.003, 0.01, 0.03)
    """Learning rates to choose from."""
    development: HoldOut = 0.1
    """Fraction of the training images to validate on, unless there are both validation and test images."""


class Finetune(Training):
    """A fine-tuning run, or a comparison of several."""

    name: Name | None = None
    """Name of the run's folder in outputs; None: a name derived from the checkpoint."""
    checkpoint: Name = "newest"
    """The folder of a checkpoint or of its run, a file of foreign weights, hf://OWNER/NAME, or timm:NAME; newest: the
    pre-training run that finished last; scratch: random weights."""
    compare: Literal["scratch"] | None = None
    """scratch: also train from random weights, and compare both."""
    seeds: Count = 3
    """Number of runs of each side of a comparison."""
    earlier_gains: Sequence[float] = ()
    """Gains of other seeds over training from random weights with the same options, in percentage points. Their spread
    gives the prediction interval for another seed; without them, that of the comparison's own seeds does."""
    scratch: Literal["equal_time", "equal_steps"] = "equal_time"
    """Steps of training from random weights. equal_time: it takes the time of pre-training and fine-tuning together, as
    logged; equal_steps: those of fine-tuning."""
    scratch_recipe: Mapping[str, Any] = Field(default_factory=dict)
    """Options of the recipe that differ for training from random weights, such as {lr: 1e-3}; {steps: 600} replaces the
    option scratch."""
    preset: Literal["auto"] | None = "auto"
    """auto: choose the schedule from the number of labelled images and the origin of the weights, unless a file of
    options (recipe=…, experiment=…) has one."""
    check_frozen: bool = True
    """With fewer than 20 labelled images for each class on average: compare with ridge regression on frozen features.
    Both are measured on the validation images if there are test images too. Otherwise, both are trained on one half of
    the training images and measured on the other half."""
    sweep: Literal["table4"] | None = None
    """table4: choose the learning rate on validation images, then train on all training images and measure on the test
    images."""
    table4: Table4 = Table4()
    """Options of sweep=table4."""

    def check_consistency(self) -> None:
        """Check the options of training from random weights."""
        with within("scratch_recipe"):
            self.recipe.changed(**self.scratch_recipe)

    @property
    def is_evaluated(self) -> bool:
        """Return whether the run has all evaluators of its objective."""
        return all(self.evaluators.get(name) is not None for name in self.objective.sets.get("evaluators", ()))

    def check_study(self) -> None:
        """Check the options that concern several runs together; options of a single run may differ between them.

        Raises:
            OptionError: The options of a comparison and of a sweep contradict each other.
        """
        if (self.compare or self.sweep) and not self.is_evaluated:
            raise OptionError("evaluators.test", None, "must not be null in a comparison or a sweep")
        if self.compare and self.sweep:
            raise OptionError("sweep", self.sweep, "must be null with compare; choose the learning rate first")
        if self.compare and self.checkpoint == "scratch":
            raise OptionError("checkpoint", "scratch", "must be pre-trained with compare=scratch: checkpoint=PATH")
        if self.sweep and self.development is not None:
            raise OptionError("development", self.development, "must be null with sweep; set table4.development")
