"""Other projects' methods, as objectives that ssvit's own loop can train.

In masked patch prediction all encode every patch. vit-pytorch, transformers and lightly bring a masked objective, which
is used; timm and torchvision bring the encoder alone, which ssvit's objective trains. Of other methods, lightly's are
built from its modules as its examples build them (examples/pytorch). Peers are given float images in [0, 1] and spared
the normalisation, which ssvit does inside its step.

Letters: b images, c channels, n patches, m corrupted patches an image, d width.
"""

import copy
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssvit.benchmark.methods import DINO, MASKED, SIMCLR, SIMMIM, TEMPERATURE, masked_patch
from ssvit.benchmark.step_options import Size
from ssvit.data.batch import Batch
from ssvit.models.encoder import Encoder
from ssvit.models.vit import ViT, gather
from ssvit.objectives.base import NOTHING, Objective
from ssvit.objectives.masking import Corruption, Masking


class Peer(Objective):
    """A peer's model; a subclass has its loss."""

    encoder: ViT

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        # As far as it is asked for.
        self.encoder = cast(ViT, SimpleNamespace(grid=_grid(size)))

    def loss(self, images: Tensor, noise: Any) -> Tensor:
        """Of one view of the images."""
        raise NotImplementedError

    def forward(self, batch: Batch, noise: Any, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """The loss alone."""
        return {"loss": self.loss(batch.images, noise)}


class Masked(Peer):
    """A peer with the corruption that ssvit would sample, by the options of `Masking`."""

    def __init__(self, size: Size, **masking: Any) -> None:
        super().__init__(size)
        self.masking = Masking(**masking)

    def sample(self, slots: Tensor, *, seed: int) -> Corruption:
        """Which patches are corrupted, and how; vit-pytorch samples once more for itself."""
        return self.masking.sample(slots, seed=seed, grid=self.encoder.grid)


class VitPytorch(Masked):
    """vit-pytorch's masked patch prediction (its `mpp.py`), mended where the current encoder makes it crash."""

    def __init__(self, size: Size) -> None:
        from vit_pytorch.mpp import MPP

        super().__init__(size)
        self.model = MPP(
            _vit_pytorch(size),
            patch_size=size.patch_size,
            dim=size.width,
            mask_prob=self.masking.corrupted,
            replace_prob=self.masking.mask,
            random_patch_prob=self.masking.replace,
        )
        # It is assigned to rows, which a tensor of three dimensions cannot be.
        self.model.mask_token = nn.Parameter(self.model.mask_token.flatten())

    def loss(self, images: Tensor, noise: Corruption) -> Tensor:
        """Its own corruption of the pixels, head on all patches, and mean colours in 3 bits."""
        return self.model(images.float())  # Fabric gives bfloat16, to which its token cannot be assigned


class Transformers(Masked):
    """transformers' `ViTForMaskedImageModeling`: masked patches, pixels of all patches, L1 on the masked ones."""

    def __init__(self, size: Size, attention: str = "sdpa", **masking: Any) -> None:
        from transformers import ViTConfig, ViTForMaskedImageModeling

        super().__init__(size, **masking)
        config = ViTConfig(  # type: ignore[call-arg]  # attn_implementation is an option of every configuration
            image_size=size.image_size,
            patch_size=size.patch_size,
            encoder_stride=size.patch_size,
            hidden_size=size.width,
            num_hidden_layers=size.depth,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation=attention,
        )
        self.model = ViTForMaskedImageModeling(config)

    def loss(self, images: Tensor, noise: Corruption) -> Tensor:
        """Its own loss."""
        masked = torch.zeros(len(images), math.prod(self.encoder.grid), dtype=torch.bool, device=images.device)
        return self.model(images, bool_masked_pos=masked.scatter(1, noise.ids, True)).loss


class Lightly(Masked):
    """SimMIM with lightly's masked encoder, as its example has it: masked patches, L1 on their pixels."""

    def __init__(self, size: Size, **masking: Any) -> None:
        from lightly.models.modules import MaskedVisionTransformerTorchvision

        super().__init__(size, **masking)
        self.model = MaskedVisionTransformerTorchvision(vit=_torchvision(size))
        self.decoder = nn.Linear(size.width, 3 * size.patch_size**2)

    def loss(self, images: Tensor, noise: Corruption) -> Tensor:
        """L1 between the head's prediction of the masked patches and their pixels."""
        token_ids, p = noise.ids + 1, self.size.patch_size  # it counts the class token
        pixels = rearrange(images, "b c (y p) (x q) -> b (y x) (c p q)", p=p, q=p)
        prediction = self.decoder(gather(self.model.encode(images, idx_mask=token_ids), token_ids))
        return F.l1_loss(prediction, gather(pixels, noise.ids))


class VitPytorchSimMIM(Peer):
    """vit-pytorch's `SimMIM`, with its own random patches, without a class token."""

    def __init__(self, size: Size) -> None:
        from vit_pytorch.simmim import SimMIM

        super().__init__(size)
        self.model = SimMIM(encoder=_vit_pytorch(size), masking_ratio=SIMMIM["corrupted"])

    def loss(self, images: Tensor, noise: tuple[()]) -> Tensor:
        """Its own loss."""
        return self.model(images)


class VitPytorchMAE(Peer):
    """vit-pytorch's `MAE`, with its own random patches, without a class token; pixels as they are."""

    def __init__(self, size: Size) -> None:
        from vit_pytorch.mae import MAE

        super().__init__(size)
        depth, width, heads = size.decoder
        self.model = MAE(
            encoder=_vit_pytorch(size),
            masking_ratio=MASKED,
            decoder_dim=width,
            decoder_depth=depth,
            decoder_heads=heads,
            decoder_dim_head=width // heads,
        )

    def loss(self, images: Tensor, noise: tuple[()]) -> Tensor:
        """Its own loss."""
        return self.model(images)


class TransformersMAE(Peer):
    """transformers' `ViTMAEForPreTraining`, which predicts all patches and drops those that it has seen."""

    def __init__(self, size: Size, attention: str = "sdpa") -> None:
        from transformers import ViTMAEConfig, ViTMAEForPreTraining

        super().__init__(size)
        depth, width, heads = size.decoder
        config = ViTMAEConfig(  # type: ignore[call-arg]  # attn_implementation is an option of every configuration
            image_size=size.image_size,
            patch_size=size.patch_size,
            hidden_size=size.width,
            num_hidden_layers=size.depth,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.width,
            decoder_num_hidden_layers=depth,
            decoder_hidden_size=width,
            decoder_num_attention_heads=heads,
            decoder_intermediate_size=4 * width,
            mask_ratio=MASKED,
            norm_pix_loss=True,
            attn_implementation=attention,
        )
        self.model = ViTMAEForPreTraining(config)

    def loss(self, images: Tensor, noise: tuple[()]) -> Tensor:
        """Its own loss."""
        return self.model(images).loss


class LightlyMAE(Peer):
    """MAE with lightly's masked encoder and decoder, made of timm's layers."""

    def __init__(self, size: Size) -> None:
        from lightly.models.modules import MaskedVisionTransformerDecoderTIMM, MaskedVisionTransformerTIMM

        super().__init__(size)
        depth, width, heads = size.decoder
        self.model = MaskedVisionTransformerTIMM(vit=_timm(size))
        self.embed = nn.Linear(size.width, width)
        self.decoder = MaskedVisionTransformerDecoderTIMM(
            num_patches=math.prod(_grid(size)), embed_dim=width, depth=depth, num_heads=heads
        )
        self.head = nn.Linear(width, 3 * size.patch_size**2)

    def loss(self, images: Tensor, noise: tuple[()]) -> Tensor:
        """The squared error of the masked patches' normalised pixels."""
        from lightly.models import utils

        tokens = len(images), self.model.sequence_length
        visible_ids, masked_ids = utils.random_token_mask(tokens, MASKED, device=images.device)
        visible = self.embed(self.model.encode(images, idx_keep=visible_ids))
        every = utils.repeat_token(self.decoder.mask_token, tokens)
        decoded = self.decoder(utils.set_at_index(every, visible_ids, visible.type_as(every)))
        prediction = self.head(utils.get_at_index(decoded, masked_ids))
        pixels = utils.get_at_index(utils.patchify(images, self.size.patch_size), masked_ids - 1)
        return F.mse_loss(prediction, utils.normalize_mean_var(pixels))


class LightlyDINO(Peer):
    """DINO with lightly's heads and loss and timm's encoder, view by view."""

    def __init__(self, size: Size) -> None:
        from lightly.loss import DINOLoss
        from lightly.models.modules import DINOProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        super().__init__(size)
        heads = (
            DINOProjectionHead(size.width, DINO["hidden"], DINO["bottleneck"], DINO["prototypes"]) for _ in range(2)
        )
        self.model = self._student(size)
        self.teacher = copy.deepcopy(self.model)
        self.head, self.teacher_head = heads
        for teacher in (self.teacher, self.teacher_head):
            deactivate_requires_grad(teacher)
        self.criterion = DINOLoss(output_dim=DINO["prototypes"])

    def _student(self, size: Size) -> Any:
        """The student's encoder."""
        return _timm(size, global_pool="token", dynamic_img_size=True)

    def forward(self, batch: Batch, noise: Any, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """The loss alone."""
        views = [view for group in batch.views.values() for view in group.unbind(1)]
        teacher = [self.teacher_head(self.teacher(view)) for view in views[:2]]
        student = [self.head(self.model(view)) for view in views]
        return {"loss": self.criterion(teacher, student)}

    def after_step(self, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Update the teacher."""
        from lightly.models.utils import update_momentum

        update_momentum(self.model, self.teacher, m=0.996)
        update_momentum(self.head, self.teacher_head, m=0.996)


class LightlyIBOT(LightlyDINO):
    """iBOT with lightly's masked encoder, block masks, head and losses. One head serves images and patches."""

    def __init__(self, size: Size) -> None:
        from lightly.loss import IBOTPatchLoss

        super().__init__(size)
        self.patch_criterion = IBOTPatchLoss(output_dim=DINO["prototypes"])

    def _student(self, size: Size) -> Any:
        """The student's encoder, which takes masks."""
        from lightly.models.modules import MaskedVisionTransformerTIMM

        return MaskedVisionTransformerTIMM(vit=_timm(size, dynamic_img_size=True))

    def forward(self, batch: Batch, noise: Any, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """The loss alone."""
        from lightly.models.utils import random_block_mask

        images = rearrange(batch.views["global"], "b v c h w -> (v b) c h w")
        local = rearrange(batch.views["local"], "b v c h w -> (v b) c h w")
        # As in its example, but for small grids, in which its least block of 4 patches may not fit.
        blocks = random_block_mask((len(images), *_grid(self.size)), min_num_masks_per_block=1, device=images.device)
        mask = F.pad(blocks.flatten(1), (1, 0))  # the class token is never hidden
        with torch.no_grad():
            features = self.teacher.encode(images)
            teacher, teacher_patches = self.teacher_head(features[:, 0]), self.teacher_head(features[mask])
        features = self.model.encode(images, mask=mask)
        student, patches = self.head(features[:, 0]), self.head(features[mask])
        student = torch.cat([student, self.head(self.model.encode(local)[:, 0])])
        views = self.criterion(teacher.chunk(2), student.chunk(2 + batch.views["local"].shape[1]))
        return {"loss": views + self.patch_criterion(teacher_patches, patches, blocks)}


class LightlySimCLR(Peer):
    """SimCLR with lightly's head and loss and timm's encoder, view by view."""

    def __init__(self, size: Size) -> None:
        from lightly.loss import NTXentLoss
        from lightly.models.modules import SimCLRProjectionHead

        super().__init__(size)
        self.model = _timm(size, global_pool="avg")
        self.head = SimCLRProjectionHead(size.width, SIMCLR["hidden"], SIMCLR["projection"])
        self.criterion = NTXentLoss(temperature=TEMPERATURE)

    def forward(self, batch: Batch, noise: Any, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """The loss alone."""
        first, second = (self.head(self.model(view)) for view in batch.views["global"].unbind(1))
        return {"loss": self.criterion(first, second)}


class Borrowed(Encoder):
    """The model of another library, as `MaskedPatch` takes an encoder."""

    def __init__(self, size: Size, model: Any) -> None:
        super().__init__()
        self.width, self.grid, self.model = size.width, _grid(size), model

    def check_size(self, images: Tensor) -> None:
        """The model itself refuses images of other sizes."""


class Timm(Borrowed):
    """timm's `VisionTransformer`."""

    def __init__(self, size: Size) -> None:
        super().__init__(size, _timm(size))

    def embed(self, images: Tensor) -> Tensor:
        return self.model.patch_embed(images)

    def encode(self, tokens: Tensor, *, output_ids: Tensor) -> Tensor:
        return gather(self.model.norm(self.model.blocks(self.model._pos_embed(tokens))), output_ids + 1)


class Torchvision(Borrowed):
    """torchvision's `VisionTransformer`."""

    def __init__(self, size: Size) -> None:
        super().__init__(size, _torchvision(size))

    def embed(self, images: Tensor) -> Tensor:
        return self.model._process_input(images)

    def encode(self, tokens: Tensor, *, output_ids: Tensor) -> Tensor:
        class_token = self.model.class_token.expand(len(tokens), -1, -1).to(tokens.dtype)
        return gather(self.model.encoder(torch.cat([class_token, tokens], dim=1)), output_ids + 1)


def _grid(size: Size) -> tuple[int, int]:
    return (size.image_size // size.patch_size,) * 2


def _timm(size: Size, **given: Any) -> Any:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=size.image_size,
        patch_size=size.patch_size,
        embed_dim=size.width,
        depth=size.depth,
        num_heads=size.heads,
        num_classes=0,
        **{"global_pool": "", **given},
    )


def _vit_pytorch(size: Size) -> Any:
    from vit_pytorch import ViT

    vit = ViT(
        image_size=size.image_size,
        patch_size=size.patch_size,
        num_classes=0,
        dim=size.width,
        depth=size.depth,
        heads=size.heads,
        mlp_dim=4 * size.width,
    )
    # The encoder has lost the leading dimension of these two, which its masked objectives still expect.
    vit.cls_token = nn.Parameter(vit.cls_token[None])
    vit.pos_embedding = nn.Parameter(vit.pos_embedding[None])
    return vit


def _torchvision(size: Size) -> Any:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=size.image_size,
        patch_size=size.patch_size,
        num_layers=size.depth,
        num_heads=size.heads,
        hidden_dim=size.width,
        mlp_dim=4 * size.width,
    )
    model.heads = nn.Identity()
    return model


def plain(peer: Objective) -> Objective:
    """A peer of timm's layers with attention as products and softmax, as TIMM_FUSED_ATTN=0 makes it.

    In bfloat16 on a CPU that is faster than torch's fused attention, which these libraries call by default.
    """
    for module in peer.modules():
        if hasattr(module, "fused_attn"):
            cast(Any, module).fused_attn = False
    return peer


PEERS: dict[str, dict[str, Callable[[Size], Objective]]] = {
    "masked_patch": {
        "vit-pytorch MPP": VitPytorch,
        "transformers MIM": Transformers,
        "transformers MIM, plain attention": lambda size: Transformers(size, "eager"),
        "timm + head": lambda size: masked_patch(cast(ViT, Timm(size)), size),
        "timm + head, plain attention": lambda size: plain(masked_patch(cast(ViT, Timm(size)), size)),
        "torchvision + head": lambda size: masked_patch(cast(ViT, Torchvision(size)), size),
        "lightly SimMIM": Lightly,
    },
    "masked_patch_decoder": {},
    "simmim": {
        "vit-pytorch SimMIM": VitPytorchSimMIM,
        "transformers MIM": lambda size: Transformers(size, **SIMMIM),
        "transformers MIM, plain attention": lambda size: Transformers(size, "eager", **SIMMIM),
        "lightly SimMIM": lambda size: Lightly(size, **SIMMIM),
    },
    "mae": {
        "vit-pytorch MAE": VitPytorchMAE,
        "transformers MAE": TransformersMAE,
        "transformers MAE, plain attention": lambda size: TransformersMAE(size, "eager"),
        "timm + lightly MAE": LightlyMAE,
        "timm + lightly MAE, plain attention": lambda size: plain(LightlyMAE(size)),
    },
    "dino": {
        "timm + lightly DINO": LightlyDINO,
        "timm + lightly DINO, plain attention": lambda size: plain(LightlyDINO(size)),
    },
    "latent": {},
    "ibot": {
        "timm + lightly iBOT": LightlyIBOT,
        "timm + lightly iBOT, plain attention": lambda size: plain(LightlyIBOT(size)),
    },
    "simclr": {
        "timm + lightly SimCLR": LightlySimCLR,
        "timm + lightly SimCLR, plain attention": lambda size: plain(LightlySimCLR(size)),
    },
}
