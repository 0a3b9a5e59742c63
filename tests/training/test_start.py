"""Pre-training from existing weights: ssvit pretrain checkpoint=PATH, and its errors of one line."""

import json
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from command import TINY, error_of, one_line, tiny_options
from composing import composed
from images import picture, put, put_set
from peers import HEADS, of_timm, timm_plain
from runs import final, kill_after, states
from safetensors.torch import save_file

from ssvit.checkpoints import manifest
from ssvit.cli import find_command
from ssvit.cli.finetune import with_schedule
from ssvit.loading.finding import open_checkpoint

RUN = "masked_patch_shapes"
IMAGES = TINY[:4]
SHORT = tiny_options("data", "encoder", "target")
ONE_STEP = ("recipe.steps=1", "recipe.warmup=0", "probes=[]")
UNMOVED = (*ONE_STEP, "recipe.lr=1e-30", "recipe.weight_decay=0")


def encoder_of(run: Path, prefix: str = "encoder.") -> dict[str, torch.Tensor]:
    """The weights of a run's encoder by name."""
    weights = states(run)["model"]
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def assert_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def choices_of(run: Path) -> dict[str, str]:
    return yaml.safe_load((run / "config.yaml").read_text())["choices"]


def test_it_starts_from_the_weights_of_a_run_and_on_its_images(outputs, tool):
    start = outputs / RUN
    done = tool("pretrain", *SHORT, *UNMOVED, f"checkpoint={start}", "objective=mae")
    assert str(start / "step_00000006") in done.stdout.splitlines()[0]
    assert "64 images" in done.stdout
    run = outputs / f"mae_from_{RUN}"
    assert_same(encoder_of(run), encoder_of(start))
    metadata = manifest.read_manifest(run / "step_00000001")
    assert metadata["start"] == manifest.read_manifest(start / "step_00000006")["seal"]
    assert metadata["encoder"]["pooling"] == "patch_mean"  # as MAE's file sets it
    choices = choices_of(run)
    assert (choices["data"], choices["augment@data.augment"]) == ("shapes", "inception_crop_small")


def test_a_teacher_starts_from_the_same_weights_and_views_are_the_objectives(outputs, tool):
    tool("pretrain", *SHORT, *UNMOVED, f"checkpoint={outputs / RUN}", "objective=dino", "name=distilled")
    run = outputs / "distilled"
    assert_same(encoder_of(run), encoder_of(outputs / RUN))
    assert_same(encoder_of(run, "teacher.module.encoder."), encoder_of(run))
    assert choices_of(run)["augment@data.augment"] == "multi_crop_small"


def test_a_foreign_file_at_another_image_size(tool, tmp_path):
    peer = timm_plain(tmp_path)
    metadata = {"heads": HEADS, "trained_size": list(peer.size)}
    patch = open_checkpoint(peer.path, metadata).encoder["patch_size"]
    size = [4 * side for side in patch]
    options = {f"encoder.{name}": value for name, value in metadata.items()} | {"data.image_size": size}
    typed = [f"{name}={value}".replace(" ", "") for name, value in options.items()]
    done = tool("pretrain", *IMAGES[:2], *SHORT, *UNMOVED, f"checkpoint={peer.path}", *typed, "data=shapes")
    assert "positions resized from" in done.stdout
    loaded = tiny.loaded(peer.path, **metadata, image_size=size)
    run = tmp_path / "outputs" / f"masked_patch_shapes_from_{peer.path.stem}"
    assert_same(encoder_of(run), loaded.state_dict())


@pytest.mark.parametrize(
    ("command", "side", "size"),
    [("pretrain", 20, 56), ("finetune", 75, 72)],
)
def test_the_image_size_of_foreign_weights_is_that_of_the_images_within_limits(tmp_path, command, side, size):
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(of_timm(img_size=96).state_dict(), folder / "model.safetensors")
    for number in range(6):
        put(tmp_path / "photos" / "ab"[number % 2] / f"{number}.png", picture(number, size=(side, side + number)))
    options = [
        f"checkpoint={folder}",
        f"encoder.heads={HEADS}",
        f"data={tmp_path}/photos",
        f"outputs={tmp_path}/outputs",
    ]
    for typed, expected in (([], size), (["data.image_size=64"], 64)):
        config = find_command(command).compose(find_command(command).line([*options, *typed]))
        assert config.values["data"]["image_size"] == config.values["encoder"]["image_size"] == expected


