"""Find files of weights in the usual caches of Hugging Face, timm and torch. No torch, no network."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ssvit.errors import UserError
from ssvit.exchange.options import SUFFIXES
from ssvit.loading.finding import open_checkpoint

_LARGEST = 400 << 20  # bytes of a file, about those of a ViT-B in float32


def cached_weights() -> Iterator[Path]:
    """Yield the files in the caches whose weights can be loaded, smallest first."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home / "huggingface", "hub")
    torch = Path(os.environ.get("TORCH_HOME") or home / "torch", "hub", "checkpoints")
    files = [*Path(hub).glob("models--*/snapshots/*/*"), *torch.glob("*")]
    sizes = {file: file.stat().st_size for file in files if file.suffix in SUFFIXES and file.is_file()}
    for file in sorted(sizes, key=lambda file: (sizes[file], file)):
        with suppress(UserError):  # weights of other models
            if sizes[file] <= _LARGEST:
                open_checkpoint(file)
                yield file
