"""Other projects' methods, as objectives that ssvit's own loop can train.

vit-pytorch, transformers and lightly have masked objectives, which are used; timm has the encoder only, which ssvit's
masked patch prediction trains. lightly's other methods are built from its modules as in its examples
(examples/pytorch). All have the sizes of ssvit's encoder, decoder and heads. Peers are given float images in [0, 1] and
spared the normalisation, which ssvit does inside its step.

Letters: b images, v views, c channels, n patches, m corrupted patches of an image, d width.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.models.block import gather_tokens
from ssvit.models.encoder import Encoder
from ssvit.models.vit import ViT
from ssvit.objectives.base import EMPTY, Objective, parameter_groups
from ssvit.objectives.masked_patch import Corruption, MaskedPatch, sample_corruption
from ssvit.objectives.targets_options import MeanColor
from ssvit.training.options import Pretrain

M = TypeVar("M", bound=nn.Module)


class Peer(Objective):
    """A peer's model; a subclass has its loss.

    Args:
        run: The options of ssvit's run, whose sizes the peer has.
    """

    def __init__(self, run: Pretrain) -> None:
        super().__init__()
        self.size, self.options = cast(Any, run.encoder), cast(Any, run.objective)
        self.grid = _grid(self.size)

    def parameter_groups(self, *, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Group the trained parameters for torch's optimisers; all weights have one learning rate.

        Args:
            weight_decay: Weight decay of matrices.
            layer_decay: Not used.

        Returns:
            Groups for torch's optimisers.
        """
        return parameter_groups(self.named_parameters(), weight_decay)

    def loss(self, images: Tensor, noise: Any) -> Tensor:
        """Return the loss of one view of the images."""
        raise NotImplementedError

    def forward(self, batch: Batch, noise: Any, scheduled: Mapping[str, Tensor] = EMPTY) -> dict[str, Tensor]:
        """Return the loss alone."""
        return {"loss": self.loss(batch.only_view(), noise)}


class Masked(Peer):
    """A peer with the corruption that ssvit would sample; vit-pytorch samples once more for itself."""

    def sample(self, slots: Tensor, *, seed: int) -> Corruption:
        """Sample which patches are corrupted."""
        return sample_corruption(self.options.masking, slots, seed=seed, grid=self.grid)


class VitPytorch(Masked):
    """vit-pytorch's masked patch prediction (its `mpp.py`), corrected where the current encoder makes it crash."""

    def __init__(self, run: Pretrain) -> None:
        from vit_pytorch.mpp import MPP

        super().__init__(run)
        masking = self.options.masking
        self.model = MPP(
            _vit_pytorch(self.size), patch_size=self.size.patch_size, dim=self.size.width,
            mask_prob=masking.corrupted, replace_prob=masking.mask, random_patch_prob=masking.replace,
        )  # fmt: skip
        # It is assigned to rows, which a tensor of three dimensions cannot be.
        self.model.mask_token = nn.Parameter(self.model.mask_token.flatten())

    def loss(self, images: Tensor, noise: Corruption) -> Tensor:
        """Its own corruption of the pixels, head on all patches, and mean colours in 3 bits."""
        return self.model(images)


class VitPytorchOwn(Peer):
    """vit-pytorch's `SimMIM` and `MAE`, with their own random patches, without a class token."""

    def __init__(self, run: Pretrain) -> None:
        super().__init__(run)
        vit = _vit_pytorch(self.size)
        if hasattr(self.options, "masking"):
            from vit_pytorch.simmim import SimMIM

            self.model = SimMIM(encoder=vit, masking_ratio=self.options.masking.corrupted)
            return
        from vit_pytorch.mae import MAE

        decoder = self.options.decoder
        self.model = MAE(
            encoder=vit, masking_ratio=self.options.masked, decoder_dim=decoder.width, decoder_depth=decoder.depth,
            decoder_heads=decoder.heads, decoder_dim_head=decoder.width // decoder.heads,
        )  # fmt: skip

    def loss(self, images: Tensor, noise: tuple[()]) -> Tensor:
        """Its own loss."""
        return self.model(images)


