"""Self-supervised pre-training of Vision Transformers by masked patch prediction."""

from ssvit.api import Evaluation, Run, evaluate, finetune, load, load_classifier, pretrain

__all__ = ["Evaluation", "Run", "evaluate", "finetune", "load", "load_classifier", "pretrain"]
