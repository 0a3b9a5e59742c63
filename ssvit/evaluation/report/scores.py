"""The scores of probes on all feature sets of an encoder and its baselines, for tables, figures and reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ssvit.config.declaration import Options
from ssvit.data.batch import EvalTransform
from ssvit.data.sources.base import is_multi_label
from ssvit.evaluation.baselines import OWN
from ssvit.evaluation.duplicates import Pair
from ssvit.evaluation.features import FeatureSets
from ssvit.evaluation.precision import chance_of
from ssvit.evaluation.probes.base import Probe, Result
from ssvit.evaluation.statistics import above_chance
from ssvit.evaluation.titles import title
from ssvit.figures.display import PLAIN, Display


@dataclass(frozen=True)
class Split:
    """Feature sets of the training and of the test images, the same ones.

    own: those of the encoder, by layers. part: of the images measured on, test or validation. others: those of each
    encoder and baseline measured beside it, by its name, by layers. duplicates: test images that are nearly the same as
    a training image; None where they were not looked for. display: makes the RGB images of pictures.
    """

    own: tuple[str, ...]
    train: FeatureSets
    test: FeatureSets
    eval_transform: EvalTransform
    part: str = "test"
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    duplicates: Sequence[Pair] | None = None
    display: Display = PLAIN

    def pictures(self, of: FeatureSets, rows: Tensor) -> Tensor:
        """RGB images in [0, 1] at some rows of the training or test images: (b,) -> (b, 3, h, w)."""
        return self.display(of.images(rows, self.eval_transform))

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.source.classes

    @property
    def chance(self) -> float | None:
        """What a model that ignores the images measured on has, see `chance_of`; None without labels."""
        return None if self.test.labels is None else chance_of(self.test.labels)

    @property
    def is_multi_label(self) -> bool:
        """Whether an image may have several classes: accuracies are mAPs then, whose error is not known."""
        return self.test.labels is not None and is_multi_label(self.test.labels)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The result of one probe: a row of numbers for each feature set.

    columns: headings, as "all labels". values: by feature set, a share in [0, 1] for each column; deviations: over
    samples, None for a single one. best: the feature set of the encoder that was chosen, without test labels. options:
    of the probe. numbers: all that it found, as plain data. chance: what the last column has by ignoring the image, and
    images: how many it is measured on; None where the column is no accuracy. predictions: of the best feature set.
    chosen: the feature set of each encoder, `OWN` and the others, chosen alike; per_image: as of `Result`, of these.
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
    images: int | None = None
    predictions: Tensor | None = None
    chosen: Mapping[str, str] = field(default_factory=dict)
    per_image: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The title of the probe, by its last column."""
        return title(self.probe, self.columns[-1])

    @property
    def tells(self) -> bool:
        """Whether the chosen features are above chance by more than two standard errors, as far as it is known."""
        if self.chance is None or self.images is None:
            return True
        return above_chance(self.values[self.best][-1], self.chance, self.images)


def score(name: str, probe: Probe, split: Split, progress: Callable[[int, int], None]) -> Scores:
    """A probe of every feature set; progress(done, all) is called after each. UserError if it cannot be."""
    encoders = {OWN: split.own, **split.others}
    among_several = {features for sets in encoders.values() for features in sets if len(sets) > 1}
    results: dict[str, Result] = {}
    for features in split.train.values:
        choose = features in among_several
        results[features] = probe(split.train[features], split.test[features], choose=choose)
        progress(len(results), len(split.train.values))
    is_known = all(results[features].choice is not None for features in split.own)
    chosen = {
        encoder: max(sets, key=lambda name: results[name].choice or ()) if is_known and len(sets) > 1 else sets[-1]
        for encoder, sets in encoders.items()
    }
    best = chosen[OWN]
    per_image = {encoder: results[name].per_image for encoder, name in chosen.items()}
    columns = tuple(results[best].scores)
    measure = " mAP" if probe.is_accuracy and split.is_multi_label else ""
    # "test" is what a probe calls the images it is measured on.
    named = {} if split.part == "test" else {"test": split.part, "validation": "held out of train"}
    return Scores(
        probe=name,
        columns=tuple(named.get(column, column) + measure for column in columns),
        values={name: tuple(result.scores.values()) for name, result in results.items()},
        deviations={name: tuple(map(result.deviations.get, columns)) for name, result in results.items()},
        best=best,
        chosen_by=probe.chosen_by if is_known else "being the last",
        options=probe.values() if isinstance(probe, Options) else {},
        numbers={name: result.numbers for name, result in results.items()},
        chance=split.chance if probe.is_accuracy else None,
        images=len(split.test) if probe.is_accuracy and not split.is_multi_label else None,
        predictions=results[best].predictions,
        chosen=chosen,
        per_image={encoder: values for encoder, values in per_image.items() if values is not None},
    )
