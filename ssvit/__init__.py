"""Self-supervised pre-training of Vision Transformers by masked patch prediction."""

import importlib
from typing import TYPE_CHECKING, Any

from ssvit.errors import UserError

if TYPE_CHECKING:
    from ssvit.api import Evaluation, Run, evaluate, finetune, load, load_classifier, load_segmenter
    from ssvit.api import pretrain, try_images  # isort: skip

__all__ = [
    "Evaluation", "Run", "UserError", "evaluate", "finetune", "load", "load_classifier", "load_segmenter", "pretrain",
    "try_images",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the Python API when one of its names is first used (PEP 562); commands do not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module("ssvit.api"), name)


def __dir__() -> list[str]:
    return __all__
