"""Implement the light Transformer that reconstructs masked patches (He et al. 2022, section 3).

Letters: b images, n patches, m masked patches per image, s prefix tokens of the encoder, d width of the decoder.
"""

import torch
from torch import Tensor, nn

from ssvit.models import vit_options
from ssvit.models.block import Attention, Block, Layers
from ssvit.models.positions import SineCosine2D
from ssvit.models.vit import ViT


class Decoder(nn.Module):
    """Apply Transformer layers to the encoder's outputs of visible patches and a [mask] token for each masked patch.

    Positions are fixed sines and cosines; linear layers are initialised Xavier-uniform with zero biases
    (facebookresearch/mae: models_mae.py).

    Args:
        options: Options of the decoder.
        encoder: The encoder whose outputs are decoded.
        output_width: Number of values that are predicted per patch.
    """

    def __init__(self, options: vit_options.Decoder, *, encoder: ViT, output_width: int) -> None:
        width = options.width
        super().__init__()
        self.embed = nn.Linear(encoder.width, width)
        self.mask_token = nn.Parameter(torch.randn(width) * 0.02)
        self.positions = SineCosine2D(encoder.grid, encoder.num_prefix_tokens, width)
        self.blocks = Layers(
            Block(
                Attention(width=width, heads=options.heads, dropout=0.0, relative=None),
                width=width,
                mlp_width=4 * width,
                dropout=0.0,
                drop=0.0,
            )
            for _ in range(options.depth)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, output_width)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, encoded: Tensor, visible_ids: Tensor, masked_ids: Tensor) -> Tensor:
        """Predict the masked patches from the encoder's outputs.

        Args:
            encoded: Outputs of the encoder for the prefix tokens and the visible patches, (b, s + n - m, input_width).
            visible_ids: Indices of the visible patches, (b, n - m), in the order of the outputs.
            masked_ids: Indices of the masked patches, (b, m).

        Returns:
            Predictions, (b, m, output_width).
        """
        x = self.embed(encoded)
        masks = self.mask_token.to(x.dtype).expand(*masked_ids.shape, -1)
        # Attention is permutation-equivariant, so the masked patches can be appended with their positions.
        patches = torch.cat([visible_ids, masked_ids], dim=1) + self.positions.num_prefix_tokens
        prefix = torch.arange(self.positions.num_prefix_tokens, device=patches.device).expand(len(patches), -1)
        position_ids = torch.cat([prefix, patches], dim=1)
        x = torch.cat([x, masks], dim=1) + self.positions()[position_ids].to(x.dtype)
        output_ids = torch.arange(encoded.shape[1], x.shape[1], device=x.device).expand_as(masked_ids)
        return self.head(self.norm(self.blocks(x, output_ids=output_ids)))
