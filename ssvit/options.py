"""The options of the commands that train and evaluate, and of all their parts, to be written in Python. No torch.

`ssvit.pretrain`, `ssvit.finetune` and `ssvit.evaluate` accept them as one object. Options that are not set have the
values of the files of options, as on the command line; an option that is None by default although its type does not
permit it takes the value of another part, such as `ViT.image_size` that of the images.
"""

from ssvit.data.augment.options import CenterCrop, InceptionCrop, MultiCrop, ResizeCrop, ShiftCrop
from ssvit.data.sources.base_options import Subset
from ssvit.data.sources.datasets_options import Csv, Folder, HuggingFace, Shards, TorchvisionSet, Voc, Vtab
from ssvit.data.sources.shapes_options import Shapes
from ssvit.devices import Launch
from ssvit.evaluation.evaluators.options import LabelFree, Probing, ShapeBias
from ssvit.evaluation.options import HNSW, IVF, Features, Flat
from ssvit.evaluation.probes.options import Attentive, Knn, Logistic, Retrieval, Ridge, Segmentation, Sgd
from ssvit.evaluation.report.options import Evaluate
from ssvit.loading.options import LoadClassifier, LoadEncoder, LoadLayers, LoadTeacher
from ssvit.models.timm_options import Timm
from ssvit.models.vit_options import Decoder, Lora, Stem, ViT
from ssvit.objectives.classify_options import Classify, Distillation
from ssvit.objectives.codebook_options import Codebook
from ssvit.objectives.continuation_options import Anchor, Continuation
from ssvit.objectives.contrastive_options import ContrastiveTuning, SimCLR
from ssvit.objectives.diet_options import Diet
from ssvit.objectives.dino_options import Dino, IBot
from ssvit.objectives.distill_options import Distill
from ssvit.objectives.latent_options import Latent
from ssvit.objectives.mae_options import MAE
from ssvit.objectives.masked_patch_options import MaskedPatch, Masking
from ssvit.objectives.segment_options import Segment
from ssvit.objectives.targets_options import Hog, MeanColor, Pixels
from ssvit.training.loggers.options import TensorBoard, Wandb
from ssvit.training.options import Finetune, Pretrain, Table4
from ssvit.training.recipe import Recipe

__all__ = [
    "HNSW", "IVF", "MAE", "Anchor", "Attentive", "CenterCrop", "Classify", "Codebook", "Continuation",
    "ContrastiveTuning", "Csv", "Decoder", "Diet", "Dino", "Distill", "Distillation", "Evaluate", "Features",
    "Finetune", "Flat", "Folder", "Hog", "HuggingFace", "IBot", "InceptionCrop", "Knn", "LabelFree", "Latent", "Launch",
    "LoadClassifier", "LoadEncoder", "LoadLayers", "LoadTeacher", "Logistic", "Lora", "MaskedPatch", "Masking",
    "MeanColor", "MultiCrop", "Pixels", "Pretrain", "Probing", "Recipe", "ResizeCrop", "Retrieval", "Ridge",
    "Segment", "Segmentation", "Sgd", "ShapeBias", "Shapes", "Shards", "ShiftCrop", "SimCLR", "Stem", "Subset",
    "Table4", "TensorBoard", "Timm", "TorchvisionSet", "ViT", "Voc", "Vtab", "Wandb",
]  # fmt: skip
