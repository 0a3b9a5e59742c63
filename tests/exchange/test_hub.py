"""The Hugging Face Hub without a network: its cache laid out by hand, and uploads that stop at its client's calls."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from command import one_line
from exported import LIMIT, classifier, encoder, images, written

from ssvit.checkpoints import storage
from ssvit.cli.export import command as export
from ssvit.exchange import hub
from ssvit.exchange.export_options import Export
from ssvit.loading import encoder as loading
from ssvit.loading import encoder_options as loading_options
from ssvit.loading.finding import open_checkpoint
from ssvit.options import Failure, OptionError, UserError

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
constants = pytest.importorskip("huggingface_hub.constants")
errors = pytest.importorskip("huggingface_hub.errors")
COMMIT, OLDER = "a" * 40, "b" * 40


def lay_out(cache: Path, repository: str, files: dict[str, Path], *, commit: str = COMMIT, ref: str = "main") -> None:
    """A repository as huggingface_hub keeps it: blobs by their hash, snapshots of links to them, refs to snapshots."""
    folder = cache / f"models--{repository.replace('/', '--')}"
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
    """The cache, with me/tiny: weights and configuration in main, others in the branch `old` and in a folder."""
    found = tmp_path / "cache"
    ours, folder = encoder(), written(encoder(), tmp_path, "timm")[0]
    files = {file.name: file for file in folder.iterdir()}
    lay_out(found, "me/tiny", {**files, "large/model.safetensors": folder / "model.safetensors"})
    smaller, _ = written(encoder(depth=1), tmp_path / "older", "timm")
    lay_out(found, "me/tiny", {file.name: file for file in smaller.iterdir()}, commit=OLDER, ref="old")
    lay_out(found, "me/words", {"README.md": folder / "README.md"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(found))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return found, ours, folder


@torch.no_grad()
def test_a_repository_is_the_checkpoint_that_its_file_is(cache):
    _, ours, folder = cache
    found = open_checkpoint("hf://me/tiny")
    assert found.name == "tiny"
    assert found.checksum == open_checkpoint(folder / "model.safetensors").checksum
    x = images()
    assert (loading.load_encoder(loading_options.LoadEncoder(path=found.path))(x) - ours(x)).abs().max() < LIMIT


@pytest.mark.parametrize("changes", [{}, {"positions": "relative"}, {"positions": "rotary", "registers": 2}])
@torch.no_grad()
def test_what_was_exported_as_it_is_comes_back(changes, cache, tmp_path):
    """Also an encoder that no other project has a model for."""
    ours = classifier(**changes)
    folder, _ = written(ours, tmp_path, "safetensors")
    lay_out(cache[0], "me/own", {file.name: file for file in folder.iterdir()})
    found = open_checkpoint("hf://me/own")
    assert found.encoder == json.loads((folder / "config.json").read_text())["encoder"]
    back, right = loading.load_encoder(loading_options.LoadEncoder(path=found.path)), ours.encoder.state_dict()
    assert back.state_dict().keys() == right.keys()
    assert all(torch.equal(value, right[name]) for name, value in back.state_dict().items())
    assert (back(images()) - ours.encoder(images())).abs().max() < LIMIT
    with pytest.raises(OptionError, match=r"heads=2: is told by the config.json"):
        open_checkpoint("hf://me/own", {"heads": 2})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 40}, "is not that of the encoder in its config.json"),
        ({"depth": 10**9}, "fewer tensors than its config.json says layers"),
        ({"depth": "many"}, "describes no encoder"),
        ({"call": "os.system"}, "describes no encoder"),
    ],
)
def test_a_configuration_that_does_not_fit_its_weights_is_refused(change, said, tmp_path):
    folder, _ = written(encoder(), tmp_path, "safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"encoder": config["encoder"] | change}))
    with pytest.raises(UserError, match=said):
        loading.load_encoder(loading_options.LoadEncoder(path=folder / "model.safetensors"))


@pytest.mark.parametrize(
    ("address", "file"),
    [
        ("hf://me/tiny", f"snapshots/{COMMIT}/model.safetensors"),
        ("hf://me/tiny@main", f"snapshots/{COMMIT}/model.safetensors"),
        ("hf://me/tiny@old", f"snapshots/{OLDER}/model.safetensors"),
        (f"hf://me/tiny@{OLDER}/model.safetensors", f"snapshots/{OLDER}/model.safetensors"),
        ("hf://me/tiny/large/model.safetensors", f"snapshots/{COMMIT}/large/model.safetensors"),
    ],
)
def test_an_address_names_a_revision_and_a_file(address, file, cache):
    assert hub.fetch(address) == cache[0] / "models--me--tiny" / file


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("hf://tiny", "must be hf://OWNER/NAME"),
        ("hf://me/tiny@", "must be hf://OWNER/NAME"),
        ("hf://me/tiny/other.npz", "has no such file; HF_HUB_OFFLINE is set, so the cache alone was searched"),
        ("hf://me/words", "has none of model.safetensors, pytorch_model.bin; name the file"),
        ("hf://me/none", "has none of"),
        ("hf://me/tiny@none", "has none of"),
    ],
)
def test_what_is_not_there_is_one_line(address, said, cache):
    with pytest.raises(OptionError) as error:
        hub.fetch(address)
    assert str(error.value).startswith(f"checkpoint={address}: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch):
    def nowhere(*given, **more):
        raise errors.LocalEntryNotFoundError("An error happened.\nCheck your connection.")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", nowhere)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(OptionError, match=r"is not in the cache, and the Hub does not answer$"):
        hub.fetch("hf://me/tiny")


def test_only_files_of_the_cache_have_a_repositorys_name(cache, tmp_path):
    assert hub.name(hub.fetch("hf://me/tiny/large/model.safetensors")) == "tiny"
    assert hub.name(tmp_path / "models" / "model.safetensors") == "model"


def test_the_tools_take_an_address_before_torch_is_loaded(tool, cache, no_torch):
    offline = {"HF_HUB_CACHE": str(cache[0]), "HF_HUB_OFFLINE": "1", "PYTHONPATH": no_torch}
    line = one_line(tool("pretrain", "checkpoint=hf://me/none", status=2, **offline))
    assert line.startswith("ssvit: checkpoint=hf://me/none: has none of model.safetensors")
    line = one_line(tool("pretrain", "checkpoint=hf://me/tiny", status=2, **offline))  # which it found
    assert "no config.yaml of a run beside it tells its images; give data=" in line


class Uploads:
    """What huggingface_hub's client was asked for."""

    def __init__(self, monkeypatch, error: Exception | None = None) -> None:
        self.calls, self.error = [], error
        monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", self.create_repo)
        monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", self.upload_folder)

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append((repo_id, private, exist_ok))
        if self.error:
            raise self.error
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.calls.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A fine-tuned run on CIFAR-10 with its measured accuracy."""
    monkeypatch.chdir(tmp_path)
    folder, ours = tmp_path / "outputs" / "cats", classifier()
    folder.mkdir(parents=True)
    storage.save(folder, 6, {"model": ours.state_dict()}, {**ours.facts, "stage": "finetune"})
    (folder / "metrics.jsonl").write_text('{"step": 6, "test/accuracy": 0.75, "test/loss": 0.5}\n')
    (folder / "config.yaml").write_text("choices: {data: cifar10, objective: classify}\nrecipe: {lr: 0.1}\n")
    return folder


def test_an_export_is_uploaded_with_its_card(run, monkeypatch, capsys):
    uploads = Uploads(monkeypatch)
    export.call(["checkpoint=outputs/cats", "format=timm", "push=me/cats", "license=apache-2.0"])
    files = ["README.md", "config.json", "model.safetensors"]
    assert uploads.calls == [("me/cats", True, True), ("me/cats", files)]
    assert capsys.readouterr().out.splitlines()[-1] == "uploaded to https://huggingface.co/me/cats"
    text = (run / "export" / "timm" / "README.md").read_text()
    assert 'timm.create_model("hf-hub:me/cats", pretrained=True)' in text


def test_a_refused_upload_is_one_line_and_the_export_stays(run, monkeypatch):
    Uploads(monkeypatch, OSError("403 Forbidden\nno rights"))
    with pytest.raises(Failure, match=r"^push=me/cats: 403 Forbidden$"):
        export.call(["checkpoint=outputs/cats", "format=timm", "push=me/cats", "private=false"])
    assert (run / "export" / "timm" / "model.safetensors").is_file()


def test_the_front_matter_is_what_the_hub_reads(run):
    export.call(["checkpoint=outputs/cats", "format=huggingface", "license=cc-by-4.0"])
    text = (run / "export" / "huggingface" / "README.md").read_text()
    data = huggingface_hub.ModelCard(text).data
    assert (data.license, data.library_name, data.pipeline_tag) == ("cc-by-4.0", "transformers", "image-classification")
    assert data.tags == ["ssvit", "vision", "vision-transformer", "classify"]
    assert (data.datasets, data.metrics) == (["uoft-cs/cifar10"], ["accuracy"])
    (result,) = data.eval_results
    assert result == huggingface_hub.EvalResult(
        task_type="image-classification",
        dataset_type="uoft-cs/cifar10",
        dataset_name="cifar10",
        dataset_split="test",
        metric_type="accuracy",
        metric_name="test/accuracy",
        metric_value=0.75,
    )
    assert data.model_name == "cats"


@pytest.mark.parametrize("format", ["timm", "safetensors", "onnx", "torch_export"])
def test_a_card_of_little_leaves_out_what_is_not_known(format, tmp_path):
    folder, _ = written(encoder(), tmp_path, format)
    data = huggingface_hub.ModelCard((folder / "README.md").read_text()).data
    libraries = {"timm": "timm", "safetensors": "ssvit", "onnx": "onnx", "torch_export": "pytorch"}
    assert (data.library_name, data.pipeline_tag) == (libraries[format], "image-feature-extraction")
    given = data.to_dict()
    assert {"license", "datasets", "metrics", "model-index"}.isdisjoint(given)
    json.dumps(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"push": "cats"}, "must be OWNER/NAME"),
        ({"push": 3}, "must be OWNER/NAME"),
        ({"license": "Apache 2.0"}, "must be an identifier of the Hub, as apache-2.0, or null"),
        ({"private": "yes"}, "must be true or false"),
    ],
)
def test_an_option_that_cannot_be_is_refused(given, said):
    with pytest.raises(OptionError, match=said):
        Export(format="timm", **given)


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(hub, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"^push=me/cats needs huggingface_hub: pip install ssvit\[hub\]$"):
        Export(format="timm", push="me/cats")
    with pytest.raises(UserError, match=r"^checkpoint=hf://me/cats needs huggingface_hub: pip install ssvit\[hub\]$"):
        hub.fetch("hf://me/cats")
