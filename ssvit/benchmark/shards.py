"""Images in shards, from files to augmented batches, compared with a folder, WebDataset and LitData, on one core.

All read the same JPEG files, at random as far as they can, from the page cache: what a disk or a network adds is not
measured. WebDataset reads the very shards that ssvit does, through a shuffle buffer; LitData has chunks of its own. The
peers decode as ssvit does, by torchvision, and augment by its transforms. Peers that are not installed are left out.

Letters: b images.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from ssvit.benchmark.data import SCALE, scenes
from ssvit.benchmark.timing import Rate, compare, threads
from ssvit.data import decode
from ssvit.data.augment.crop import InceptionCrop
from ssvit.data.loader import Loader
from ssvit.data.sources import datasets, datasets_options, packing
from ssvit.data.sources.base import Source
from ssvit.data.sources.packing_options import Pack
from ssvit.data.sources.shards import Shards

_IMAGES, _SIZE, _SMALLER, _CROP = 512, (375, 500), 256, 224
_HELD_OUT = 0.002  # a data set has some images to measure on
_BUFFER = 100  # images that WebDataset shuffles among


def run(*, rounds: int = 7) -> dict[str, list[Rate]]:
    """The files' bytes alone, and batches of crops; by title, on one thread. The reference is ssvit's folder."""
    with threads(1), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "images").mkdir()
        for place, image in enumerate(scenes(_IMAGES, _SIZE, seed=0)):
            file = folder / "images" / f"{place:05d}.jpg"
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, quality=90)
        data = datasets.folder(datasets_options.Folder(root=str(folder / "images"), held_out=_HELD_OUT))
        for output, size in (("shards", None), ("smaller", _SMALLER)):
            own = Pack(output=name, size=size, quality=90, shard_size=8, workers=2, verify=False, overwrite=False)
            packing.pack(data, folder / output, own, lambda done, total: None)
        shards, smaller = (
            datasets.shards(datasets_options.Shards(root=str(folder / output))).train
            for output in ("shards", "smaller")
        )
        assert isinstance(shards, Shards)
        peers = dict(_peers(folder, shards))
        return {
            "500x375 JPEG files, their bytes alone": compare(
                {
                    "ssvit, folder": _counted(lambda: _files(data.train)),
                    "ssvit, shards": _counted(lambda: map(shards.file, _order(len(shards)))),
                    **{name: _counted(files) for name, files in peers.items()},
                },
                reference="ssvit, folder",
                rounds=rounds,
            ),
            "500x375 JPEG files to 224 px, crop and flip": compare(
                {
                    "ssvit, folder": _batches(data.train),
                    "ssvit, shards": _batches(shards),
                    "ssvit, shards of size=256": _batches(smaller),
                    **{name: _crops(files) for name, files in peers.items()},
                },
                reference="ssvit, folder",
                rounds=rounds,
            ),
        }


def _order(count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()


def _files(source: Source) -> Iterator[decode.Bytes]:
    for index in _order(len(source)):
        path = source.name(index)
        yield decode.read_part(path, 0, Path(path).stat().st_size, path)


def _counted(files: Callable[[], Iterable[Any]]) -> Callable[[], int]:
    return lambda: sum(1 for file in files() if len(file))


def _batches(source: Source) -> Callable[[], int]:
    size = len(source)
    crop = InceptionCrop(size=(_CROP, _CROP), scale=SCALE)
    loader = Loader(source=source, transform=crop, seed=0, batch_size=size, order="bijection")
    return lambda: sum(len(batch.images) for batch in loader.batches(0, 1))


def _crops(files: Callable[[], Iterable[bytes]]) -> Callable[[], int]:
    """A peer's files, decoded and augmented as its users do."""
    transform = v2.Compose(
        [v2.RandomResizedCrop(_CROP, antialias=True), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    )

    def image(data: bytes) -> Tensor:
        return transform(decode_jpeg(torch.from_numpy(np.frombuffer(data, np.uint8).copy()), ImageReadMode.RGB))

    return lambda: len(torch.stack([image(data) for data in files()]))


def _peers(folder: Path, shards: Shards) -> Iterator[tuple[str, Callable[[], Iterable[bytes]]]]:
    """By name, functions that give the bytes of all images."""
    with suppress(ModuleNotFoundError):
        import webdataset

        def samples() -> Iterator[bytes]:
            dataset = webdataset.WebDataset(list(shards.shards), shardshuffle=False, empty_check=False)
            return (sample["jpg"] for sample in dataset.shuffle(_BUFFER))

        yield "WebDataset", samples
    with suppress(ModuleNotFoundError):
        from litdata import StreamingDataset
        from litdata.streaming.writer import BinaryWriter

        (folder / "lit").mkdir()
        writer = BinaryWriter(str(folder / "lit"), chunk_bytes=8_000_000)
        for index in range(len(shards)):
            writer[index] = {"jpg": shards.file(index).tobytes()}
        writer.done()
        writer.merge()

        def items() -> Iterator[bytes]:
            return (item["jpg"] for item in StreamingDataset(str(folder / "lit"), shuffle=True))

        yield "LitData", items
