"""Compare the way from files and from memory to augmented batches on one core: python -m benchmarks.data [ROUNDS]

All contenders make a crop of the same random distribution, resized to the same size and flipped half of the time. ssvit
ends at a uint8 batch, because its encoder takes that; the others end at the float batch that their users need. Files
come from the page cache: the cost of a disk or a network is not measured. WebDataset reads the same shards as ssvit,
through a shuffle buffer; LitData has chunks of its own. Peers that are not installed are left out.
"""

import io
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision import transforms as v1
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from ssvit.data.augment.options import InceptionCrop
from ssvit.data.loader import Loader
from ssvit.data.sources import datasets, datasets_options, packing
from ssvit.data.sources.base import Source
from ssvit.data.sources.datasets_options import Pack
from ssvit.data.sources.memory import Memory
from ssvit.data.sources.shards import Shards
from ssvit.training.benchmark import Rate, measure_rates, rate_table

_FILES, _FILE_SIZE, _SMALLER, _CROP = 512, (375, 500), 256, 224
_SMALL_IMAGES, _SMALL, _BATCH = 4096, 32, 256
_FEW = 1024  # small images that the slow contenders process in a round
_BUFFER = 100  # images that WebDataset shuffles among
Work = Callable[[], float]


def scenes(count: int, size: tuple[int, int], *, seed: int) -> Tensor:
    """Return noise of several scales, smooth as photographs are: (count, 3, height, width) uint8."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.full((count, 3, *size), 0.5)
    for cells, weight in ((4, 0.5), (16, 0.25), (64, 0.12), (256, 0.05)):
        if cells <= max(size):
            noise = torch.rand(count, 3, cells, cells, generator=generator) - 0.5
            image += weight * F.interpolate(noise, size=size, mode="bicubic", align_corners=False)
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def ours(source: Source, size: int, batch_size: int) -> Work:
    """Return a function that gives an epoch of a source in batches of ssvit's loader."""
    crop = InceptionCrop(size=(size, size), scale=(0.08, 1.0)).build()  # the scale is torchvision's default
    loader = Loader(source=source, transform=crop, seed=0, batch_size=batch_size, order="bijection")
    return lambda: sum(len(batch.images) for batch in loader.batches(0, len(source) // batch_size))


def torchvision(images: Callable[[], Iterable[Any]], size: int, library: Any, *conversion: Any) -> Work:
    """Return a function that crops and stacks images by torchvision's transforms of a version."""
    crops = library.RandomResizedCrop(size), library.RandomHorizontalFlip()
    transform = library.Compose([*crops, *conversion])
    return lambda: len(torch.stack([transform(image) for image in images()]))


def with_pillow(images: Callable[[], Iterable[Image.Image]], size: int) -> dict[str, Work]:
    """Return the contenders that augment Pillow's images."""
    return {
        "Pillow + transforms v1": torchvision(images, size, v1, v1.ToTensor()),
        "Pillow + transforms v2": torchvision(images, size, v2, v2.ToImage(), v2.ToDtype(torch.float32, scale=True)),
    }


def memory(rounds: int) -> list[Rate]:
    """Measure images in memory."""
    images = scenes(_SMALL_IMAGES, (_SMALL, _SMALL), seed=1)
    arrays = images[:_FEW].permute(0, 2, 3, 1).contiguous().numpy()
    contenders = with_pillow(lambda: map(Image.fromarray, arrays), _SMALL)
    contenders["ssvit"] = ours(Memory(images), _SMALL, _BATCH)
    return measure_rates(contenders, reference="Pillow + transforms v1", rounds=rounds)


def files(folder: Path, rounds: int, count: int = _FILES) -> list[Rate]:
    """Measure JPEG files in a folder and in shards."""
    (folder / "images").mkdir()
    for place, image in enumerate(scenes(count, _FILE_SIZE, seed=0)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / "images" / f"{place:05d}.jpg", quality=90)
    data = datasets.folder(datasets_options.Folder(root=str(folder / "images"), held_out=1 / count))
    sources = {"ssvit, folder": data.train}
    for name, size in (("ssvit, shards", None), (f"ssvit, shards of size={_SMALLER}", _SMALLER)):
        root = folder / name
        pack = Pack(output=name, size=size, quality=90, shard_size=8, workers=2, overwrite=False)
        packing.pack(data, root, pack, lambda done, total: None)
        sources[name] = datasets.shards(datasets_options.Shards(root=str(root))).train
    shards = sources["ssvit, shards"]
    assert isinstance(shards, Shards)
    encoded = [shards.file(index).tobytes() for index in range(len(shards))]
    contenders = with_pillow(lambda: (Image.open(io.BytesIO(data)).convert("RGB") for data in encoded), _CROP)
    contenders |= {name: ours(source, _CROP, len(source)) for name, source in sources.items()}
    for name, read in readers(folder, shards, encoded):
        contenders[name] = torchvision(read, _CROP, v2, v2.ToDtype(torch.float32, scale=True))
    return measure_rates(contenders, reference="ssvit, folder", rounds=rounds)


def _decoded(encoded: bytes) -> Tensor:
    return decode_jpeg(torch.from_numpy(np.frombuffer(encoded, np.uint8).copy()), ImageReadMode.RGB)


def readers(folder: Path, shards: Shards, encoded: list[bytes]) -> Iterator[tuple[str, Callable[[], Iterable[Tensor]]]]:
    """Yield the installed readers of other projects by name: functions that decode all images by torchvision."""
    with suppress(ModuleNotFoundError):
        import webdataset

        def samples() -> Iterator[Tensor]:
            dataset = webdataset.WebDataset(list(shards.shards), shardshuffle=False, empty_check=False)
            return (_decoded(sample["jpg"]) for sample in dataset.shuffle(_BUFFER))

        yield "WebDataset", samples
    with suppress(ModuleNotFoundError):
        from litdata import StreamingDataset
        from litdata.streaming.writer import BinaryWriter

        (folder / "lit").mkdir()
        writer = BinaryWriter(str(folder / "lit"), chunk_bytes=8_000_000)
        for index, data in enumerate(encoded):
            writer[index] = {"jpg": data}
        writer.done()
        writer.merge()
        yield "LitData", lambda: (_decoded(item["jpg"]) for item in StreamingDataset(str(folder / "lit"), shuffle=True))


def main(rounds: int = 7, count: int = _FILES) -> None:
    """Measure and print both tables."""
    torch.set_num_threads(1)
    print(rate_table(f"{_SMALL} px images in memory, crop and flip", memory(rounds)))
    with tempfile.TemporaryDirectory() as folder:
        rates = files(Path(folder), rounds, count)
        print(rate_table(f"{_FILE_SIZE[1]}x{_FILE_SIZE[0]} JPEG files to {_CROP} px, crop and flip", rates))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
