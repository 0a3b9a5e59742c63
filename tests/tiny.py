"""The smallest run that has everything: files read by workers, dropout, accumulation, an averaged copy, checkpoints.

A module of its own, so that child processes can be started on its functions.
"""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import torch

from ssvit.data.augment.options import InceptionCrop, MultiCrop
from ssvit.data.augment.views import Augmentation
from ssvit.data.batch import Batch, named
from ssvit.data.loader import Loader
from ssvit.data.sources.files import Files
from ssvit.data.sources.memory import Memory
from ssvit.devices import Launch
from ssvit.engine.randomness import uniform
from ssvit.errors import pair
from ssvit.loading.encoder import load_classifier, load_encoder
from ssvit.loading.options import LoadEncoder
from ssvit.models import vit_options
from ssvit.models.lora import restrict
from ssvit.models.vit import ViT
from ssvit.objectives import (
    classify_options,
    codebook_options,
    continuation_options,
    contrastive_options,
    diet_options,
    dino_options,
    distill_options,
    latent_options,
    mae_options,
    masked_patch_options,
    segment_options,
)  # fmt: skip
from ssvit.objectives.base import Objective
from ssvit.objectives.classify import Classify
from ssvit.objectives.codebook import Codebook
from ssvit.objectives.continuation import Continuation
from ssvit.objectives.contrastive import ContrastiveTuning, SimCLR
from ssvit.objectives.diet import Diet
from ssvit.objectives.dino import Dino, IBot
from ssvit.objectives.distill import Distill
from ssvit.objectives.latent import Latent
from ssvit.objectives.mae import MAE
from ssvit.objectives.masked_patch import MaskedPatch
from ssvit.objectives.masked_patch_options import Masking
from ssvit.objectives.schedule import Progress, Schedule
from ssvit.objectives.segment import Segment
from ssvit.objectives.targets_options import Hog, MeanColor, Pixels
from ssvit.training import launch, loop
from ssvit.training.loggers.options import TensorBoard as TensorBoardOptions
from ssvit.training.loggers.tensorboard import TensorBoard
from ssvit.training.recipe import Recipe
from ssvit.training.state import State

TEACHER = Path(__file__).parent / "fixtures" / "outputs" / "masked_patch_shapes"  # a checkpoint

Module = TypeVar("Module", bound=torch.nn.Module)
CLASSES = ("ant", "bee", "cat")
RECIPE = {
    "steps": 12, "batch_size": 8, "optimizer": "adamw", "lr": 1e-2, "warmup": 3, "ema": 0.9, "precision": "32-true",
    "log_every": 1, "save_every": 3, "evaluate_every": 6,
}  # fmt: skip

DINO = {
    "prototypes": 24, "hidden": 16, "bottleneck": 8,
    "teacher_temperature": Schedule(start=0.04, end=0.07, shape="linear", over=0.5),
    "teacher_momentum": Schedule(start=0.9, end=1.0),
    "last_layer": Schedule(start=0.0, end=1.0, shape="step", over=0.1),
}  # fmt: skip


def pictures(count: int = 24, side: int = 16) -> torch.Tensor:
    """(count, 3, side, side) uint8: smooth colours, so that there is something to learn."""
    corners = uniform(0, "pictures", torch.arange(count), 12).view(count, 3, 2, 2)
    return (torch.nn.functional.interpolate(corners, size=side, mode="bilinear") * 255).to(torch.uint8)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labelled() -> Memory:
    """The pictures in memory, of three classes, with masks of these classes."""
    return Memory(pictures(), torch.arange(24) % 3, CLASSES, masks=masks(), mask_classes=CLASSES)


def masks(count: int = 24, side: int = 16) -> torch.Tensor:
    """(count, side, side) uint8: the brightest channel, so that there is something to learn; a few are ignored."""
    images = pictures(count, side)
    return images.argmax(1).to(torch.uint8).masked_fill(images.sum(1) % 13 == 0, 255)


def source(folder: Path | None = None) -> Files | Memory:
    """The pictures in memory, or as the PNG files that `folder` holds."""
    return Memory(pictures()) if folder is None else Files(sorted(str(path) for path in folder.glob("*.png")))


def encoder(dropout: float) -> ViT:
    """A Transformer of two narrow layers."""
    return vit_options.ViT(
        image_size=16, patch_size=4, width=16, depth=2, heads=2, dropout=dropout, stochastic_depth=dropout
    ).build()


