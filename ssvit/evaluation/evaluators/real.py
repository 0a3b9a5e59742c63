"""Read the reassessed labels of ImageNet's validation images (ReaL, Beyer et al. 2020)."""

import os
import re
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Len, Lt
from pydantic import TypeAdapter, ValidationError

from ssvit.data.sources.base import Source
from ssvit.errors import UserError

_IMAGES, _CLASSES = 50_000, 1000
_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\b")
_CLASS = re.compile(r"n\d{8}")
_LABELS = TypeAdapter(Annotated[list[set[Annotated[int, Ge(0), Lt(_CLASSES)]]], Len(_IMAGES, _IMAGES)])


def read_real(path: str, source: Source) -> list[set[int]]:
    """Return the correct classes of each image of a source; an empty set excludes the image from the metric.

    Args:
        path: The authors' file real.json, which has a list of class numbers for each of the 50,000 images.
        source: Some of these images, with ImageNet's 1000 classes in alphabetical order.

    Raises:
        UserError: If the file, the classes or the names of the images are others.
    """
    try:
        classes = _LABELS.validate_json(Path(path).read_bytes(), strict=True)
    except (OSError, ValidationError):
        expected = f"must be a JSON list of {_IMAGES} lists of class numbers from 0 to {_CLASSES - 1}"
        raise UserError(f"real={path}: {expected}") from None
    if len(source.classes) != _CLASSES or not all(map(_CLASS.fullmatch, source.classes)):
        raise UserError(f"real={path}: requires the {_CLASSES} classes of ImageNet, named by their wnid")
    matches = [_IMAGE.match(os.path.basename(source.name(index))) for index in range(len(source))]
    class_numbers = [0 if match is None else int(match[1]) for match in matches]
    for index, number in enumerate(class_numbers):
        if not 1 <= number <= _IMAGES:
            expected = "must be named ILSVRC2012_val_00000001 and so on"
            raise UserError(f"real={path}: {source.name(index)} {expected}")
    return [classes[number - 1] for number in class_numbers]
