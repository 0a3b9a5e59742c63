"""Conclude whether frozen features outperform the baselines, with advice if they do not."""

import math
from collections.abc import Sequence

from ssvit.evaluation.baselines import PIXELS, RANDOM
from ssvit.evaluation.report.scores import Scores
from ssvit.evaluation.report.side_by_side import SideBySide, points
from ssvit.evaluation.statistics import NOTHING_YET


def conclude(scores: Sequence[Scores], compared: SideBySide, *, side: int, size: int) -> list[str]:
    """Return sentences: probes by which a baseline is better, then the gains, then advice if it applies.

    A gain is significant if the intervals of the differences from all baselines exclude zero (`Difference.sign`).
    Advice is included if a baseline is significantly better, or if no gain is significant.

    Args:
        scores: The results of all probes.
        compared: The same probes, with the checkpoint as the first entry.
        side: The shorter side of the images in pixels (median).
        size: The shorter side of the encoder's input in pixels.
    """
    baselines = [name for name in (RANDOM, PIXELS) if name in compared.groups]
    losses: dict[str, list[str]] = {name: [] for name in baselines}
    gains, unclear, untested = [], [], []
    for one in scores:
        differences = {
            standing.encoder: standing.difference
            for standing in compared.standings
            if standing.probe == one.title and standing.encoder in baselines and standing.difference is not None
        }
        for name, difference in differences.items():
            if difference.sign < 0:
                losses[name].append(f"{one.title} {points(difference.mean)}")
        if differences and one.tells:
            signs = {difference.sign for difference in differences.values()}
            gain = f"{one.title} {points(min(difference.mean for difference in differences.values()))}"
            if signs == {1}:
                gains.append(gain)
            elif -1 not in signs:
                unclear.append(gain)
        elif one.tells and (above := higher_baseline(one)[1]) is not None:
            untested.append((one.title, above))
    sentences = [
        f"{name.capitalize()} are significantly better than the features: {', '.join(lost)} percentage points."
        for name, lost in losses.items()
        if lost
    ]
    both = " and ".join(baselines)
    from_higher = "percentage points from the higher baseline."
    if gains:
        sentences.append(f"The features are significantly better than {both}: {', '.join(gains)} {from_higher}")
    elif baselines and (unclear or any(losses.values()) or not untested):
        sentences.append(f"No significance test shows a gain of the frozen features over both {both}.")
    if unclear:
        sentences.append(f"Not significant: {', '.join(unclear)} {from_higher}")
    if untested:
        listed = ", ".join(f"{title} {points(above)}" for title, above in untested)
        sentences.append(f"Not tested for significance: {listed} {from_higher}")
    if not baselines:
        sentences.append("No baseline was measured.")
    silent = [
        f"{one.title} {100 * one.values[one.best][-1]:.1f} % (chance {100 * (one.chance or 0):.1f} %)"
        for one in scores
        if not one.tells
    ]
    if silent:
        sentences.append(f"{', '.join(silent)}: not {NOTHING_YET}.")
    promising = gains or any(above > 0 for _, above in untested)
    return [*sentences, _advice(side, size)] if baselines and (any(losses.values()) or not promising) else sentences


def _advice(side: int, size: int) -> str:
    """Return advice for the case of no gain, and the command that measures fine-tuning."""
    tries = ["existing weights (the command pretrain with checkpoint=PATH)"]
    if side > size:
        tries.append(
            f"a larger data.image_size (the images have {side} pixels in the median, this encoder sees {size})"
        )
    tries += ["more recipe.steps", "standardised features (probes=[knn_standardized])"]
    measured = "The gain after fine-tuning is measured by the command finetune with compare=scratch"
    return f"To try, in this order: {', '.join(tries)}. {measured}"


def higher_baseline(one: Scores) -> tuple[str | None, float | None]:
    """Return the chosen features of the better baseline and the difference of the encoder from it in [-1, 1].

    Both are None without a baseline. The difference is rounded to the printed precision, so that +0.0 percentage points
    are not a gain.
    """
    features = [one.chosen[name] for name in (RANDOM, PIXELS) if name in one.chosen]
    values = {name: one.values[name][-1] for name in features if math.isfinite(one.values[name][-1])}
    baseline = max(values, key=lambda name: values[name], default=None)
    difference = math.nan if baseline is None else one.values[one.best][-1] - values[baseline]
    return baseline, round(difference, 3) if math.isfinite(difference) else None
