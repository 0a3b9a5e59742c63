"""From files and from memory to augmented batches, compared with Pillow and torchvision's transforms, on one core.

All make the same thing: a crop of the same random distribution, resized to the same size and flipped half of the time.
ssvit ends at a uint8 batch, because its encoder takes that; the others end at the float batch that their users need.

Letters: b images.
"""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms import v2

from ssvit.benchmark.timing import Rate, compare, threads
from ssvit.data.augment.crop import InceptionCrop
from ssvit.data.loader import Loader
from ssvit.data.sources.files import Files
from ssvit.data.sources.memory import Memory

SCALE = (0.08, 1.0)  # of the crops, as is usual for ImageNet and torchvision's default
_FILES, _FILE_SIZE, _CROP = 64, (375, 500), 224
_SMALL, _SMALL_SIZE, _BATCH = 8192, 32, 256
_FEW = 1024  # small images that the slow contenders do in a round


def run(*, rounds: int = 7) -> dict[str, list[Rate]]:
    """Both comparisons, by title, on one thread. The reference of the ratios is Pillow with transforms v1."""
    with threads(1), tempfile.TemporaryDirectory() as folder:
        return {
            "500x375 JPEG files to 224 px, crop and flip": _files(Path(folder), rounds),
            "32 px images in memory, crop and flip": _memory(rounds),
        }


def scenes(count: int, size: tuple[int, int], *, seed: int) -> Tensor:
    """Noise of several scales, smooth as photographs are: (b, 3, h, w) uint8."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.full((count, 3, *size), 0.5)
    for cells, weight in ((4, 0.5), (16, 0.25), (64, 0.12), (256, 0.05)):
        if cells > max(size):
            break
        noise = torch.rand(count, 3, cells, cells, generator=generator) - 0.5
        image += weight * F.interpolate(noise, size=size, mode="bicubic", align_corners=False)
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def _files(folder: Path, rounds: int) -> list[Rate]:
    paths = [str(folder / f"{i:03d}.jpg") for i in range(_FILES)]
    for path, image in zip(paths, scenes(_FILES, _FILE_SIZE, seed=0), strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path, quality=90)

    def images() -> Iterable[Image.Image]:
        for path in paths:
            with open(path, "rb") as file:
                yield Image.open(file).convert("RGB")

    crop = InceptionCrop(size=(_CROP, _CROP), scale=SCALE)
    loader = Loader(source=Files(paths), transform=crop, seed=0, batch_size=_FILES)
    return _compare(loader, images, _CROP, steps=1, rounds=rounds)


def _memory(rounds: int) -> list[Rate]:
    images = scenes(_SMALL, (_SMALL_SIZE, _SMALL_SIZE), seed=1)
    arrays = images[:_FEW].permute(0, 2, 3, 1).contiguous().numpy()
    crop = InceptionCrop(size=(_SMALL_SIZE, _SMALL_SIZE), scale=SCALE)
    loader = Loader(source=Memory(images), transform=crop, seed=0, batch_size=_BATCH)
    return _compare(loader, lambda: map(Image.fromarray, arrays), _SMALL_SIZE, steps=_SMALL // _BATCH, rounds=rounds)


def _compare(
    loader: Loader, images: Callable[[], Iterable[Image.Image]], size: int, *, steps: int, rounds: int
) -> list[Rate]:
    """`steps` batches of our loader beside torchvision's crops of the same images to `size`."""

    def peer(*tensor: Callable[..., Tensor], library: Any) -> Callable[[], int]:
        transform = library.Compose([library.RandomResizedCrop(size), library.RandomHorizontalFlip(), *tensor])
        return lambda: len(torch.stack([transform(image) for image in images()]))

    contenders = {
        "Pillow + transforms v1": peer(v1.ToTensor(), library=v1),
        "Pillow + transforms v2": peer(v2.ToImage(), v2.ToDtype(torch.float32, scale=True), library=v2),
        "ssvit": lambda: sum(len(batch.images) for batch in loader.batches(0, steps)),
    }
    return compare(contenders, reference="Pillow + transforms v1", rounds=rounds)
