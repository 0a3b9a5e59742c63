"""Score all feature sets of an encoder and its baselines by probes, for tables, figures and reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ssvit.data.batch import EvalTransform
from ssvit.data.sources.base import is_multi_label
from ssvit.devices import Precision
from ssvit.evaluation.baselines import OWN
from ssvit.evaluation.duplicates import Pair
from ssvit.evaluation.features import FeatureSets
from ssvit.evaluation.leakage import Overlap
from ssvit.evaluation.precision import balanced_accuracy, chance_of
from ssvit.evaluation.probes.base import Probe, Result
from ssvit.evaluation.statistics import above_chance
from ssvit.evaluation.titles import title
from ssvit.figures.display import PLAIN, Display


@dataclass(frozen=True)
class Split:
    """Store the feature sets of the training and of the test images; both have the same names.

    Attributes:
        feature_sets: Feature sets of the evaluated encoder, in the order of layers.
        train: Features of the training images.
        test: Features of the test images.
        eval_transform: Transform of the evaluated encoder.
        part: Name of the reported split, "test" or "validation".
        precision: Precision of the encoders.
        others: Feature sets of each baseline and compared encoder by its name, in the order of layers.
        duplicates: Near-duplicates of training images among the test images; None if not computed.
        overlaps: Test images that were in the pre-training of an encoder, by its name, for encoders with a record.
        display: Conversion to RGB images.
    """

    feature_sets: tuple[str, ...]
    train: FeatureSets
    test: FeatureSets
    eval_transform: EvalTransform
    part: str = "test"
    precision: Precision = 32
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    duplicates: Sequence[Pair] | None = None
    overlaps: Mapping[str, Overlap] = field(default_factory=dict)
    display: Display = PLAIN

    def has_images_of(self, other: "Split") -> bool:
        """Return whether both splits have the same training and test images."""
        pairs = ((self.train, other.train), (self.test, other.test))
        return all(ours.indices.equal(theirs.indices) for ours, theirs in pairs)

    def pictures(self, feature_sets: FeatureSets, rows: Tensor) -> Tensor:
        """Return RGB images at some rows of the training or test images: (b,) -> (b, 3, h, w) in [0, 1]."""
        return self.display(feature_sets.images(rows, self.eval_transform))

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the class names."""
        return self.train.source.classes

    def chance(self, *, balanced: bool = False) -> float | None:
        """Return the chance level on the test images, see `chance_of`; None without labels."""
        labels = self.test.labels
        return None if labels is None else chance_of(labels, len(self.classes), balanced=balanced)

    @property
    def is_multi_label(self) -> bool:
        """Return whether images are multi-label: accuracies are then mAPs, without a standard error."""
        return self.test.labels is not None and is_multi_label(self.test.labels)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Store the result of one probe for all feature sets.

    Attributes:
        probe: Name of the probe among the options.
        columns: Headings, such as "all labels".
        values: One value in [0, 1] for each column, by feature set.
        deviations: Standard deviations over samples by feature set; None for a single sample.
        best: Feature set of the evaluated encoder chosen without test labels.
        chosen_by: Description of the criterion of this choice.
        options: Options of the probe.
        numbers: Numbers of the probe by feature set, as plain data.
        chance: Chance level of the last column; None if it is neither an accuracy nor an mAP.
        balanced: Balanced accuracy of each encoder with its chosen features, whose chance level is that of a uniform
            guess; empty if the last column is not an accuracy.
        images: Number of test images; None if the last column is not an accuracy.
        predictions: Predictions with the chosen feature set.
        chosen: Feature set of each encoder, `OWN` for the evaluated one, chosen by the same criterion.
        per_image: Scores of single images with these feature sets, see `Result.per_image`; empty if only one image is
            measured, since the uncertainty is then unknown.
        remark: Remark of the probe on the training images, see `Probe.remark`.
        variant: Options of the probe in its title, see `Probe.variant`.
    """

    probe: str
    columns: tuple[str, ...]
    values: Mapping[str, tuple[float, ...]]
    deviations: Mapping[str, tuple[float | None, ...]]
    best: str
    chosen_by: str
    options: Mapping[str, object]
    numbers: Mapping[str, object]
    chance: float | None = None
    balanced: Mapping[str, float] = field(default_factory=dict)
    images: int | None = None
    predictions: Tensor | None = None
    chosen: Mapping[str, str] = field(default_factory=dict)
    per_image: Mapping[str, Tensor] = field(default_factory=dict)
    remark: str = ""
    variant: str = ""

    @property
    def title(self) -> str:
        """Return the title of the probe with its last column."""
        name = self.probe if self.variant in self.probe else f"{self.probe}_{self.variant}"
        return title(name, self.columns[-1])

    @property
    def is_above_chance(self) -> bool:
        """Return whether the chosen features are significantly above chance; True if the error is unknown."""
        if self.chance is None or self.images is None:
            return True
        return above_chance(self.values[self.best][-1], self.chance, self.images)


def score(name: str, probe: Probe, split: Split, progress: Callable[[int, int], None]) -> Scores:
    """Evaluate a probe on each feature set.

    Args:
        name: Name of the probe.
        probe: The probe.
        split: The feature sets.
        progress: Called with the numbers of evaluated and of all feature sets after each.

    Raises:
        UserError: If the probe cannot be computed.
    """
    encoders = {OWN: split.feature_sets, **split.others}
    among_several = {features for sets in encoders.values() for features in sets if len(sets) > 1}
    results: dict[str, Result] = {}
    for features in split.train.values:
        choose = features in among_several
        results[features] = probe(split.train[features], split.test[features], choose=choose)
        progress(len(results), len(split.train.values))
    is_known = all(results[features].choice is not None for features in split.feature_sets)
    chosen = {
        encoder: max(sets, key=lambda name: results[name].choice or ()) if is_known and len(sets) > 1 else sets[-1]
        for encoder, sets in encoders.items()
    }
    best = chosen[OWN]
    per_image = {encoder: values for encoder, name in chosen.items() if (values := results[name].per_image) is not None}
    columns = tuple(results[best].scores)
    measure = " mAP" if probe.is_accuracy and split.is_multi_label else ""
    is_accuracy = probe.is_accuracy and not split.is_multi_label
    # Probes name the reported images "test", whichever split they are.
    named = {} if split.part == "test" else {"test": split.part, "validation": "held out of train"}
    return Scores(
        probe=name,
        columns=tuple(named.get(column, column) + measure for column in columns),
        values={name: tuple(result.scores.values()) for name, result in results.items()},
        deviations={name: tuple(map(result.deviations.get, columns)) for name, result in results.items()},
        best=best,
        chosen_by=probe.chosen_by if is_known else "being the last layer",
        options=probe.options.values(),
        numbers={name: result.numbers for name, result in results.items()},
        chance=split.chance(balanced=probe.is_balanced) if probe.is_accuracy else None,
        balanced={
            name: balanced_accuracy(values, split.test.known_labels)
            for name, values in per_image.items()
            if is_accuracy
        },
        images=len(split.test) if is_accuracy else None,
        predictions=results[best].predictions,
        chosen=chosen,
        per_image={name: values for name, values in per_image.items() if len(values) > 1},
        remark="" if split.train.labels is None else probe.remark(split.train.labels, split.classes),
        variant=probe.variant,
    )
