"""Train Faster R-CNN on a pre-trained encoder: python examples/detection.py outputs/masked_patch_shapes

ViTDet's simple feature pyramid makes the encoder a backbone for torchvision's detectors. The images are the rendered
shapes, larger than in pre-training. The boxes are the bounding boxes of the shapes' masks.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import masks_to_boxes

from ssvit.data.sources import shapes_options
from ssvit.data.sources.shapes import shapes
from ssvit.loading import options as loading_options
from ssvit.loading.encoder import load_encoder
from ssvit.models.backbone import FeatureMaps
from ssvit.models.vit import ViT


class FeaturePyramid(nn.Module):
    """Compute the simple feature pyramid of ViTDet (Li et al. 2022, section 3), a backbone for torchvision's detectors.

    All levels are computed from the map of the last layer. The encoder normalises its images, so a detector needs
    image_mean=[0, 0, 0] and image_std=[1, 1, 1].

    Args:
        encoder: The encoder.
        out_channels: Channels of each level, o.
    """

    def __init__(self, encoder: ViT, out_channels: int = 256) -> None:
        super().__init__()
        self.maps = FeatureMaps(encoder, [len(encoder.blocks)])
        self.out_channels = out_channels
        d = encoder.width
        twice, once = nn.ConvTranspose2d(d, d // 2, 2, stride=2), nn.ConvTranspose2d(d, d // 2, 2, stride=2)
        quarter = nn.ConvTranspose2d(d // 2, d // 4, 2, stride=2)
        resized = (
            (nn.Sequential(twice, LayerNorm2d(d // 2, eps=1e-6), nn.GELU(), quarter), d // 4),
            (once, d // 2),
            (nn.Identity(), d),
            (nn.MaxPool2d(2), d),
        )
        self.levels = nn.ModuleDict(
            {
                str(level): nn.Sequential(
                    resize,
                    nn.Conv2d(channels, out_channels, 1, bias=False),
                    LayerNorm2d(out_channels, eps=1e-6),
                    nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
                    LayerNorm2d(out_channels, eps=1e-6),
                )
                for level, (resize, channels) in enumerate(resized)
            }
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the levels of the pyramid.

        Args:
            images: Images, (b, c, h, w), uint8 or in [0, 1].

        Returns:
            Maps by name: "0" (b, o, 4 y, 4 x), "1" (b, o, 2 y, 2 x), "2" (b, o, y, x), "3" (b, o, y / 2, x / 2) and
            "pool" (b, o, y / 4, x / 4).
        """
        (features,) = self.maps(images)
        maps = {name: level(features) for name, level in self.levels.items()}
        return maps | {"pool": F.max_pool2d(maps["3"], 1, stride=2)}


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("checkpoint", help="a run, or a file of another project's weights")
parser.add_argument("--image-size", type=int, default=96)
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

torch.manual_seed(0)
size = arguments.image_size
encoder = load_encoder(loading_options.LoadEncoder(path=arguments.checkpoint)).train()
detector = FasterRCNN(
    FeaturePyramid(encoder, out_channels=64),
    num_classes=11,  # ten shapes, and the background
    rpn_anchor_generator=AnchorGenerator(sizes=((16,), (24,), (32,), (48,), (64,)), aspect_ratios=((0.5, 1, 2),) * 5),
    image_mean=[0, 0, 0],  # the encoder normalises its images itself
    image_std=[1, 1, 1],
    min_size=size,
    max_size=size,
)
optimizer = torch.optim.AdamW(detector.parameters(), lr=1e-4)

batch = 8
train = shapes(shapes_options.Shapes(image_size=size, images=batch * arguments.steps, held_out_images=1, seed=0)).train
for step in range(arguments.steps):
    indices = range(step * batch, (step + 1) * batch)
    images = [train.read(i) / 255 for i in indices]
    boxes = [masks_to_boxes((train.mask(i) > 0)[None]) for i in indices]
    targets = [{"boxes": box, "labels": train.labels[i : i + 1] + 1} for i, box in zip(indices, boxes, strict=True)]
    losses = detector(images, targets)
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    parts = ", ".join(f"{name.removeprefix('loss_')} {value.item():.3f}" for name, value in losses.items())
    print(f"step {step + 1}/{arguments.steps}  loss {loss.item():.3f} ({parts})", flush=True)
