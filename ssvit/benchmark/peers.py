"""Other projects' Vision Transformers at masked patch prediction, as objectives that ssvit's own loop can train.

All encode every patch. vit-pytorch, transformers and lightly bring a masked objective, which is used; timm and
torchvision bring the encoder alone, which ssvit's objective trains. Peers are given float images in [0, 1] and spared
the normalisation, which ssvit does inside its step.

Letters: b images, c channels, n patches, m corrupted patches an image, d width.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssvit.benchmark.options import Size
from ssvit.data.batch import Batch
from ssvit.models.vit import ViT, gather
from ssvit.objectives.base import NOTHING, Objective
from ssvit.objectives.masked_patch import MaskedPatch
from ssvit.objectives.masking import Corruption, Masking
from ssvit.objectives.targets import MeanColor


class Peer(Objective):
    """A peer's model, with the corruption that ssvit would sample; a subclass has its `loss`."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, self.masking = size, Masking()
        # As far as it is asked for.
        self.encoder = cast(ViT, SimpleNamespace(grid=_grid(size), blocks=()))

    def sample(self, slots: Tensor, *, seed: int) -> Corruption:
        """Which patches are corrupted, and how; vit-pytorch samples once more for itself."""
        return self.masking.sample(slots, seed=seed, grid=self.encoder.grid)

    def loss(self, images: Tensor, noise: Corruption) -> Tensor:
        """The peer's loss."""
        raise NotImplementedError

    def forward(self, batch: Batch, noise: Corruption, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """The loss alone."""
        return {"loss": self.loss(batch.images, noise)}


class VitPytorch(Peer):
    """vit-pytorch's masked patch prediction (its `mpp.py`), mended where the current encoder makes it crash."""

    def __init__(self, size: Size) -> None:
        from vit_pytorch import ViT
        from vit_pytorch.mpp import MPP

        super().__init__(size)
        vit = ViT(
            image_size=size.image_size,
            patch_size=size.patch_size,
            num_classes=0,
            dim=size.width,
            depth=size.depth,
            heads=size.heads,
            mlp_dim=4 * size.width,
        )
        # The encoder has lost the leading dimension of these two, which its masked patch prediction still expects.
        vit.cls_token = nn.Parameter(vit.cls_token[None])
        vit.pos_embedding = nn.Parameter(vit.pos_embedding[None])
        self.model = MPP(
            vit,
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


class Transformers(Peer):
    """transformers' `ViTForMaskedImageModeling`: masked patches, pixels of all patches, L1 on the masked ones."""

    def __init__(self, size: Size) -> None:
        from transformers import ViTConfig, ViTForMaskedImageModeling

        super().__init__(size)
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
            attn_implementation="sdpa",
        )
        self.model = ViTForMaskedImageModeling(config)

    def loss(self, images: Tensor, noise: Corruption) -> Tensor:
        """Its own loss."""
        masked = torch.zeros(len(images), math.prod(self.encoder.grid), dtype=torch.bool, device=images.device)
        return self.model(images, bool_masked_pos=masked.scatter(1, noise.ids, True)).loss


class Lightly(Peer):
    """SimMIM with lightly's masked encoder, as its example has it: masked patches, L1 on their pixels."""

    def __init__(self, size: Size) -> None:
        from lightly.models.modules import MaskedVisionTransformerTorchvision

        super().__init__(size)
        self.model = MaskedVisionTransformerTorchvision(vit=_torchvision(size))
        self.decoder = nn.Linear(size.width, 3 * size.patch_size**2)

    def loss(self, images: Tensor, noise: Corruption) -> Tensor:
        """L1 between the head's prediction of the masked patches and their pixels."""
        token_ids, p = noise.ids + 1, self.size.patch_size  # it counts the class token
        pixels = rearrange(images, "b c (y p) (x q) -> b (y x) (c p q)", p=p, q=p)
        prediction = self.decoder(gather(self.model.encode(images, idx_mask=token_ids), token_ids))
        return F.l1_loss(prediction, gather(pixels, noise.ids))


class Timm(nn.Module):
    """timm's `VisionTransformer`, as `MaskedPatch` takes an encoder."""

    def __init__(self, size: Size) -> None:
        from timm.models.vision_transformer import VisionTransformer

        super().__init__()
        self.width, self.grid, self.blocks = size.width, _grid(size), ()
        self.model = VisionTransformer(
            img_size=size.image_size,
            patch_size=size.patch_size,
            embed_dim=size.width,
            depth=size.depth,
            num_heads=size.heads,
            num_classes=0,
            global_pool="",
        )

    def embed(self, images: Tensor) -> Tensor:
        return self.model.patch_embed(images)

    def encode(self, tokens: Tensor, *, output_ids: Tensor) -> Tensor:
        return gather(self.model.norm(self.model.blocks(self.model._pos_embed(tokens))), output_ids + 1)


class Torchvision(nn.Module):
    """torchvision's `VisionTransformer`, as `MaskedPatch` takes an encoder."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.width, self.grid, self.blocks = size.width, _grid(size), ()
        self.model = _torchvision(size)

    def embed(self, images: Tensor) -> Tensor:
        return self.model._process_input(images)

    def encode(self, tokens: Tensor, *, output_ids: Tensor) -> Tensor:
        class_token = self.model.class_token.expand(len(tokens), -1, -1).to(tokens.dtype)
        return gather(self.model.encoder(torch.cat([class_token, tokens], dim=1)), output_ids + 1)


def _grid(size: Size) -> tuple[int, int]:
    return (size.image_size // size.patch_size,) * 2


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


def masked_patch(encoder: nn.Module, size: Size) -> MaskedPatch:
    """The objective as configs/objective/masked_patch.yaml has it."""
    return MaskedPatch(encoder=cast(ViT, encoder), masking=Masking(), target=MeanColor(patch_size=size.patch_size))


PEERS: dict[str, Callable[[Size], Objective]] = {
    "vit-pytorch MPP": VitPytorch,
    "transformers MIM": Transformers,
    "timm + head": lambda size: masked_patch(Timm(size), size),
    "torchvision + head": lambda size: masked_patch(Torchvision(size), size),
    "lightly SimMIM": Lightly,
}
