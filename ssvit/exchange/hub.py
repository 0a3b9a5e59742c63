"""Access the Hugging Face Hub: read weights at hf://OWNER/NAME[@REVISION][/FILE] and upload exports.

huggingface_hub caches downloaded files, which can then be read without a network (HF_HUB_OFFLINE=1).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from ssvit.options import OptionError, UserError

_ADDRESS = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<file>\S+))?", re.ASCII)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # default files of a repository, by precedence
_CACHED = re.compile(r"models--[\w.-]+?--([\w.-]+)", re.ASCII)  # cache folder of a repository


def check(option: str, value: str) -> None:
    """Check that `value` names a repository and that huggingface_hub is installed.

    Raises:
        OptionError: It is not OWNER/NAME.
        UserError: huggingface_hub is not installed.
    """
    if not isinstance(value, str) or not _REPOSITORY.fullmatch(value):
        raise OptionError(option, value, "must be OWNER/NAME, a repository of the Hugging Face Hub")
    _installed(option, value)


def fetch(address: str) -> Path:
    """Download the file of weights at an address and the JSON files of its folder, and return its path in the cache.

    Raises:
        OptionError: There is no such file; the option is named checkpoint.
    """
    if (parts := _ADDRESS.fullmatch(address)) is None:
        raise OptionError("checkpoint", address, "must be hf://OWNER/NAME, hf://OWNER/NAME@REVISION or …/FILE")
    _installed("checkpoint", address)
    repository, revision, file = parts["repository"], parts["revision"], parts["file"]
    folder = f"{Path(file).parent}/" if file and "/" in file else ""
    for description in ("config.json", "preprocessor_config.json"):
        _get(address, repository, revision, folder + description)
    for weights in [file] if file else _WEIGHTS:
        if found := _get(address, repository, revision, weights):
            return found
    from huggingface_hub import constants

    right = "has no such file" if file else f"has none of {', '.join(_WEIGHTS)}; name the file, as {address}/FILE"
    cache = "; HF_HUB_OFFLINE is set, so the cache alone was searched" if constants.HF_HUB_OFFLINE else ""
    raise OptionError("checkpoint", address, right + cache)


def _get(address: str, repository: str, revision: str | None, file: str) -> Path | None:
    """Return the path of one file, from the cache or the Hub, or None if it does not exist (offline: in the cache)."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with _reported("checkpoint", address):
        try:
            return Path(hf_hub_download(repository, file, revision=revision))
        except LocalEntryNotFoundError:
            if not constants.HF_HUB_OFFLINE:
                raise OptionError("checkpoint", address, "is not in the cache, and the Hub does not answer") from None
        except EntryNotFoundError:
            pass
    return None


def name(path: Path) -> str:
    """Return the name of a cached file's repository, or the name of any other file without its suffix."""
    folders = [found[1] for folder in path.parents if (found := _CACHED.fullmatch(folder.name))]
    return folders[0] if folders and "snapshots" in path.parts else path.stem


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder as the newest revision of a repository, which is created if necessary, and return its address.

    Args:
        folder: The folder of an export.
        repository: OWNER/NAME.
        private: Whether a new repository is private.

    Raises:
        UserError: The Hub rejects the upload.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="ssvit")
    with _reported("push", repository):
        made = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export by ssvit")
    return str(made)


def _installed(option: str, value: str) -> None:
    if find_spec("huggingface_hub") is None:
        raise UserError(f"{option}={value} needs huggingface_hub: pip install ssvit[hub]")


@contextmanager
def _reported(option: str, value: str) -> Iterator[None]:
    """Convert errors of the Hub and of the network to a UserError of one line."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{option}={value}: {first}") from None
