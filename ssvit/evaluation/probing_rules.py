"""What probes during pre-training may be, how often they are due, and what they cost. Standard library only."""

from typing import Any

from ssvit.options import OptionError, whole

AUTO = "auto"
SHARE = 0.05  # of the work of training, the most that probes may cost by default
COST = 0.5  # of a training image: a third for the pass forward, the rest for neighbours, fits and the picture


def probing(*, every: Any, train_images: Any, test_images: Any, batch_size: Any) -> None:
    """OptionError unless these can be what all probes of a run share."""
    if every != AUTO:
        try:
            whole("every", every)
        except OptionError:
            raise OptionError("every", every, f"must be a whole number of steps, 1 or more, or {AUTO}") from None
    for name, value in (("train_images", train_images), ("test_images", test_images), ("batch_size", batch_size)):
        whole(name, value)


def interval(every: Any, *, images: int, steps: int, batch_size: int, evaluate_every: int) -> int:
    """Steps from one evaluation of `images` images to the next; the first is at step 0, the last at the end.

    auto: the smallest multiple of evaluate_every at which all evaluations together, an image of theirs counted as COST
    of a training image, stay below SHARE of the run. In a run too short for that, the first and the last are left.
    """
    if every != AUTO:
        return every
    affordable = SHARE * steps * batch_size / (COST * images)
    for candidate in range(evaluate_every, steps, evaluate_every):
        if 1 + -(-steps // candidate) < affordable:
            return candidate
    return steps


def knn(*, k: Any) -> None:
    """OptionError unless these can be the options of `ssvit.evaluation.knn_probe.KnnProbe`."""
    whole("k", k)


def few_shot(*, shots: Any) -> None:
    """OptionError unless these can be the options of `ssvit.evaluation.few_shot_probe.FewShotProbe`."""
    whole("shots", shots)