def test_foreign_weights_have_a_lower_learning_rate_than_random_ones(tmp_path):
    save_file(of_timm(img_size=32).state_dict(), tmp_path / "model.safetensors")
    options = [f"checkpoint={tmp_path}/model.safetensors", f"encoder.heads={HEADS}", "data=shapes"]
    tool = find_command("finetune")
    chosen = with_schedule(tool.compose(tool.line([*options, "compare=scratch"]))).options
    assert chosen.recipe.lr < chosen.scratch_recipe["lr"]
    typed = with_schedule(tool.compose(tool.line([*options, "recipe.lr=0.01"]))).options
    assert (typed.recipe.lr, typed.scratch_recipe) == (0.01, {})


SAFE, LOW = ("adamw", 3e-3, 1), ("adamw", 1e-4, "all")


@pytest.mark.parametrize(
    ("typed", "of_foreign", "of_run"),
    [
        ([], SAFE, SAFE), (["objective=simclr"], SAFE, SAFE), (["objective=mae"], SAFE, SAFE),
        (["objective=latent"], LOW, LOW), (["recipe.lr=0.01"], ("adamw", 0.01, "all"), None),
        (["continuation=safe", "recipe.lr=0.01"], ("adamw", 0.01, 1), ("adamw", 0.01, 1)),
        (["objective=diet_cp"], ("adamw", 1e-4, 2), ("adamw", 1e-4, 2)), (["recipe.optimizer=muon"], None, None),
        (["continuation=full"], None, None), (["objective=contrastive_tuning"], None, None),
    ],
)  # fmt: skip
def test_existing_weights_are_continued_safely_or_by_adamw_with_a_small_rate(
    tmp_path, outputs, typed, of_foreign, of_run
):
    """Without options that determine it; None: as from random weights."""
    save_file(of_timm(img_size=32).state_dict(), tmp_path / "model.safetensors")
    options = [*typed, "data=shapes", "data.image_size=16"]
    for start, expected in (
        ([f"checkpoint={tmp_path}/model.safetensors", f"encoder.heads={HEADS}"], of_foreign),
        ([f"checkpoint={outputs / RUN}"], of_run),
    ):
        options_of = composed(*start, *options).config.options
        found = options_of.recipe.optimizer, options_of.recipe.lr
        if expected is None:
            assert found not in (SAFE[:2], LOW[:2])
            continue
        trained = getattr(options_of.continuation, "trained", "all")
        assert (*found, trained) == expected
        if expected == SAFE:
            assert (options_of.recipe.steps, options_of.recipe.batch_size) == (200, 64)


def test_the_plan_of_own_images_leaves_the_continuation_of_weights(tmp_path, outputs):
    save_file(of_timm(img_size=32).state_dict(), tmp_path / "model.safetensors")
    for number in range(40):
        put(tmp_path / "photos" / f"{number}.png", picture(number, size=(32, 32)))
    for start in (
        [f"checkpoint={tmp_path}/model.safetensors", f"encoder.heads={HEADS}"],
        [f"checkpoint={outputs / RUN}"],
    ):
        options = composed(f"data={tmp_path}/photos", "recipe.steps=40", *start).config.options
        assert (options.recipe.optimizer, options.recipe.lr, options.recipe.steps) == ("adamw", 3e-3, 40)
        assert options.continuation.trained == 1
        assert options.recipe.batch_size == 10  # a quarter of the images


def test_a_folder_of_hugging_face_is_the_checkpoint_in_it(tmp_path):
    weights = of_timm().state_dict()
    options = {"heads": HEADS, "trained_size": [32, 56]}
    for name in ("pytorch_model.bin", "model.safetensors"):
        (save_file if name.endswith("s") else torch.save)(weights, tmp_path / name)
        assert open_checkpoint(tmp_path, options).path == tmp_path / name
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert "other.safetensors" in str(error_of(open_checkpoint, tmp_path, options))