class Transformers(Masked):
    """transformers' `ViTForMaskedImageModeling`: masked patches, pixels of all patches, L1 on the masked ones."""

    def __init__(self, run: Pretrain) -> None:
        from transformers import ViTConfig, ViTForMaskedImageModeling

        super().__init__(run)
        config = ViTConfig(**transformers_of(self.size), encoder_stride=self.size.patch_size)
        self.model = ViTForMaskedImageModeling(config)

    def loss(self, images: Tensor, noise: Corruption) -> Tensor:
        """Its own loss."""
        masked = torch.zeros(len(images), math.prod(self.grid), dtype=torch.bool, device=images.device)
        return self.model(images, bool_masked_pos=masked.scatter(1, noise.ids, True)).loss


class TransformersMAE(Peer):
    """transformers' `ViTMAEForPreTraining`, which predicts all patches and drops those that it has seen."""

    def __init__(self, run: Pretrain) -> None:
        from transformers import ViTMAEConfig, ViTMAEForPreTraining

        super().__init__(run)
        decoder = self.options.decoder
        config = ViTMAEConfig(
            **transformers_of(self.size), decoder_num_hidden_layers=decoder.depth, decoder_hidden_size=decoder.width,
            decoder_num_attention_heads=decoder.heads, decoder_intermediate_size=4 * decoder.width,
            mask_ratio=self.options.masked, norm_pix_loss=True,
        )  # fmt: skip
        self.model = ViTMAEForPreTraining(config)

    def loss(self, images: Tensor, noise: tuple[()]) -> Tensor:
        """Its own loss."""
        return self.model(images).loss


class LightlyMAE(Peer):
    """MAE with lightly's masked encoder and decoder, made of timm's layers."""

    def __init__(self, run: Pretrain) -> None:
        from lightly.models.modules import MaskedVisionTransformerDecoderTIMM, MaskedVisionTransformerTIMM

        super().__init__(run)
        decoder = self.options.decoder
        self.model = MaskedVisionTransformerTIMM(vit=timm_of(self.size))
        self.embed = nn.Linear(self.size.width, decoder.width)
        self.decoder = MaskedVisionTransformerDecoderTIMM(
            num_patches=math.prod(self.grid), embed_dim=decoder.width, depth=decoder.depth, num_heads=decoder.heads
        )
        self.head = nn.Linear(decoder.width, 3 * self.size.patch_size**2)

    def loss(self, images: Tensor, noise: tuple[()]) -> Tensor:
        """The squared error of the masked patches' normalised pixels."""
        from lightly.models import utils

        tokens = len(images), self.model.sequence_length
        visible_ids, masked_ids = utils.random_token_mask(tokens, self.options.masked, device=images.device)
        visible = self.embed(self.model.encode(images, idx_keep=visible_ids))
        every = utils.repeat_token(self.decoder.mask_token, tokens)
        decoded = self.decoder(utils.set_at_index(every, visible_ids, visible.type_as(every)))
        prediction = self.head(utils.get_at_index(decoded, masked_ids))
        pixels = utils.get_at_index(utils.patchify(images, self.size.patch_size), masked_ids - 1)
        return F.mse_loss(prediction, utils.normalize_mean_var(pixels))


