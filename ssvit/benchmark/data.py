"""From files and from memory to augmented batches, beside Pillow and torchvision's transforms, on one core.

All make the same thing: a crop of the same random distribution, resized to the same size and flipped half of the time.
ssvit ends at a uint8 batch, because its encoder takes that; the others end at the float batch that their users need.

Letters: b images.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms import v2

from ssvit.benchmark.timing import Rate, compare
from ssvit.data.augment.crop import InceptionCrop
from ssvit.data.files import Files
from ssvit.data.loader import Loader
from ssvit.data.memory import Memory

_FILES, _FILE_SIZE, _CROP = 64, (375, 500), 224
_SMALL, _SMALL_SIZE, _BATCH = 8192, 32, 256
_FEW = 1024  # small images that the slow contenders do in a round


def run(*, rounds: int = 7) -> dict[str, list[Rate]]:
    """Both comparisons, by title, on one thread. The reference of the ratios is Pillow with transforms v1."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return {
                "500x375 JPEG files to 224 px, crop and flip": _files(Path(folder), rounds),
                "32 px images in memory, crop and flip": _memory(rounds),
            }
    finally:
        torch.set_num_threads(threads)


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
    paths = []
    for i, image in enumerate(scenes(_FILES, _FILE_SIZE, seed=0)):
        paths.append(str(folder / f"{i:03d}.jpg"))
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(paths[-1], quality=90)

    def ours() -> Callable[[], int]:
        loader = Loader(source=Files(paths), transform=InceptionCrop(size=_CROP), seed=0, batch_size=_FILES)
        return lambda: sum(len(batch.images) for batch in loader.batches(0, 1))

    def peer(transform: Callable[[Image.Image], Tensor]) -> Callable[[], int]:
        def work() -> int:
            images = []
            for path in paths:
                with open(path, "rb") as file:
                    images.append(transform(Image.open(file).convert("RGB")))
            return len(torch.stack(images))

        return work

    return compare(
        {"Pillow + transforms v1": peer(_v1(_CROP)), "Pillow + transforms v2": peer(_v2(_CROP)), "ssvit": ours()},
        reference="Pillow + transforms v1",
        rounds=rounds,
    )


def _memory(rounds: int) -> list[Rate]:
    images = scenes(_SMALL, (_SMALL_SIZE, _SMALL_SIZE), seed=1)
    arrays = images[:_FEW].permute(0, 2, 3, 1).contiguous().numpy()
    loader = Loader(source=Memory(images), transform=InceptionCrop(size=_SMALL_SIZE), seed=0, batch_size=_BATCH)

    def ours() -> int:
        return sum(len(batch.images) for batch in loader.batches(0, _SMALL // _BATCH))

    def peer(transform: Callable[[Image.Image], Tensor]) -> Callable[[], int]:
        return lambda: len(torch.stack([transform(Image.fromarray(array)) for array in arrays]))

    return compare(
        {
            "Pillow + transforms v1": peer(_v1(_SMALL_SIZE)),
            "Pillow + transforms v2": peer(_v2(_SMALL_SIZE)),
            "ssvit": ours,
        },
        reference="Pillow + transforms v1",
        rounds=rounds,
    )


def _v1(size: int) -> Callable[[Image.Image], Tensor]:
    return v1.Compose([v1.RandomResizedCrop(size), v1.RandomHorizontalFlip(), v1.ToTensor()])


def _v2(size: int) -> Callable[[Image.Image], Tensor]:
    float32 = v2.ToDtype(torch.float32, scale=True)
    return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.ToImage(), float32])