def patches(size: int | list[int] | tuple[int, int], channels: int = 3) -> ViT:
    """An encoder without values, whose patches have this size in pixels and these channels, for targets."""
    side = pair("patch_size", size)
    with torch.device("meta"):
        return vit_options.ViT(
            image_size=(4 * side[0], 4 * side[1]), patch_size=size, width=4, depth=1, heads=1, channels=channels
        ).build()


def model(dropout: float = 0.0, seed: int = 0) -> MaskedPatch:
    """A masked patch objective."""
    torch.manual_seed(seed)
    return MaskedPatch(
        masked_patch_options.MaskedPatch(masking=Masking()),
        encoder=encoder(dropout),
        target=MeanColor(bits=1).build(encoder=patches(4)),
    )


def masked_patch_decoder(dropout: float = 0.0, seed: int = 0) -> MaskedPatch:
    """Return a masked patch objective whose encoder encodes visible patches only."""
    return _of_masked(
        dropout, seed, MeanColor().build(encoder=patches(4)), decoder={"depth": 1, "width": 8, "heads": 2}
    )


def simmim(dropout: float = 0.0, seed: int = 0) -> MaskedPatch:
    """SimMIM, whose masks have units of two patches."""
    return _of_masked(dropout, seed, Pixels(loss="l1").build(encoder=patches(4)), unit=2)


def hog(dropout: float = 0.0, seed: int = 0) -> MaskedPatch:
    """Histograms of gradients."""
    return _of_masked(dropout, seed, Hog(cell=4, window=12).build(encoder=patches(4)))


def _of_masked(dropout: float, seed: int, target, *, unit: int = 1, decoder=None) -> MaskedPatch:
    torch.manual_seed(seed)
    masking = Masking(mask=1.0, replace=0.0, unchanged=0.0, unit=unit)
    return MaskedPatch(
        masked_patch_options.MaskedPatch(masking=masking, decoder=decoder), encoder=encoder(dropout), target=target
    )


def codebook(dropout: float = 0.0, seed: int = 0, *, features: bool = False) -> MaskedPatch:
    """A masked patch objective of clusters, of windows or of the features of another encoder after its first layer."""
    torch.manual_seed(7)
    frozen = encoder(0.5).eval() if features else None
    if frozen is not None:
        frozen.blocks = frozen.blocks[:1]
    stage = {"checkpoint": str(Path(__file__)), "layer": 1} if features else {}
    options = codebook_options.Codebook(clusters=6, images=20, components=8, **stage)
    target = Codebook(options, encoder=patches(4), layers=frozen)
    torch.manual_seed(seed)
    return MaskedPatch(masked_patch_options.MaskedPatch(masking=Masking()), encoder=encoder(dropout), target=target)


def mae(dropout: float = 0.0, seed: int = 0) -> MAE:
    """A masked autoencoder."""
    torch.manual_seed(seed)
    return MAE(mae_options.MAE(decoder={"depth": 1, "width": 8, "heads": 2}), encoder=encoder(dropout))


def mae_with_stochastic_depth(dropout: float = 0.0, seed: int = 0) -> MAE:
    """A masked autoencoder whose encoder leaves out most branches of its second layer."""
    objective = mae(dropout, seed)
    objective.encoder.blocks[1].drop.rate = 0.6
    return objective


def dino(dropout: float = 0.0, seed: int = 0) -> Dino:
    """Self-distillation, in which all that is scheduled changes within a few steps."""
    torch.manual_seed(seed)
    return Dino(dino_options.Dino(**DINO), encoder=encoder(dropout))


def ibot(dropout: float = 0.0, seed: int = 0) -> IBot:
    """Return the objective with masked patches."""
    torch.manual_seed(seed)
    temperature = Schedule(start=0.05, end=0.08, shape="linear", over=0.5)
    return IBot(dino_options.IBot(patch_temperature=temperature, **DINO), encoder=encoder(dropout))


def latent(dropout: float = 0.0, seed: int = 0) -> Latent:
    """Latent prediction with two masks an image, and a momentum that changes within a few steps."""
    torch.manual_seed(seed)
    decoder = {"depth": 2, "width": 8, "groups": 4}
    momentum = Schedule(start=0.9, end=0.95)
    return Latent(
        latent_options.Latent(decoder=decoder, masks=2, layers=2, teacher_momentum=momentum), encoder=encoder(dropout)
    )


