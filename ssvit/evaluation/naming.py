"""A classifier's answer to a user's own pictures."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ssvit.data.batch import EvalTransform
from ssvit.data.decode import Unreadable, load
from ssvit.objectives.classify import Classify

_BATCH = 64  # pictures


@torch.no_grad()
def name(
    classifier: Classify, paths: Sequence[str], transform: EvalTransform
) -> Iterator[tuple[str, Tensor | Unreadable]]:
    """For each picture in turn its path and the probabilities of the k classes, (k,), or why it cannot be read."""
    for start in range(0, len(paths), _BATCH):
        part = paths[start : start + _BATCH]
        pictures: dict[int, Tensor] = {}
        answers: dict[int, Tensor | Unreadable] = {}
        for place, path in enumerate(part):
            try:
                pictures[place] = load(path)
            except Unreadable as failure:
                answers[place] = failure
        if pictures:
            images = transform(list(pictures.values()), torch.arange(len(pictures)), 0)
            answers |= zip(pictures, classifier.probabilities(classifier.logits(images).float()), strict=True)
        yield from ((path, answers[place]) for place, path in enumerate(part))
