"""Pre-training that starts from weights that exist: ssvit pretrain checkpoint=PATH, and its mistakes in one line."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from command import TINY, one_line, start
from peers import HEADS, timm_plain

from ssvit.checkpoints import manifest, storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.loading import encoder as loading
from ssvit.loading import encoder_options as loading_options
from ssvit.loading.finding import open_checkpoint

RUN = "masked_patch_synthetic"
STORED = Path(__file__).parents[1] / "fixtures" / "outputs" / RUN
IMAGES = TINY[:4]
SHORT = TINY[TINY.index("recipe.batch_size=8") :]
UNMOVED = ("recipe.steps=1", "recipe.warmup=0", "recipe.lr=1e-30", "recipe.weight_decay=0")


def state(path: Path) -> dict[str, torch.Tensor]:
    return storage.load(Checkpoint.open(path))["model"]


def encoder_of(weights: dict[str, torch.Tensor], prefix: str = "encoder.") -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_it_starts_from_the_weights_of_a_run_and_on_its_images(outputs, tool):
    done = tool("pretrain", *SHORT, *UNMOVED, f"checkpoint={outputs / RUN}", "objective=mae")
    first, second, *_ = done.stdout.splitlines()
    assert first == f"mae_from_{RUN}: starts from {outputs / RUN / 'step_00000006'}"
    assert "tensors of the encoder; not loaded: head, mask_token" in second
    assert "64 images" in done.stdout
    run = outputs / f"mae_from_{RUN}"
    before, after = encoder_of(state(outputs / RUN)), encoder_of(state(run))
    assert_same(before, after)
    found = manifest.read(run / "step_00000001")
    assert found["start"] == manifest.read(outputs / RUN / "step_00000006")["seal"]
    assert found["encoder"]["pooling"] == "patch_mean"  # as MAE's file says
    choices = yaml.safe_load((run / "config.yaml").read_text())["choices"]
    assert (choices["data"], choices["augment@data.augment"]) == ("synthetic", "inception_crop_small")


def test_a_teacher_starts_from_the_same_weights_and_views_are_the_objectives(outputs, tool):
    tool("pretrain", *SHORT, *UNMOVED, f"checkpoint={outputs / RUN}", "objective=dino", "name=distilled")
    weights = state(outputs / "distilled")
    assert_same(encoder_of(state(outputs / RUN)), encoder_of(weights))
    assert_same(encoder_of(weights, "teacher.module.encoder."), encoder_of(weights))
    choices = yaml.safe_load((outputs / "distilled" / "config.yaml").read_text())["choices"]
    assert choices["augment@data.augment"] == "multi_crop_small"


def test_a_foreign_file_at_another_image_size(tool, tmp_path):
    peer = timm_plain(tmp_path)
    told = (f"encoder.heads={HEADS}", f"encoder.trained_size={list(peer.size)}".replace(" ", ""))
    patch = open_checkpoint(peer.path, {"heads": HEADS, "trained_size": list(peer.size)}).encoder["patch_size"]
    size = [4 * side for side in patch]
    images = (*IMAGES[:2], f"data.image_size={size}".replace(" ", ""))
    done = tool("pretrain", *images, *SHORT, *UNMOVED, f"checkpoint={peer.path}", *told, "data=synthetic", "probe=[]")
    assert "timm's layout" in done.stdout
    assert "positions resized from" in done.stdout
    run = tmp_path / "outputs" / f"masked_patch_synthetic_from_{peer.path.stem}"
    given = {"heads": HEADS, "trained_size": list(peer.size), "image_size": size}
    assert_same(
        loading.load_encoder(loading_options.LoadEncoder(path=peer.path, **given)).state_dict(), encoder_of(state(run))
    )


def test_killed_it_ends_with_the_same_bits_and_keeps_to_its_checkpoint(outputs, tool, tmp_path):
    options = (*SHORT, f"checkpoint={outputs / RUN}", "objective=dino", "encoder.dropout=0.1", "recipe.accumulate=2",
               "probe=[]")  # fmt: skip
    tool("pretrain", *options, "name=whole")
    process = start(tmp_path, "pretrain", *options, "name=killed")
    for line in process.stdout:
        if line.startswith("step 3/6"):
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    shutil.copytree(outputs / "killed", outputs / "other")
    assert "goes on after step" in tool("pretrain", *options, "name=killed").stdout
    found, whole = (manifest.read(outputs / name / "step_00000006")["sha256"] for name in ("killed", "whole"))
    assert found == whole
    # Other weights under the same command are another run.
    step = outputs / RUN / "step_00000004"
    changed = (*options[: len(SHORT)], f"checkpoint={step}", *options[len(SHORT) + 1 :])
    shutil.rmtree(outputs / "killed")
    (outputs / "other").rename(outputs / "killed")
    line = tool("pretrain", *changed, "name=killed", status=1).stderr
    assert "start: is not what the run in" in line


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["checkpoint=/no/where"], "checkpoint=/no/where: no such folder"),
        (["checkpoint=newest"], "checkpoint=newest: "),
        (["checkpoint={run}", "encoder=ti"], "encoder=ti: "),
        (["checkpoint={run}", "encoder.width=64"], "encoder.width=64: "),
        (["checkpoint={run}", "encoder.stem.width=64"], "encoder.stem.width=64: "),
        (["checkpoint={run}", "encoder.heads=4"], "encoder.heads=4: "),
        (["checkpoint={run}", "data.image_size=18"], "encoder.patch_size=4: must divide the image's height of 18"),
        (["checkpoint={run}", "objective=mae", "data.image_size=4"], "objective.masked=0.75: needs images of at least"),
        (["checkpoint={file}"], "{file}: "),
    ],
)
def test_a_mistake_is_told_in_one_line_before_torch_loads(outputs, tool, no_torch, tmp_path, options, told):
    names = {"run": outputs / RUN, "file": timm_plain(tmp_path).path if "{file}" in told else ""}
    given = [option.format(**names) for option in options]
    if names["file"]:
        given += [f"encoder.heads={HEADS}", "encoder.trained_size=[32,56]"]
    line = one_line(tool("pretrain", "recipe.batch_size=8", *given, status=2, PYTHONPATH=no_torch))
    assert line.startswith(f"ssvit: {told.format(**names)}")


def test_distillation_without_a_distillation_token_is_an_error(tool, no_torch, tmp_path):
    options = ("recipe.batch_size=8", "objective=supervised", "distillation=deit", f"teacher={STORED}")
    line = one_line(tool("pretrain", f"checkpoint={STORED}", *options, status=2, PYTHONPATH=no_torch))
    assert line.startswith(f"ssvit: checkpoint={STORED}: ")
    assert "distillation token" in line
    assert not (tmp_path / "outputs").exists()
