"""Self-supervised pre-training of Vision Transformers by masked patch prediction."""

from ssvit.api import Evaluation, Run, evaluate, finetune, load, load_classifier, pretrain
from ssvit.options import UserError

__all__ = ["Evaluation", "Run", "UserError", "evaluate", "finetune", "load", "load_classifier", "pretrain"]
