"""Compare several runs: pre-trained against from scratch over seeds, and the choice of a learning rate.

A run is a function of its folder's name and of the options that it changes; it returns the rows of metrics. An
interrupted comparison resumes where it was stopped, as each of its runs does. This module does not import torch.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ssvit.checkpoints.checkpoint import Checkpoint, stages_of
from ssvit.checkpoints.run_folder import rows as rows_of
from ssvit.engine import atomic_io
from ssvit.engine.processes import is_main_process
from ssvit.evaluation.statistics import (
    NOT_ABOVE_CHANCE,
    Interval,
    above_chance,
    another_seed,
    error_of_difference,
    of_seeds,
)
from ssvit.figures.base import Figure

Rows = list[dict[str, Any]]
Run = Callable[[str, Mapping[str, Any]], Rows]
# Splits for the reported score and for the curve, in order of preference: see `ssvit.data.sources.base.Data`.
TEST_OR_VALIDATION, VALIDATION_OR_TEST = ("test", "validation"), ("validation", "test")
MEASURES = {"accuracy": "top-1", "map": "mAP", "miou": "mIoU"}
PRETRAINED, SCRATCH = "pretrained", "scratch"
SIDES = {PRETRAINED: "pre-trained", SCRATCH: "from scratch"}
Sides = Mapping[str, Mapping[str, Any]]  # options changed by each side of a comparison


def sides(scratch: Mapping[str, Any]) -> Sides:
    """Return the options changed by each side of compare=scratch, by its name.

    Args:
        scratch: Options of the recipe that differ for training from random weights.
    """
    recipe = {f"recipe.{name}": value for name, value in scratch.items()}
    return {PRETRAINED: {}, SCRATCH: {"checkpoint": "scratch", **recipe}}


class Spent(NamedTuple):
    """Store the images seen in training, and the seconds of their updates: CPU time, or time by the clock on a GPU."""

    images: int = 0
    seconds: float = 0.0

    @classmethod
    def on(cls, rows: Rows, batch_size: int, *, last: int) -> "Spent":
        """Return what a run has spent until the step `last`, which may lie between two logged steps."""
        spent, step = cls(), 0
        for row in rows:
            if "seconds" in row and step < min(last, row["step"]):
                steps = min(last, row["step"]) - step
                share = steps / (row["step"] - step)
                spent = cls(spent.images + steps * batch_size, spent.seconds + share * row["seconds"])
                step = row["step"]
        return spent

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> "Spent | None":
        """Return what the run of a checkpoint and those that it continues have spent; None if one is unknown."""
        if (stages := stages_of(checkpoint)) is None:
            return None
        spent = [cls.on(rows_of(folder), values["recipe"]["batch_size"], last=last) for folder, values, last in stages]
        return cls(sum(stage.images for stage in spent), sum(stage.seconds for stage in spent))


def compare_sides(
    run: Run,
    sides: Sides,
    *,
    seed: int,
    seeds: int,
    folder: Path,
    earlier_gains: Sequence[float] = (),
    longer: Callable[[Rows], Mapping[str, Any]] = lambda rows: {},
) -> None:
    """Train all sides with several seeds, and print, store (comparison.json) and plot (comparison.png) the result.

    Args:
        run: Function that executes a run.
        sides: Options changed by each side.
        seed: The first seed.
        seeds: Number of seeds.
        folder: Folder of the results.
        earlier_gains: Gains of other seeds in percentage points, whose spread is that of one more seed.
        longer: Returns options that training from random weights also changes, from the rows of the first pre-trained
            run, which is trained before it.
    """
    runs: dict[str, list[Rows]] = {side: [] for side in sides}
    for run_seed in range(seed, seed + seeds):
        for side, changes in sides.items():
            added = longer(runs[PRETRAINED][0]) if side == SCRATCH else {}
            runs[side].append(run(f"{side}_seed{run_seed}", {**added, **changes, "recipe.seed": run_seed}))
    if not is_main_process():
        return
    curves = {side: _curve([scored(rows, VALIDATION_OR_TEST) for rows in of_side]) for side, of_side in runs.items()}
    finals = {
        side: [scored(rows, TEST_OR_VALIDATION)[-1].accuracy for rows in of_side] for side, of_side in runs.items()
    }
    summary = {side: _spread(values) for side, values in finals.items()}
    gain = summary[PRETRAINED]["mean"] - summary[SCRATCH]["mean"]
    last, of_curve = (scored(runs[PRETRAINED][-1], parts)[-1] for parts in (TEST_OR_VALIDATION, VALIDATION_OR_TEST))
    error, noise = _error(summary, last)
    verdict = _verdict(summary, last, error, noise)
    gains = [after - before for after, before in zip(finals[PRETRAINED], finals[SCRATCH], strict=True)]
    predicted = _of_another_seed(gains, [gain / 100 for gain in earlier_gains], summary, last)
    steps = {side: max(row["step"] for row in of_side[-1]) for side, of_side in runs.items()}
    report = {
        "seeds": list(range(seed, seed + seeds)), "measured_on": last.part, "images": last.images, "steps": steps,
        "chance": last.chance, "accuracy": summary, "gain": gain, "error": error, "another_seed": predicted,
        "verdict": verdict, "curves": curves,
    }  # fmt: skip
    atomic_io.replace(folder / "comparison.json", (json.dumps(report, indent=1) + "\n").encode())

    atomic_io.replace(folder / "comparison.png", _plot(curves, summary, of_curve.part, last).png())
    each_side = f"{seeds} seeds each, mean ± deviation" if seeds > 1 else "one seed each"
    print(f"\n{last.measure} on the {last.part} images, {each_side}")
    for side, words in SIDES.items():
        mean, deviation, values = summary[side].values()
        spread = f" ± {100 * deviation:.2f}" if seeds > 1 else ""
        each = f"  ({'  '.join(f'{100 * value:.2f}' for value in values)})" if seeds > 1 else ""
        print(f"  {words:<21}{100 * mean:6.2f}{spread} %  {steps[side]:6} steps{each}")
    if last.chance is not None:
        constant = "a random order" if last.measure == "mAP" else "always the most frequent class"
        print(f"  {'chance':<21}{100 * last.chance:6.2f} %  ({constant})")
    print(f"stored: {folder / 'comparison.json'}, {folder / 'comparison.png'}")
    if predicted is not None:
        source = f"the spread of {len(earlier_gains)} earlier seeds" if earlier_gains else "the spread of these seeds"
        low, high = (100 * value for value in predicted)
        print(f"Another seed: {low:+.1f} to {high:+.1f} percentage points (95 % prediction interval, from {source}).")
    print(_conclusion(summary, last.measure, error, verdict))


def _plot(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    finals: Mapping[str, Mapping[str, Any]],
    split: str,
    last: "FinalScore",
) -> Figure:
    """Plot the accuracy of each side over the steps, with deviations over seeds, and the reported accuracy."""
    from ssvit.figures.plot import DASHED, Dash, Line, Panel, Plot, chance

    lines = []
    dashes: tuple[Dash, Dash] = ("-", DASHED)
    for (side, curve), color, dash in zip(curves.items(), ("model", "replaced"), dashes, strict=True):
        mean, spread = ([100 * value for value in curve[name]] for name in ("mean", "deviation"))
        value, deviation = (100 * finals[side][name] for name in ("mean", "deviation"))
        is_reported_elsewhere = split != last.part
        label = f"{SIDES[side]}{f', {last.part}' * is_reported_elsewhere}: {value:.1f} %" + (
            f" ± {deviation:.1f}" if deviation else ""
        )
        lines.append(Line(curve["step"], mean, "" if is_reported_elsewhere else label, color, dash, around=spread))
        if is_reported_elsewhere:
            lines.append(Line(curve["step"][-1:], [value], label, color, "", "*", size=12, around=[deviation]))
    constant = chance(last.chance, "a random order" if last.measure == "mAP" else "most frequent class")
    ylabel = f"{last.measure} on the {split} images (%)"
    return Plot([Panel(ylabel, lines, [constant], "step of fine-tuning")], (6.4, 4))


def _conclusion(summary: Mapping[str, Mapping[str, Any]], measure: str, error: float | None, verdict: str) -> str:
    """Return the result of a comparison in one sentence."""
    before, after = (summary[side]["mean"] for side in (SCRATCH, PRETRAINED))
    gain = after - before
    interval = "" if error is None else f" (95 % interval {100 * (gain - error):+.1f} to {100 * (gain + error):+.1f})"
    change = f"{100 * gain:+.1f} percentage points{interval}"
    if verdict:
        return f"The difference between pre-trained and from scratch, {change}, is not significant: {verdict}."
    word = ("did not change", "raised", "lowered")[Interval.around(gain).sign]
    return f"Pre-training {word} {measure} from {100 * before:.1f} to {100 * after:.1f} %: {change}."


def _error(summary: Mapping[str, Mapping[str, Any]], measured: "FinalScore") -> tuple[float | None, str]:
    """Return the half-width of the gain's 95 % interval, and its sources: seeds (Student's t) and images (binomial)."""
    compared = [summary[side] for side in (PRETRAINED, SCRATCH)]
    errors = {}
    if (interval := of_seeds(*(side["values"] for side in compared))) is not None:
        errors["the seeds"] = (interval.high - interval.low) / 2
    if measured.images is not None:
        errors["the images"] = _error_of_images(summary, measured.images)
    return math.hypot(*errors.values()) if errors else None, " and ".join(errors)


def _error_of_images(summary: Mapping[str, Mapping[str, Any]], images: int) -> float:
    """Return the half-width of the gain's 95 % interval over test images."""
    return error_of_difference(*((summary[side]["mean"], images) for side in (PRETRAINED, SCRATCH)))