class LightlyDINO(Peer):
    """DINO with lightly's heads and loss and timm's encoder, view by view."""

    def __init__(self, run: Pretrain) -> None:
        from lightly.loss import DINOLoss
        from lightly.models.modules import DINOProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        super().__init__(run)
        sizes = self.size.width, self.options.hidden, self.options.bottleneck, self.options.prototypes
        self.model = timm_of(self.size, global_pool="token", dynamic_img_size=True)
        self.teacher = copy.deepcopy(self.model)
        self.head, self.teacher_head = (DINOProjectionHead(*sizes) for _ in range(2))
        for teacher in (self.teacher, self.teacher_head):
            deactivate_requires_grad(teacher)
        self.criterion = DINOLoss(output_dim=self.options.prototypes)

    def forward(self, batch: Batch, noise: Any, scheduled: Mapping[str, Tensor] = EMPTY) -> dict[str, Tensor]:
        """Return the loss alone."""
        views = [view for group in batch.views.values() for view in group.unbind(1)]
        teacher = [self.teacher_head(self.teacher(view)) for view in views[:2]]
        student = [self.head(self.model(view)) for view in views]
        return {"loss": self.criterion(teacher, student)}

    def after_step(self, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Update the teacher."""
        from lightly.models.utils import update_momentum

        update_momentum(self.model, self.teacher, m=0.996)
        update_momentum(self.head, self.teacher_head, m=0.996)


class LightlySimCLR(Peer):
    """SimCLR with lightly's head and loss and timm's encoder, view by view."""

    def __init__(self, run: Pretrain) -> None:
        from lightly.loss import NTXentLoss
        from lightly.models.modules import SimCLRProjectionHead

        super().__init__(run)
        self.model = timm_of(self.size, global_pool="avg")
        self.head = SimCLRProjectionHead(self.size.width, self.options.hidden, self.options.projection)
        self.criterion = NTXentLoss(temperature=self.options.temperature)

    def forward(self, batch: Batch, noise: Any, scheduled: Mapping[str, Tensor] = EMPTY) -> dict[str, Tensor]:
        """Return the loss alone."""
        first, second = (self.head(self.model(view)) for view in batch.views["global"].unbind(1))
        return {"loss": self.criterion(first, second)}


class Timm(Encoder):
    """timm's `VisionTransformer`, as `MaskedPatch` takes an encoder."""

    def __init__(self, size: Any) -> None:
        super().__init__()
        self.options, self.width, self.grid, self.model = size, size.width, _grid(size), timm_of(size)
        self.patch_size, self.channels = (size.patch_size, size.patch_size), size.channels

    def check_size(self, images: Tensor) -> None:
        """Leave the check to the model."""

    def embed(self, images: Tensor) -> Tensor:
        """Return the patches' tokens."""
        return self.model.patch_embed(images)

    def encode(self, tokens: Tensor, *, output_ids: Tensor, depth_noise: None = None) -> Tensor:
        """Return the outputs at some patches. depth_noise: None, since there is no stochastic depth."""
        return gather_tokens(self.model.norm(self.model.blocks(self.model._pos_embed(tokens))), output_ids + 1)


def timm_with_head(run: Pretrain) -> MaskedPatch:
    """Return ssvit's masked patch prediction with timm's encoder."""
    encoder = cast(ViT, Timm(cast(Any, run.encoder)))
    return MaskedPatch(cast(Any, run.objective), encoder=encoder, target=MeanColor().build(encoder=encoder))


def _grid(size: Any) -> tuple[int, int]:
    return (size.image_size // size.patch_size,) * 2


def transformers_of(size: Any) -> dict[str, Any]:
    """Return the options of transformers' `ViTConfig` for the sizes of an encoder."""
    return {
        "image_size": size.image_size, "patch_size": size.patch_size, "hidden_size": size.width,
        "num_hidden_layers": size.depth, "num_attention_heads": size.heads, "intermediate_size": 4 * size.width,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


def timm_of(size: Any, **options: Any) -> Any:
    """Return timm's `VisionTransformer` of the sizes of an encoder, without a classifier."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=size.image_size, patch_size=size.patch_size, embed_dim=size.width, depth=size.depth,
        num_heads=size.heads, num_classes=0, **{"global_pool": "", **options},
    )  # fmt: skip


def _vit_pytorch(size: Any) -> Any:
    from vit_pytorch import ViT

    vit = ViT(
        image_size=size.image_size, patch_size=size.patch_size, num_classes=0, dim=size.width, depth=size.depth,
        heads=size.heads, mlp_dim=4 * size.width,
    )  # fmt: skip
    # The encoder has lost the leading dimension of these two, which its masked objectives still expect.
    vit.cls_token = nn.Parameter(vit.cls_token[None])
    vit.pos_embedding = nn.Parameter(vit.pos_embedding[None])
    return vit


def with_plain_attention(peer: M) -> M:
    """Set attention to matrix products and softmax in the modules of timm and transformers.

    timm does the same with TIMM_FUSED_ATTN=0. In bfloat16 on a CPU it is faster than torch's fused attention, their
    default.
    """
    for module in peer.modules():
        if hasattr(module, "fused_attn"):
            cast(Any, module).fused_attn = False
        if hasattr(module, "set_attn_implementation"):
            cast(Any, module).set_attn_implementation("eager")
    return peer


# By objective and name, which begins with the package that is needed.
PEERS: dict[str, dict[str, Callable[[Pretrain], Objective]]] = {
    "masked_patch": {"vit-pytorch MPP": VitPytorch, "transformers MIM": Transformers, "timm + head": timm_with_head},
    "simmim": {"vit-pytorch SimMIM": VitPytorchOwn, "transformers MIM": Transformers},
    "mae": {"vit-pytorch MAE": VitPytorchOwn, "transformers MAE": TransformersMAE, "timm + lightly MAE": LightlyMAE},
    "dino": {"timm + lightly DINO": LightlyDINO},
    "simclr": {"timm + lightly SimCLR": LightlySimCLR},
}  # fmt: skip
