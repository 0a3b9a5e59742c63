"""A classifier's answer to a user's own pictures.

Letters: k classes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ssvit.data.decode import Unreadable, load
from ssvit.objectives.classify import Classify


@torch.no_grad()
def name(
    classifier: Classify, paths: Sequence[str], transform: Any, *, batch_size: int = 64
) -> Iterator[tuple[str, Tensor | Unreadable]]:
    """For each picture in turn its path and the probabilities of the classes, (k,), or why it cannot be read."""
    for start in range(0, len(paths), batch_size):
        part = paths[start : start + batch_size]
        read: dict[int, Tensor] = {}
        answers: dict[int, Tensor | Unreadable] = {}
        for place, path in enumerate(part):
            try:
                read[place] = load(path)
            except Unreadable as failure:
                answers[place] = failure
        if read:
            images = transform(list(read.values()), torch.arange(len(read)), 0)
            answers |= zip(read, classifier.probabilities(classifier.logits(images).float()), strict=True)
        yield from ((path, answers[place]) for place, path in enumerate(part))
