"""Read weights on the Hugging Face Hub at hf://OWNER/NAME[@REVISION][/FILE], or timm:NAME for hf://timm/NAME.

huggingface_hub caches downloaded files, which can then be read without a network (HF_HUB_OFFLINE=1).
"""

import re
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from ssvit.errors import OptionError, UserError
from ssvit.exchange.options import TIMM_HUB

_ADDRESS = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<file>\S+))?", re.ASCII)
_WEIGHTS = "model.safetensors"  # default file of a repository
_ALIKE = ("model", "pytorch_model")  # names of the files of all models that Hugging Face's libraries wrote
_CACHED = re.compile(r"models--[\w.-]+?--([\w.-]+)", re.ASCII)  # cache folder of a repository


def fetch(address: str) -> Path:
    """Download the file of weights at an address and the files that describe it, and return its path in the cache.

    Raises:
        OptionError: There is no such file; the option is named checkpoint.
        UserError: huggingface_hub is not installed.
    """
    if (parts := _parts(address)) is None:
        expected = "must be hf://OWNER/NAME, hf://OWNER/NAME@REVISION, …/FILE, or timm:NAME.TAG"
        raise OptionError("checkpoint", address, expected)
    if find_spec("huggingface_hub") is None:
        raise UserError(f"checkpoint={address}: requires huggingface_hub (pip install huggingface_hub)")
    from huggingface_hub import snapshot_download

    weights = parts["file"] or _WEIGHTS
    names = ("config.json", "preprocessor_config.json", "README.md")
    descriptions = [str(PurePosixPath(weights).with_name(name)) for name in names]
    try:
        files = [weights, *descriptions]
        snapshot = snapshot_download(parts["repository"], revision=parts["revision"], allow_patterns=files)
    except Exception as error:  # those of the HTTP client, as for a proxy, have no common base class
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OptionError("checkpoint", address, f"cannot be read from the Hub: {reason}") from None
    if not (path := Path(snapshot, weights)).is_file():
        expected = f"the repository has no file {weights}; name one, as hf://OWNER/NAME/FILE"
        raise OptionError("checkpoint", address, expected)
    return path


def repository(address: str) -> str | None:
    """Return OWNER/NAME of an address on the Hub; None for a path."""
    parts = _parts(address)
    return parts and parts["repository"]


def _parts(address: str) -> re.Match[str] | None:
    """Return the parts of an address on the Hub; None for a path."""
    is_timm = address.startswith(TIMM_HUB)
    return _ADDRESS.fullmatch(f"hf://timm/{address.removeprefix(TIMM_HUB)}" if is_timm else address)


def name(path: Path) -> str:
    """Return the name of a cached file's repository, of a model's folder, or of any other file without its suffix."""
    folders = [match[1] for folder in path.parents if (match := _CACHED.fullmatch(folder.name))]
    if folders and "snapshots" in path.parts:
        return folders[0]
    return path.parent.resolve().name if path.stem in _ALIKE else path.stem.removesuffix(".pth")
