"""The Hugging Face Hub without a network: a cache in its layout, addresses, and exports of ssvit that are read back."""

import hashlib
import json
from pathlib import Path

import pytest
import tiny
import torch
from command import error_of, one_line
from exported import classifier, encoder, images, written

from ssvit.errors import OptionError, UserError
from ssvit.exchange import hub
from ssvit.loading.finding import open_checkpoint

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
COMMIT, OLDER = "a" * 40, "b" * 40


def lay_out(cache: Path, files: dict[str, Path], *, commit: str = COMMIT, ref: str = "main") -> None:
    """Store a revision of me/tiny as huggingface_hub does: blobs by their hash, snapshots of links, refs."""
    folder = cache / "models--me--tiny"
    for name, file in files.items():
        blob = folder / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.read_bytes())
        link = folder / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / ref).write_text(commit)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache, with weights and configuration in main and in a subfolder, and a README in the branch `old`."""
    folder, _ = written(encoder(), tmp_path, "timm")
    files = {file.name: file for file in folder.iterdir()}
    lay_out(tmp_path / "cache", {**files, "large/model.safetensors": folder / "model.safetensors"})
    lay_out(tmp_path / "cache", {"README.md": folder / "README.md"}, commit=OLDER, ref="old")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("address", "file"),
    [
        ("hf://me/tiny", "model.safetensors"),
        ("hf://me/tiny@main", "model.safetensors"),
        (f"hf://me/tiny@{OLDER}/README.md", f"../{OLDER}/README.md"),
        ("hf://me/tiny/large/model.safetensors", "large/model.safetensors"),
    ],
)
def test_an_address_names_a_revision_and_a_file(address, file, cache):
    expected = (cache / "models--me--tiny" / "snapshots" / COMMIT / file).parent.resolve() / Path(file).name
    assert hub.fetch(address) == expected
    assert hub.name(hub.fetch(address)) == "tiny"


def test_a_name_of_timm_is_an_address(cache):
    (cache / "models--timm--tiny.tag").symlink_to(cache / "models--me--tiny")
    assert hub.fetch("timm:tiny.tag") == hub.fetch("hf://timm/tiny.tag")
    assert open_checkpoint("timm:tiny.tag").encoder == open_checkpoint("hf://me/tiny").encoder


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("tiny/weights.pth", "weights"),
        ("tiny/model.safetensors", "tiny"),
        ("tiny/pytorch_model.bin", "tiny"),
        ("tiny/large/../model.safetensors", "tiny"),
        ("model.safetensors", "work"),
        ("models/model.safetensors", "models"),  # not a cache
    ],
)
def test_a_file_is_named_as_its_folder_if_all_models_have_a_file_of_its_name(path, name, tmp_path, monkeypatch):
    (tmp_path / "work" / "tiny" / "large").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert hub.name(Path(path)) == name


@pytest.mark.parametrize(
    "address",
    [
        "hf://tiny",
        "timm:",
        "timm:none",
        "hf://me/tiny@",
        "hf://me/tiny/other.npz",
        "hf://me/tiny@old",
        "hf://me/none",
        "hf://me/tiny@none",
    ],
)
def test_an_address_without_a_file_is_reported_in_one_line(address, cache):
    assert str(error_of(hub.fetch, address)).startswith(f"checkpoint={address}: ")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(hub, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"^checkpoint=hf://me/cats: .*pip install huggingface_hub"):
        hub.fetch("hf://me/cats")


def test_commands_resolve_an_address_before_torch_is_imported(tool, cache, no_torch):
    offline = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": no_torch}
    line = one_line(tool("pretrain", "checkpoint=hf://me/none", status=2, **offline))
    assert line.startswith("ssvit: checkpoint=hf://me/none: ")
    line = one_line(tool("pretrain", "checkpoint=hf://me/tiny", status=2, **offline))  # which has no data set
    assert "data=" in line


@pytest.mark.parametrize("changes", [{"positions": "relative"}, {"positions": "rotary", "registers": 2}])
@torch.no_grad()
def test_an_export_of_ssvit_is_read_back_bit_for_bit(changes, tmp_path):
    """Also an encoder for which no other project has a model."""
    model = classifier(**changes)
    folder, _ = written(model, tmp_path, "safetensors")
    checkpoint = open_checkpoint(folder / "model.safetensors")
    assert checkpoint.encoder == json.loads((folder / "config.json").read_text())["encoder"]
    read, expected = tiny.loaded(checkpoint.path), model.encoder.state_dict()
    assert read.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in read.state_dict().items())
    assert torch.isfinite(read(images())).all()
    with pytest.raises(OptionError, match="heads=2: "):
        open_checkpoint(folder / "model.safetensors", {"heads": 2})


@pytest.mark.parametrize("change", [{"width": 40}, {"depth": 10**9}, {"depth": "many"}, {"call": "os.system"}])
def test_a_configuration_that_does_not_fit_its_weights_is_rejected(change, tmp_path):
    folder, _ = written(encoder(), tmp_path, "safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"encoder": config["encoder"] | change}))
    with pytest.raises(UserError, match=r"config\.json"):
        tiny.loaded(folder / "model.safetensors")


def test_an_error_of_the_http_client_is_one_line(cache, monkeypatch):
    class ProxyError(Exception):
        """An error without a common base class, as that of a proxy."""

    def fail(*arguments, **options):
        raise ProxyError("407\nProxy Authentication Required")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(OptionError, match=r"^checkpoint=hf://me/tiny: [^\n]*407 Proxy[^\n]*$"):
        hub.fetch("hf://me/tiny")