def simclr(dropout: float = 0.0, seed: int = 0, **options) -> Objective:
    """Contrastive learning of two views, each with half of its patches."""
    torch.manual_seed(seed)
    own = {"temperature": 0.2, "hidden": 16, "projection": 8, "keep": 0.5, **options}
    return SimCLR(contrastive_options.SimCLR(**own), encoder=encoder(dropout))


def contrastive_tuning(dropout: float = 0.0, seed: int = 0, **options) -> Objective:
    """Contrastive tuning of the last of two layers, which a few steps of the heads alone precede."""
    torch.manual_seed(seed)
    own = {"hidden": 16, "projection": 8, "queue": 20, "heads_only": 0.2, **options}
    return ContrastiveTuning(contrastive_options.ContrastiveTuning(**own), encoder=encoder(dropout))


def continuation(dropout: float = 0.0, seed: int = 0, *, of: str = "mae", **options) -> Continuation:
    """An objective that continues from the weights of `encoder` with seed 0, and trains its heads alone at first."""
    torch.manual_seed(0)
    chosen = continuation_options.Continuation(heads_only=0.4, encoder_lr=0.5, **options)
    start = encoder(dropout)
    torch.manual_seed(seed)
    restrict(start, chosen.trained, chosen.lora)
    if of == "dino":
        return Continuation(chosen, objective=Dino(dino_options.Dino(**DINO), encoder=start))
    decoder = {"depth": 1, "width": 8, "heads": 2}
    return Continuation(chosen, objective=MAE(mae_options.MAE(decoder=decoder), encoder=start))


def diet(dropout: float = 0.0, seed: int = 0, **options) -> Diet:
    """A class for each of the 24 pictures."""
    torch.manual_seed(seed)
    return Diet(diet_options.Diet(**options), encoder=encoder(dropout), images=24)


def teacher(**options) -> ViT:
    """A frozen encoder of another width, image size and patch size, whose grid is 3x3."""
    torch.manual_seed(5)
    shape = {"image_size": 24, "patch_size": 8, "width": 12, "depth": 1, "heads": 2, "mean": 0.4, "std": 0.3}
    return shaken(vit_options.ViT(**shape | options).build())


def distill(dropout: float = 0.0, seed: int = 0, *, of: ViT | None = None, images: int = 24, **options) -> Distill:
    """Distillation from `teacher`."""
    torch.manual_seed(seed)
    chosen = distill_options.Distill(teacher={"_part_": "teacher/encoder", "path": str(TEACHER)}, **options)
    return Distill(chosen, encoder=encoder(dropout), images=images, teacher=of or teacher())


def classify(dropout: float = 0.0, seed: int = 0, **options) -> Classify:
    """A classifier of the three classes."""
    torch.manual_seed(seed)
    return Classify(classify_options.Classify(classes=CLASSES, **options), encoder=encoder(dropout))


def segment(dropout: float = 0.0, seed: int = 0, **options) -> Segment:
    """A segmentation model of the three classes."""
    torch.manual_seed(seed)
    return Segment(segment_options.Segment(classes=CLASSES, **options), encoder=encoder(dropout))


def shaken(module: Module, by: float = 0.1) -> Module:
    """The module with random numbers added to every weight, so that none is zero or one and each shows in outputs."""
    with torch.no_grad():
        for weight in module.parameters():
            weight += by * torch.randn_like(weight)
    return module


def trained(module: torch.nn.Module) -> set[str]:
    """The names of the weights that are trained."""
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def vit(*, seed: int = 0, by: float = 0.0, **options) -> ViT:
    """An encoder of these options; by: the standard deviation of numbers added to its weights, as in `shaken`."""
    torch.manual_seed(seed)
    model = vit_options.ViT(**options).build()
    return shaken(model, by) if by else model


def loaded(path: Path, **options) -> torch.nn.Module:
    """The encoder of a checkpoint or of a file."""
    return load_encoder(LoadEncoder(path=path, **options))


def classifier(path: Path, **options) -> Classify:
    """The classifier of a checkpoint."""
    return load_classifier(LoadEncoder(path=path, **options))


def inverted(images: torch.Tensor, place: int) -> torch.Tensor:
    """Images of 16 pixels of which one of the 16 patches is inverted."""
    changed, y, x = images.clone(), place // 4 * 4, place % 4 * 4
    changed[:, :, y : y + 4, x : x + 4] = 255 - changed[:, :, y : y + 4, x : x + 4]
    return changed


def views(objective: Objective, count: int = 4) -> Batch:
    """A batch of views of the first pictures, as the loader makes them for an objective."""
    slots = torch.arange(count)
    return Batch(named(transform(objective)(pictures(count), slots, 0)), None, slots, indices=slots)


