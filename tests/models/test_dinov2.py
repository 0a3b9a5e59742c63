"""LayerScale and registers, as DINOv2 has them: the equations, the sequence, and what stays as it was."""

import peers
import torch
from safetensors.torch import save_file

from ssvit.loading import encoder as loading
from ssvit.loading import encoder_options as loading_options


@torch.no_grad()
def test_positions_of_another_image_size_are_timms(tmp_path):
    model = peers.of_timm(init_values=1e-5, reg_tokens=3, no_embed_class=True, dynamic_img_size=True)
    save_file(model.state_dict(), tmp_path / "timm.safetensors")
    size = (48, 40)
    encoder = loading.load_encoder(
        loading_options.LoadEncoder(path=tmp_path / "timm.safetensors", **peers.TOLD, image_size=size, resize="timm")
    )
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(value)[:, None, None] for value in peers.IMAGENET)
    assert (encoder(x) - model.forward_features((x - mean) / std)).abs().max() < 1e-5
