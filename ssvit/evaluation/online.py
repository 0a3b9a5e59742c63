"""Do the features get better? Probes of the frozen encoder while it trains, beside trivial baselines and chance.

Each evaluation extracts the features of all layers once, for all probes: of labelled training images, and of held-out
images, the same each time. The baselines are the encoder with its random weights, which is the run's own step 0, and
raw pixels. Chance is the share of the most frequent class of the held-out images.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssvit.data.loader import evaluation_batches
from ssvit.data.memory import Memory
from ssvit.data.source import Source, subset
from ssvit.evaluation.base import Evaluation, Evaluator, History, Probe, with_metrics
from ssvit.evaluation.features import Extractor, Features, FeatureSets, Frozen, Pixels, extract
from ssvit.evaluation.options import PATCHES, readings
from ssvit.evaluation.significance import NOTHING_YET, above_chance, chance, standard_error
from ssvit.figures import probes as figures
from ssvit.objectives.base import Objective
from ssvit.options import UserError, whole


class Probing(Evaluator):
    """Probes of what the encoder's own pooling makes of the outputs after each layer and its last norm: the mean of
    the patches', or the class token's.

    probes: by any name. train, test: what train_images and test_images of them are taken from, as many of each class
    as of any other; all, where there are fewer. They are read here, once. every: steps from one evaluation to the next.

    `probes` are then those that the images suffice for; `refused` says of each other one why it is left out.
    """

    def __init__(
        self,
        *,
        probes: Mapping[str, Probe],
        train: Source,
        test: Source,
        transform: Any,
        every: int,
        train_images: int,
        test_images: int,
        batch_size: int = 128,
    ) -> None:
        for name, value in (("every", every), ("train_images", train_images), ("test_images", test_images)):
            whole(name, value)
        whole("batch_size", batch_size)
        self.every, self.batch_size = every, batch_size
        self.probes: list[Probe] = []
        self.refused: list[str] = []
        if train.labels is None or test.labels is None:
            self.refused = ["no probes: the images have no labels"]
            return
        self._train = self._read(subset(train, images=min(train_images, len(train))), transform)
        self._test = self._read(subset(test, images=min(test_images, len(test))), transform)
        self._chance = chance(self._test.labels.tolist())
        self._counts = {"train_images": len(self._train), "test_images": len(self._test)}
        for name, probe in probes.items():
            if probe.features == PATCHES:
                later = f"python tools/evaluate.py probes=[{name}]"
                self.refused.append(f"no {name.replace('_', '-')} probe in training, but afterwards: {later}")
                continue
            try:
                probe.check(self._train.labels, self._test.labels, train.classes)
                self.probes.append(probe)
            except UserError as error:
                more = " (probing.train_images takes more)" if train_images < len(train) else ""
                what = f"no {name.replace('_', '-')} probe by {len(self._train)} training images{more}"
                self.refused.append(f"{what}: {error}")

    def _read(self, source: Source, transform: Any) -> Memory:
        """The images as the encoder sees them, as bytes. Each process has them all."""
        batches = list(evaluation_batches(source, transform, batch_size=self.batch_size))
        if not batches:
            raise UserError("none of the images for the probes can be read")
        images, labels = (torch.cat(parts) for parts in zip(*((b.images, b.labels) for b in batches), strict=True))
        return Memory(images, labels, source.classes)

    def _features(self, function: Extractor, device: torch.device | str) -> tuple[FeatureSets, FeatureSets]:
        options = {"batch_size": self.batch_size, "device": device}
        train, test = (extract(function, images, _as_it_is, **options) for images in (self._train, self._test))
        return train, test

    def _asked(self, probe: Probe, train: Features, test: Features) -> tuple[float, tuple[float, ...]]:
        """The accuracy, and what chooses among layers."""
        # The fits and the neighbours are exact, in whatever numbers the encoder computes.
        with torch.autocast("cpu", enabled=False):
            result = probe(train, test, choose=True)
        return list(result.scores.values())[-1], result.choice or ()

    def __call__(self, objective: Objective, history: History | None = None) -> Evaluation:
        """Of each probe the accuracy at the layer that leave-one-out chooses, and which that is; at the last layer, at
        every one, and of the pixels. NaN if features are not finite, which is no reason to end a run.

        Lines: each probe beside its baselines. Figures: `probes`, the accuracies over the steps.
        """
        metrics = self._metrics(objective)
        if history is None:
            return Evaluation(metrics=metrics)
        history = with_metrics(history, metrics)
        start = start_of(history, metrics)
        titles = {probe.name: probe.title for probe in self.probes}
        panels = figures.probes(history, titles, start=start, chance=metrics["chance"])
        return Evaluation(metrics=metrics, lines=describe(metrics, self.probes, start), figures={"probes": panels})

    def _metrics(self, objective: Objective) -> dict[str, float]:
        encoder = objective.backbone()
        device = next(encoder.parameters()).device
        layers = readings(encoder.arguments, layer="all")
        # Numbers of other features are not to be compared with these.
        pooled = {"class_token": 1} if encoder.pooling == "class_token" else {}
        metrics: dict[str, float] = {**self._counts, **pooled, "chance": self._chance, **self._pixels}
        try:
            train, test = self._features(Frozen(encoder, layers, identity=""), device)
        except UserError:
            return metrics | {probe.name: math.nan for probe in self.probes}
        for probe in self.probes:
            found = [self._asked(probe, train[layer.name], test[layer.name]) for layer in layers]
            accuracies, choices = zip(*found, strict=True)
            best = choices.index(max(choices)) if any(choices) else len(layers) - 1
            metrics[probe.name] = accuracies[best]
            metrics[f"{probe.name}_chosen"] = layers[best].layer
            metrics[f"{probe.name}_last"] = accuracies[-1]
            for layer, accuracy in zip(layers, accuracies, strict=True):
                metrics[f"{probe.name}_layer{layer.layer}"] = accuracy
        return metrics

    @cached_property
    def _pixels(self) -> dict[str, float]:
        """Of each probe the accuracy on raw pixels, which needs no model."""
        with torch.autocast("cpu", enabled=False):
            train, test = (sets["pixels"] for sets in self._features(Pixels(), "cpu"))
        return {f"{probe.name}_pixels": self._asked(probe, train, test)[0] for probe in self.probes}


_COUNTS = ("train_images", "test_images", "class_token")


def start_of(history: History, metrics: Mapping[str, float]) -> Mapping[str, float | None]:
    """What step 0 gave on the same images and features; empty if it did not."""
    counts = {name: metrics[name] for name in _COUNTS if name in metrics}
    return next((row for row in history if row["step"] == 0 and counts.items() <= row.items()), {})


def describe(metrics: Mapping[str, float], probes: Sequence[Probe], start: Mapping[str, float | None]) -> list[str]:
    """Each probe beside its baselines; start: the metrics of random weights."""
    return [
        *(_line(probe, metrics, start.get(probe.name)) for probe in probes),
        f"by {metrics['train_images']} training images, on {metrics['test_images']} held-out ones; "
        "perhaps: by less than two standard errors",
    ]


def _line(probe: Probe, metrics: Mapping[str, float], start: float | None) -> str:
    """A probe's accuracies beside chance, that of the start and that of the pixels."""
    name, images, chance = probe.name, metrics["test_images"], metrics["chance"]
    value = metrics[name]
    if math.isnan(value):
        return f"{probe.title}: not measured, the features are not finite"
    tells = not probe.is_accuracy or above_chance(value, chance, images)
    beside = [] if tells else [f"not {NOTHING_YET}"]
    for baseline, words in ((start, "random weights"), (metrics[f"{name}_pixels"], "the pixels")):
        if baseline is None:
            beside.append(f"{words} were not measured on these images, as step 0 would have been")
        elif tells:
            beside.append(f"{_verdict(value, baseline, images)} than {words}, {100 * baseline:.1f} %")
        else:
            beside.append(f"{words} {100 * baseline:.1f} %")
    layers = sum(key.startswith(f"{name}_layer") for key in metrics)
    least = f", chance {100 * chance:.1f} %" if probe.is_accuracy else ""
    return (
        f"{probe.title} {100 * value:.1f} % at layer {metrics[f'{name}_chosen']:.0f} of {layers} (chosen without test "
        f"images), last layer {100 * metrics[f'{name}_last']:.1f} %{least}: {'; '.join(beside)}"
    )


def _verdict(value: float, baseline: float, images: float) -> str:
    """Two accuracies on as many images, taken for independent: on the same ones a difference has less error."""
    if value <= baseline:
        return "NO better"
    error = math.hypot(standard_error(value, images), standard_error(baseline, images))
    return "better" if value - baseline >= 2 * error else "perhaps better"


def _as_it_is(images: Tensor, slots: Tensor, seed: int) -> Tensor:
    """What `Probing` reads is transformed already."""
    return images