def _of_another_seed(
    gains: Sequence[float], earlier: Sequence[float], summary: Mapping[str, Mapping[str, Any]], measured: "FinalScore"
) -> Interval | None:
    """Return the 95 % prediction interval of the gain with another seed and other test images; None if unknown."""
    interval = another_seed(gains, earlier)
    if interval is None or measured.images is None:
        return interval
    error = math.hypot((interval.high - interval.low) / 2, _error_of_images(summary, measured.images))
    return Interval.around(statistics.fmean(gains), error)


def _verdict(summary: Mapping[str, Mapping[str, Any]], measured: "FinalScore", error: float | None, noise: str) -> str:
    """Return why a gain is not significant; "" if it is significant, or if its error is unknown."""
    means = [summary[side]["mean"] for side in (PRETRAINED, SCRATCH)]
    if not any(above_chance(mean, measured.chance, measured.images) for mean in means):
        return f"both sides are {NOT_ABOVE_CHANCE}"
    if error is not None and not Interval.around(means[0] - means[1], error).sign:
        return f"the 95 % interval of {noise} (± {100 * error:.2f}) contains zero"
    return ""


def choose(run: Run, *, learning_rates: Sequence[float], development: float, folder: Path) -> float:
    """Train with each learning rate, choose the best on validation images, and train with it on all training images.

    Without validation images, a fraction of the training images is held out. Only the last run, in the subfolder
    `chosen`, is evaluated on test images. Ties are broken in favour of the lowest rate. Results are stored in
    sweep.json.

    Args:
        run: Function that executes a run.
        learning_rates: Learning rates.
        development: Fraction of the training images that is held out if there are no validation images.
        folder: Folder of the results.

    Returns:
        The chosen learning rate.
    """
    scores = {}
    for rate in sorted(learning_rates):
        rows = run(f"lr_{float(rate)}", {"recipe.lr": rate, "development": development})
        scores[rate] = scored(rows, VALIDATION_OR_TEST)[-1]
    best = max(scores, key=lambda rate: scores[rate].accuracy)
    if is_main_process():
        print(f"\n{scores[best].measure} on the validation images")
        for rate, score in scores.items():
            print(f"  recipe.lr={rate:<8g}{100 * score.accuracy:6.2f} %{'   chosen' if rate == best else ''}")
        chance = scores[best].chance
        if chance is not None and not scores[best].is_above_chance:
            print(f"  chance {100 * chance:.2f} %: no rate is significantly above chance")
        print(f"training on all training images with recipe.lr={best:g}", flush=True)
    rows = run("chosen", {"recipe.lr": best})
    if is_main_process():
        test = scored(rows, TEST_OR_VALIDATION)[-1]
        tried = {str(rate): score.accuracy for rate, score in scores.items()}
        report = {"development": tried, "chosen": best, "test": test.accuracy, "measured_on": test.part}
        atomic_io.replace(folder / "sweep.json", (json.dumps(report, indent=1) + "\n").encode())
        result = f"{test.measure} on the {test.part} images with recipe.lr={best:g}: {100 * test.accuracy:.2f} %"
        print(f"\n{result}{'' if test.is_above_chance else f', {NOT_ABOVE_CHANCE}'}; see {folder / 'sweep.json'}")
    return best