def scheduled(objective: Objective, step: int = 6) -> dict[str, torch.Tensor]:
    """The values of an objective's schedules at a step of 12."""
    schedules = objective.schedules.items()
    return {name: torch.tensor(at(Progress(step, 12)), dtype=torch.float64) for name, at in schedules}


def transform(objective: Objective) -> Augmentation:
    """Return one crop of an image, or crops of several sizes for an objective of several views."""
    objective = objective.measured() if isinstance(objective, Continuation) else objective
    if isinstance(objective, Dino):
        return MultiCrop(size=16, local_size=8, local_views=2, sigma=(0.1, 0.5)).build()
    if isinstance(
        getattr(objective, "options", None), contrastive_options.SimCLR | contrastive_options.ContrastiveTuning
    ):
        return MultiCrop(size=16, local_size=16, local_views=0, sigma=(0.1, 0.5)).build()
    return InceptionCrop(size=16, scale=(0.5, 1.0)).build()


class At:
    """Before an objective among the bases of a class: changes the results of some calls of forward, counted from 0."""

    done, calls, act = 0, (), None

    def forward(self, *inputs):
        result = super().forward(*inputs)
        self.done += 1
        return self.act(result) if self.done - 1 in self.calls else result


def at(objective: Objective, *calls: int, act: Callable) -> Objective:
    """Return the objective, where `act` changes the results of these calls of forward, counted from 0."""
    objective.__class__ = type("AtCalls", (At, type(objective)), {"calls": calls, "act": staticmethod(act)})
    return objective


class Interrupted(Exception):
    """Represents the end of a process in the middle of a step."""


def interrupted(objective: Objective, calls: int) -> Objective:
    """Return the objective, whose forward fails at this call, counted from 1."""

    def fail(result):
        raise Interrupted

    return at(objective, calls - 1, act=fail)


def not_finite(result: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results of an objective with NaNs."""
    return {name: value * math.nan for name, value in result.items()}


def train(
    folder: Path, *, data=None, workers=0, dropout=0.0, objective=None, evaluators=None, facts=None, strategy="auto",
    double=False, timeout=600.0, **recipe,
) -> tuple[bool, Objective]:  # fmt: skip
    """Run the loop in `folder` like the command, and return its result and the trained objective."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = Recipe(**{**RECIPE, **recipe})
    processes = launch.start(numbers, Launch(accelerator="cpu", strategy=strategy, timeout=timeout))
    objective = objective or model(dropout)
    if double:
        objective.double()
    loader = Loader(
        source=labelled() if isinstance(objective, Classify | Segment) else source(data),
        transform=transform(objective), masks=isinstance(objective, Segment),
        seed=numbers.seed, batch_size=numbers.batch_size, accumulate=numbers.accumulate, rank=processes.rank,
        world=processes.world, workers=workers, records=True,
    )  # fmt: skip
    options = TensorBoardOptions()
    board = TensorBoard(options, folder=folder, name=folder.name, hyperparameters={"steps": numbers.steps})
    worked = loop.train(
        processes,
        objective,
        loader,
        numbers,
        folder,
        evaluators=evaluators or {},
        run_identity=facts or {"encoder": objective.encoder.arguments},
        loggers=[board],
    )
    return worked, objective


def state(objective: Objective, *, strategy: str = "auto", **options) -> tuple[State, Loader]:
    """A training state of the objective, and batches for it."""
    recipe = Recipe(**{**RECIPE, **options})
    processes = launch.start(recipe, Launch(accelerator="cpu", strategy=strategy))
    source = labelled() if isinstance(objective, Classify | Segment) else Memory(pictures())
    size = {"batch_size": recipe.batch_size, "accumulate": recipe.accumulate, "masks": isinstance(objective, Segment)}
    return State(processes, objective, recipe), Loader(source=source, transform=transform(objective), seed=0, **size)


class Table(torch.nn.Module):
    """A model that returns fixed logits for tagged images and records the images of each call."""

    def __init__(self, logits: torch.Tensor, classes, loss: str = "softmax") -> None:
        super().__init__()
        self.options = SimpleNamespace(loss=loss)
        self.table, self.classes = torch.nn.Parameter(logits), tuple(classes)
        self.asked: list[int] = []

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        assert len(images)
        number = images[:, 0, 0, 0].long() + 256 * images[:, 1, 0, 0].long()
        self.asked += number.tolist()
        return self.table[number]