def test_a_continuation_is_compared_with_its_start_and_merged(outputs, tool, tmp_path, capsys):
    for number in range(60):
        put(
            tmp_path / "others" / ("train", "test")[number % 2] / "ab"[number % 3 == 0] / f"{number}.png",
            picture(number),
        )
    images = ("probes=[knn]", "probing.train_images=32", "probing.test_images=16", f"forgetting={tmp_path / 'others'}")
    tool("pretrain", *SHORT, f"checkpoint={outputs / RUN}", "objective=mae", "continuation=safe", *images)
    name = f"mae_from_{RUN}"
    for folder in ("evaluation", "forgetting"):
        report = json.loads((outputs / name / folder / "report.json").read_text())
        assert {standing["encoder"] for standing in report["standings"]} == {name, RUN}
        assert (report["metadata"]["train_images"], report["metadata"]["test_images"]) in ((32, 16), (30, 16))
    weights = states(outputs / name)["model"]
    packed = "objective.encoder.blocks.0.attention.qkv.parametrizations.weight"
    assert weights[f"{packed}.0.a"].shape == (2, 64, 16)
    loaded = tiny.loaded(outputs / name)
    assert not any("parametrizations" in weight for weight in loaded.state_dict())
    start = tiny.loaded(outputs / RUN)
    assert loaded.blocks[0].expand.weight.equal(start.blocks[0].expand.weight)
    query, key, value = (loaded.blocks[0].attention.qkv.weight - start.blocks[0].attention.qkv.weight).chunk(3)
    assert query.any()
    assert value.any()
    assert not key.any()
    assert not loaded.blocks[1].expand.weight.equal(start.blocks[1].expand.weight)
    find_command("export").call([f"checkpoint={outputs / name}", "format=safetensors", f"output={tmp_path / 'out'}"])
    images = tiny.pictures(3)
    with torch.no_grad():
        assert tiny.loaded(tmp_path / "out")(images).equal(loaded(images))


def test_existing_weights_are_compared_with_the_newest_runs_on_the_same_images(tmp_path):
    put_set(tmp_path / "images", 60, parts=("train", "test"))
    peer = timm_plain(tmp_path)
    images = ("data=folder", f"data.root={tmp_path / 'images'}", f"outputs={tmp_path}")
    start = (f"checkpoint={peer.path}", f"encoder.heads={HEADS}", f"encoder.trained_size={list(peer.size)}")
    size = [
        4 * side
        for side in open_checkpoint(peer.path, {"heads": HEADS, "trained_size": peer.size}).encoder["patch_size"]
    ]
    run = (*SHORT, *images, "objective=mae", *ONE_STEP, "logger=[]")
    tiny_encoder = ("encoder.width=16", "encoder.depth=2", "encoder.heads=2", "data.image_size=16")
    for name, options in (
        ("old", tiny_encoder),
        ("own", tiny_encoder),
        ("continued", (*start, f"data.image_size={size}")),
    ):
        find_command("pretrain").call([*run, *options, f"name={name}"])
    evaluated = [*images, *start, f"data.image_size={size}", "probes=[knn]", "baselines=false", "cache=null",
                 "figures=none"]  # fmt: skip
    for more, expected in (([], {"own", "continued"}), (["against=[]"], set())):
        folder = find_command("evaluate").call([*evaluated, *more, f"output={tmp_path / 'report'}", "probes.knn.k=5"])
        report = json.loads((folder / "report.json").read_text())
        assert set(report["metadata"]["against"]) == expected


@pytest.mark.parametrize(
    "changes",
    [
        ("objective=dino", "encoder.dropout=0.1"),
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                ("objective=mae", "continuation=safe", "continuation.anchor={kind: gram}"),
                ("objective=diet_cp", "continuation.heads_only=0.5"),
            )
        ),
    ],
)
def test_killed_it_ends_with_the_same_bits_and_keeps_to_its_checkpoint(outputs, tool, tmp_path, changes):
    changes = (*changes, "recipe.accumulate=2", "probes=[]")
    options = (*SHORT, f"checkpoint={outputs / RUN}", *changes)
    tool("pretrain", *options, "name=whole")
    kill_after(tmp_path, "step 3/6", *options, "name=killed")
    assert "continues after step" in tool("pretrain", *options, "name=killed").stdout
    assert final(outputs / "killed") == final(outputs / "whole")
    # Other weights under the same command are another run.
    step = outputs / RUN / "step_00000004"
    line = tool("pretrain", *SHORT, f"checkpoint={step}", *changes, "name=whole", status=1).stderr
    assert line.startswith("ssvit: start: ")


def test_a_file_that_contradicts_its_options_is_one_line_before_torch_loads(tool, no_torch, tmp_path):
    file = timm_plain(tmp_path).path
    options = (f"checkpoint={file}", f"encoder.heads={HEADS}", "encoder.trained_size=[32,56]", "recipe.batch_size=8")
    assert one_line(tool("pretrain", *options, status=2, PYTHONPATH=no_torch)).startswith(f"ssvit: {file}: ")