class FinalScore(NamedTuple):
    """Store the accuracy, mAP or mIoU on test or validation images after a step.

    Attributes:
        step: The step.
        accuracy: Accuracy, mAP of multi-label images, or mIoU of segmentation, in [0, 1].
        part: "test" or "validation".
        chance: Chance level; None if unknown.
        images: Number of images; None if unknown, or for mAP and mIoU, which are no shares of the images.
        measure: Name of the measure.
    """

    step: int
    accuracy: float
    part: str
    chance: float | None
    images: int | None
    measure: str = "top-1"

    @property
    def is_above_chance(self) -> bool:
        """Return whether the score is above chance; True if the error is unknown."""
        return above_chance(self.accuracy, self.chance, self.images)


def scored(rows: Rows, parts: Sequence[str]) -> list[FinalScore]:
    """Return the scores of a run by step, each on the first of the parts that it has."""
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:  # metrics that are measured only at the end may be in a separate row
        steps.setdefault(row["step"], {}).update(row)
    scores = []
    for step, row in steps.items():
        measured = ((part, name) for part in parts for name in MEASURES if row.get(f"{part}/{name}") is not None)
        for part, name in islice(measured, 1):
            value, chance = row[f"{part}/{name}"], row.get(f"{part}/{name}_constant")
            images = row.get(f"{part}/images") if name == "accuracy" else None
            scores.append(FinalScore(step, value, part, chance, images, MEASURES[name]))
    return scores


def _curve(runs: Sequence[Sequence[FinalScore]]) -> dict[str, list[float]]:
    """Return mean and standard deviation of the accuracy at the steps that all runs have, since runs may end early."""
    by_step = [{score.step: score.accuracy for score in run} for run in runs]
    steps = [step for step in by_step[0] if all(step in run for run in by_step)]
    spreads = [_spread([run[step] for run in by_step]) for step in steps]
    return {"step": steps, **{name: [spread[name] for spread in spreads] for name in ("mean", "deviation")}}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean and sample standard deviation, which is 0 for a single value."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "deviation": deviation, "values": list(values)}
