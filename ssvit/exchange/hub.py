"""The Hugging Face Hub: files of weights in its repositories, hf://OWNER/NAME[@REVISION][/FILE], and exports to it.

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
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of a repository without a file, the first that it has
_CACHED = re.compile(r"models--[\w.-]+?--([\w.-]+)", re.ASCII)  # the folder of a repository in the cache


def check(option: str, value: str) -> None:
    """OptionError unless `value` names a repository; UserError unless huggingface_hub is installed."""
    if not isinstance(value, str) or not _REPOSITORY.fullmatch(value):
        raise OptionError(option, value, "must be OWNER/NAME, a repository of the Hugging Face Hub")
    _installed(option, value)


def fetch(address: str) -> Path:
    """The file of weights at an address, in the cache, with the JSON files of its folder beside it.

    OptionError, by the name checkpoint, if there is none.
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
    """One file, from the cache or the Hub; None if the repository, or without a network the cache, has no such file."""
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
    """The name of the repository that a file in the cache is of, or of any other file without its suffix."""
    folders = [found[1] for folder in path.parents if (found := _CACHED.fullmatch(folder.name))]
    return folders[0] if folders and "snapshots" in path.parts else path.stem


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder as the repository's newest revision, which is made if there is none; returns its address.

    UserError if the Hub refuses it.
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
    """UserError in one line for what the Hub refuses or does not answer."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{option}={value}: {first}") from None
