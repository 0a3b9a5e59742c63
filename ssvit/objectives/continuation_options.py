"""Define the options of pre-training that continues from existing weights."""

from typing import Annotated, Literal

from ssvit.config.declaration import Expect, Fraction, Options, Positive, Share, Tree, Whole
from ssvit.errors import OptionError, RootOptionError
from ssvit.models.encoder_options import Normalized
from ssvit.models.vit_options import Lora, ViT
from ssvit.objectives.base_options import check_trained


class Anchor(Options):
    """Define a penalty on changes of the features relative to the initial weights, for one view of each image."""

    kind: Literal["cosine", "gram"] = "cosine"
    """cosine: 1 minus the cosine of the features, the mean of pooled features and of patches; keeps the features
    themselves. gram: squared difference of the cosines between all patches of an image (DINOv3, Siméoni et al. 2025);
    keeps the structure of the patches and lets the features move."""
    weight: Positive = 1.0
    """Factor of the penalty, which is added to the objective's loss."""


class Continuation(Options):
    """Continue from existing weights. The defaults train all weights from the first step, without a penalty."""

    trained: Literal["all"] | Annotated[Whole, Expect("a number of last layers")] = "all"
    """Trained weights of the encoder. all: all of them; a number: the last norm and this number of last layers. Fewer
    trained layers change the features less, and suit few images."""
    lora: Lora | None = None
    """Low-rank updates of the attention matrices of layers that are not trained; None: these layers stay unchanged."""
    heads_only: Fraction = 0.0
    """Fraction of the run in which the encoder is frozen, and only a decoder, a head or prototypes are trained. Their
    weights are random at first, and the first gradients would disturb the encoder."""
    encoder_lr: Share = 1.0
    """Factor of the learning rate of the encoder's weights, in addition to recipe.layer_decay."""
    anchor: Anchor | None = None
    """Penalty on changes of the features relative to the initial weights, such as {kind: gram}. Each step then has a
    forward pass of the initial weights, and a further forward and backward pass of the encoder. None: no penalty."""

    def check_consistency(self) -> None:
        """Check that low-rank updates have layers to which they are added, and that weights are trained."""
        if self.lora is not None and self.trained == "all":
            raise OptionError("trained", "all", "must be a number with lora, which updates the layers below")
        if self.lora is None and self.trained == 0:
            raise OptionError("trained", 0, "must be all or at least 1 without lora")

    def check(self, tree: Tree) -> None:
        """Check that the run starts from the weights of a ViT, and that no labels or other rules determine training."""
        if tree.encoder is not None and not tree.from_checkpoint:
            raise RootOptionError("checkpoint", None, "must be a run or a file of weights to continue from")
        for rule, expected in (
            ("needs_labels", "must be null for this objective; ssvit finetune trains on labels"),
            ("selects_weights", "must be null: this objective selects the trained weights itself"),
        ):
            if getattr(tree.objective, rule, False):
                raise RootOptionError("continuation", "…", expected)
        if isinstance(tree.encoder, Normalized):
            check_trained(self.trained, tree.encoder)
            if self.anchor is not None and not isinstance(tree.encoder, ViT):
                raise OptionError("anchor", "{…}", f"must be null with {tree.encoder.label}")
