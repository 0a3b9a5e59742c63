"""Evaluate frozen features by probes during training, compared with baselines and chance.

Each evaluation extracts the features of all layers once for all probes, from fixed sets of labelled training images and
of held-out images. The baselines are the initial weights of the run (random by default) and raw pixels.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ssvit.data.batch import EvalTransform
from ssvit.data.loader import evaluation_batches
from ssvit.data.sources.base import Source, is_multi_label, reduced
from ssvit.data.sources.memory import Memory
from ssvit.errors import UserError
from ssvit.evaluation.evaluators.base import PlottingEvaluator, Shown
from ssvit.evaluation.evaluators.options import Probing as ProbingOptions
from ssvit.evaluation.features import Extractor, Features, FeatureSets, Frozen, Pixels, extract
from ssvit.evaluation.options import AUTO
from ssvit.evaluation.options import Features as FeaturesOptions
from ssvit.evaluation.precision import chance_of
from ssvit.evaluation.probes.base import Probe, check_labels
from ssvit.evaluation.statistics import (
    NOT_ABOVE_CHANCE,
    Interval,
    above_chance,
    error_of_difference,
    standard_error,
    trend,
    verdict,
)
from ssvit.figures.plot import DASHED, History, Level, Panel, Plot, chance, curve, level
from ssvit.models.encoder_options import PATCHES
from ssvit.objectives.base import Objective

RANDOM, INITIAL = "random weights", "the initial weights"
_TWO_SIDED = 1.96  # half-width of a 95 % interval in standard errors


class Probing(PlottingEvaluator):
    """Probe the features after each layer and the final norm, with the pooling of the encoder.

    Images are sampled from train, balanced over the classes, and from test, and read once, when the evaluator is built.

    Args:
        options: Options of the probes of a run.
        probes: Probes by name.
        train: Labelled images for the training of the probes.
        test: Held-out images.
        transform: Transform of the evaluation.
        pretrained: Whether training starts from pre-trained weights.
        automatic: Steps between two evaluations with every=auto; None for recipe.evaluate_every.

    Attributes:
        probes: Probes for which the images suffice.
        remarks: One line for each other probe, with the reason, and the remarks of the probes.
    """

    def __init__(
        self,
        options: ProbingOptions,
        *,
        probes: Mapping[str, Probe],
        train: Source,
        test: Source,
        transform: EvalTransform,
        pretrained: bool = False,
        automatic: int | None = None,
    ) -> None:
        self.start = INITIAL if pretrained else RANDOM
        self.options = options
        self.every = automatic if options.every == AUTO else options.every
        self.probes: list[Probe] = []
        self.remarks: list[str] = []
        if train.labels is None or test.labels is None:
            which = "images" if train.labels is None else "validation or test images"
            self.remarks = [f"no probes: the {which} have no labels"]
            return
        sources = reduced(train, test, options.train_images, options.test_images)
        self._train, self._test = (self._read(source, transform) for source in sources)
        train_labels, test_labels = self._train.labels, self._test.labels
        assert train_labels is not None
        assert test_labels is not None
        self._chance = {
            balanced: chance_of(test_labels, len(test.classes), balanced=balanced) for balanced in (False, True)
        }
        self._multi_label = is_multi_label(test_labels)
        self.images = len(self._train) + len(self._test)
        for name, probe in probes.items():
            try:
                if probe.features == PATCHES:
                    raise UserError(f"run `ssvit evaluate probes=[{name}]` after training instead")
                check_labels(probe, train_labels, test_labels, train.classes)
                self.probes.append(probe)
                self.remarks += filter(None, [probe.remark(train_labels, train.classes)])
            except UserError as error:
                images = f"probing.train_images={len(self._train)}"
                self.remarks.append(f"{probe.title}: not measured during the run ({images}): {error}")

    def _read(self, source: Source, transform: EvalTransform) -> Memory:
        """Read transformed images as bytes. Each process holds all of them."""
        batches = list(evaluation_batches(source, transform, batch_size=self.options.batch_size))
        if not batches:
            raise UserError("none of the images for the probes can be read")
        images, labels = (torch.cat(parts) for parts in zip(*((b.images, b.labels) for b in batches), strict=True))
        return Memory(images, labels, source.classes)

    def trial(self, objective: Objective, images: int) -> int:
        """Extract the features of a few images, and measure pixels once, which an evaluation then does not repeat.

        Other fits of the probes are cheap.
        """
        encoder, few, _ = objective.backbone(), copy.copy(self), self._pixels
        rows = torch.arange(min(images, len(self._test)))
        few._train = few._test = Memory(self._test.in_memory[rows], None, self._test.classes)
        layers = FeaturesOptions(layer="all").specs(encoder.arguments)
        few._features(Frozen(encoder, layers, identity=""), next(encoder.parameters()).device)
        return 2 * len(rows)

    def _features(self, function: Extractor, device: torch.device | str) -> list[FeatureSets]:
        """Extract the features of the training and of the test images, which are already transformed."""
        size, both = self.options.batch_size, (self._train, self._test)
        return [extract(function, source, _unchanged, batch_size=size, device=device) for source in both]

    def _scored(self, probe: Probe, train: Features, test: Features) -> tuple[float, tuple[float, ...], int | None]:
        """Return the last column of the result, its `choice` and its `choice_images`."""
        # Fits and neighbour searches run in full precision, independent of the precision of the encoder.
        with torch.autocast("cpu", enabled=False):
            result = probe(train, test, choose=True)
        return list(result.scores.values())[-1], result.choice or (), result.choice_images

    def show(self, objective: Objective, metrics: Mapping[str, float], history: History) -> Shown:
        """Compare each probe with its baselines; return the figure `probes`, accuracies over the steps."""
        start = start_of(history, metrics)
        lines = [
            describe(probe, metrics, {self.start: start.get(probe.name)}, multi_label=self._multi_label)
            for probe in self.probes
        ]
        lines += trends(history, self.probes)
        panels = [self._panel(history, probe, start.get(probe.name)) for probe in self.probes]
        return lines, {"probes": Plot(panels, (5 * len(panels), 3.8), shared=True)} if panels else {}

    def _panel(self, history: History, probe: Probe, start: float | None) -> Panel:
        """Plot the accuracies of a probe over the steps, with binomial intervals, next to its baselines."""
        best = curve(history, probe.name, "layer chosen without test images", scale=100)
        if not self._multi_label:  # the standard error of an mAP is unknown
            errors = [_TWO_SIDED * standard_error(value / 100, len(self._test)) for value in best.y]
            best = replace(best, around=[100 * error for error in errors])
        last = curve(history, f"{probe.name}_last", "last layer", "train", 100, DASHED)
        levels = (
            Level(None if start is None else 100 * start, self.start, "--", "{:.1f}"),
            level(history, f"{probe.name}_pixels", "pixels", ":", 100, "{:.1f}"),
            chance(self._chance[probe.is_balanced], "ignoring the image"),
        )
        ylabel = f"{'mAP' if self._multi_label else 'top-1'} on held-out images (%)"
        return Panel(ylabel, (best, last), levels, title=probe.title)

    def measure(self, objective: Objective) -> dict[str, float]:
        """Return for each probe the chosen layer, and the accuracy at it, at each layer and on pixels.

        For multi-label images, accuracies are mAPs, and chance is the mAP of a random order. "…_choice" is the score
        that chose the layer, computed from the training images only (see `Result.choice`), and "…_choice_error" its
        standard error. Metrics are NaN if features are not finite.
        """
        encoder = objective.backbone()
        layers = FeaturesOptions(layer="all").specs(encoder.arguments)
        metrics: dict[str, float] = {"train_images": len(self._train), "test_images": len(self._test)}
        metrics |= {"chance": self._chance[False], **self._pixels}
        of_chance = ((probe.name, self._chance[probe.is_balanced]) for probe in self.probes if probe.is_accuracy)
        metrics |= {f"{name}_chance": chance for name, chance in of_chance}
        try:
            train, test = self._features(Frozen(encoder, layers, identity=""), next(encoder.parameters()).device)
        except UserError:
            return metrics | {probe.name: math.nan for probe in self.probes}
        for probe in self.probes:
            scored = [self._scored(probe, train[layer.name], test[layer.name]) for layer in layers]
            accuracies, choices, counts = zip(*scored, strict=True)
            best = choices.index(max(choices)) if any(choices) else len(layers) - 1
            metrics[probe.name] = accuracies[best]
            metrics[f"{probe.name}_chosen"] = layers[best].layer
            if choices[best]:
                metrics[f"{probe.name}_choice"] = choices[best][0]
                if counts[best]:
                    metrics[f"{probe.name}_choice_error"] = standard_error(choices[best][0], counts[best])
            metrics[f"{probe.name}_last"] = accuracies[-1]
            for layer, accuracy in zip(layers, accuracies, strict=True):
                metrics[f"{probe.name}_layer{layer.layer}"] = accuracy
        return metrics

    @cached_property
    def _pixels(self) -> dict[str, float]:
        """Return the accuracy of each probe on raw pixels, which does not depend on the model."""
        with torch.autocast("cpu", enabled=False):
            train, test = (sets["pixels"] for sets in self._features(Pixels(), "cpu"))
        return {f"{probe.name}_pixels": self._scored(probe, train, test)[0] for probe in self.probes}


def start_of(history: History, metrics: Mapping[str, float]) -> Mapping[str, float | None]:
    """Return the metrics of step 0 if they are of as many images, or else an empty mapping."""
    counts = {name: metrics[name] for name in ("train_images", "test_images")}
    return next((row for row in history if row["step"] == 0 and counts.items() <= row.items()), {})


def trends(history: History, probes: Sequence[Probe]) -> list[str]:
    """Return for each probe whether it still improves, or the step at which it plateaued (Mann-Kendall test)."""
    lines = []
    for probe in probes:
        points = [(row["step"], value) for row in history if (value := row.get(probe.name)) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        if (found := trend(steps, values)) is not None:
            sign, step = found
            words = (
                f"plateau since step {step:.0f}", "significant rise: more steps would help",
                f"significant fall; highest after step {step:.0f}",
            )[sign]  # fmt: skip
            lines.append(f"{probe.title}: {words} ({len(points)} evaluations, Mann-Kendall test, 5 %)")
    return lines


def describe(
    probe: Probe, metrics: Mapping[str, float], baselines: Mapping[str, float | None], *, multi_label: bool
) -> str:
    """Return a line that compares a probe with chance, with other baselines and with pixels.

    Args:
        probe: The probe.
        metrics: Metrics of `Probing`.
        baselines: Values of other baselines by their description; None if unknown.
        multi_label: Whether the metrics are mAPs, whose standard errors are unknown.
    """
    name, images = probe.name, metrics["test_images"]
    chance = metrics.get(f"{name}_chance", metrics["chance"])
    value = metrics[name]
    if math.isnan(value):
        return f"{probe.title}: not measured, the features are not finite"
    is_above = value > chance if multi_label else above_chance(value, chance, images)
    is_informative = is_above or not probe.is_accuracy
    comparisons = [] if is_informative else [NOT_ABOVE_CHANCE]
    for words, baseline in {**baselines, "raw pixels": metrics[f"{name}_pixels"]}.items():
        if baseline is not None:
            # The images are the same, so errors of independent images overestimate the error of the difference.
            error = 0.0 if multi_label else error_of_difference((value, images), (baseline, images))
            words = f"{words} ({100 * baseline:.1f} %)"
            difference = Interval.around(value - baseline, error)
            comparisons.append(f"{verdict(difference, tested=not multi_label)} {words}" if is_informative else words)
    layers = sum(key.startswith(f"{name}_layer") for key in metrics)
    chance_level = f", chance {100 * chance:.1f} %" if probe.is_accuracy else ""
    title = f"{probe.title} mAP" if multi_label and probe.is_accuracy else probe.title
    return (
        f"{title} {100 * value:.1f} % at layer {metrics[f'{name}_chosen']:.0f} of {layers} (chosen without test "
        f"images), last layer {100 * metrics[f'{name}_last']:.1f} %{chance_level}: {'; '.join(comparisons)}"
    )


def _unchanged(images: Tensor | Sequence[Tensor], slots: Tensor, seed: int) -> Tensor:
    """Return images in memory unchanged, since they are already transformed."""
    assert isinstance(images, Tensor)
    return images
