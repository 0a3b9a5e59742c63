"""Every configuration file composes, passes the checks, and builds; each experiment has its command on top."""

import re
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from composing import composed, untrained

from ssvit.config.command_line import CommandLine
from ssvit.config.declaration import completed
from ssvit.data.augment.options import ResizeCrop
from ssvit.data.sources.base import Data
from ssvit.errors import Failure, OptionError
from ssvit.evaluation.evaluators.options import Contrast
from ssvit.models.vit import ViT
from ssvit.studies import trials
from ssvit.training.session import build_objective
from ssvit.variants import VARIANTS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TEACHER = Path(__file__).parents[1] / "fixtures" / "outputs" / "masked_patch_shapes"
RENDERED = "shapes"  # the data set that needs no files


def names(group: str) -> list[str]:
    return CommandLine([]).names(group)


@pytest.fixture
def many_images(monkeypatch):
    """A folder counts as many images as a batch needs."""
    monkeypatch.setattr("ssvit.data.sources.folder.count", lambda root, at_most: at_most)


@pytest.fixture
def pretrained_run(tmp_path, monkeypatch):
    """A finished run of a small model, the newest in the folder outputs/."""
    monkeypatch.chdir(tmp_path)
    return untrained(tmp_path / "outputs" / "run")


def build(config) -> ViT:
    """Everything but the data, on the meta device: a ViT-H has its shapes and takes no memory. Returns the encoder."""
    with torch.device("meta"):
        own = {"classes": ["a", "b"]} if "classes" in config.objective else {}
        if config.config.options.objective.needs_image_count:
            own["images"] = 8
        objective = build_objective(config.config.options, **own)
        vit = objective.encoder
        outputs = vit.encode(torch.zeros(1, vit.patches, vit.width))
    assert outputs.shape == (1, vit.num_prefix_tokens + vit.patches, vit.width)
    for transform in ("data.augment", "data.view"):
        assert config.build(transform).options.size == vit.image_size
    for name, part in config.config.options.evaluators.items():
        augment = {"augment": None} if isinstance(part, Contrast) else {}
        config.build(f"evaluators.{name}", source=[], transform=None, **augment)
    return vit


@pytest.mark.parametrize("group", ["encoder", "target", "objective"])
def test_every_choice_builds(group):
    for name in names(group):
        if (group, name) == ("encoder", "timm"):
            continue  # goes with labels and with the name of a model: see tests/models/test_timm.py
        size = ["data.image_size=224"] if group == "encoder" and name not in ("mini", "small", "small_hybrid") else []
        size += [f"teacher={tiny.TEACHER}"] if name == "distill" else []
        size += ["encoder.width=64", "encoder.depth=1", "encoder.heads=2"] if name == "vit" else []
        config = composed(f"{group}={name}", *size)
        if name in ("contrastive_tuning", "diet_cp"):
            with pytest.raises(OptionError, match=r"^checkpoint=null: "):
                config.check()
        else:
            config.check()
        if name == "distill":  # the weights of its teacher cannot be loaded on the meta device
            continue
        encoder = build(config)
        if group == "encoder" and name != "vit":
            millions = sum(parameter.numel() for parameter in encoder.parameters()) / 1e6
            assert f" {millions:,.2f} million" in VARIANTS["encoder"][name].meaning


@pytest.mark.parametrize("name", names("augment"))
def test_every_augmentation_builds(name, images):
    objective = "dino" if name.startswith(("multi_crop", "two_crops")) else "masked_patch"
    options = ["data=folder", f"data.root={images}", "recipe.batch_size=8", f"objective={objective}"]
    options.append(f"augment@data.augment={name}")
    config = composed(*options)
    config.check()
    config.build("data.augment")
    with pytest.raises(Failure, match=r"^data\.augment\.flip=2: "):
        composed(*options, "data.augment.flip=2")


@pytest.mark.parametrize("data", names("data"))
def test_a_data_set_adds_nothing_to_the_augmentation_that_is_chosen(data):
    config = composed(f"data={data}", "augment@data.augment=shift_crop", incomplete=True)
    own = completed({"_part_": "augment/shift_crop"}, {})
    assert config.config.written["data"]["augment"] == own


@pytest.mark.parametrize("name", names("data"))
def test_every_data_set_composes_and_those_of_files_build(name, images):
    root = [] if name == RENDERED else [f"data.root={images}"]
    root += [f"data.table={images}/table.csv"] if name == "csv" else []
    root += ["data.task=cifar"] if name == "vtab" else []
    rectangle = composed(
        f"data={name}", *root, "data.image_size=[64,96]", "encoder.patch_size=16", "recipe.batch_size=8"
    )
    rectangle.check()
    build(rectangle)
    small = ["data.images=16", "data.held_out_images=8"] if name == RENDERED else []
    config = composed(f"data={name}", *root, *small, "encoder.patch_size=16", "recipe.batch_size=8")
    config.check()
    build(config)
    if name in (RENDERED, "csv", "folder", "imagenet", "shards", "vtab"):
        data = config.build("data")
        assert isinstance(data, Data)
        assert (len(data.train), len(data.validation_or_test)) == ((16, 8) if name == RENDERED else (8, 8))


@pytest.mark.usefixtures("many_images")
@pytest.mark.parametrize("name", names("experiment"))
def test_every_experiment_composes_and_has_its_command_on_top(name, images, pretrained_run, monkeypatch):
    head = [line for line in (CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
    command = rf"(?:tools/|ssvit )(\w+)(?:\.py)? experiment={name}\b(.*)$"
    (tool, rest), *others = re.findall(command, "\n".join(head), re.MULTILINE)
    assert not others
    rest = rest.replace("teacher=PATH", f"teacher={pretrained_run}").replace("PATH", str(images))
    config = composed(f"experiment={name}", *rest.split(), tool=tool)
    recipe = config.check()
    assert recipe.evaluate_every % recipe.save_every == 0  # best/ needs no checkpoints besides the usual ones
    if tool == "pretrain" and "teacher=" not in rest:  # weights cannot be loaded on the meta device
        monkeypatch.setattr("torch.distributions.Distribution._validate_args", False)  # MixUp's reads a tensor
        build(config)


def is_the_authors_way(config) -> None:
    """Apply the authors' input pipeline for training images, the same for all models: vit_jax: input_pipeline.py."""
    assert (config.data.mean, config.data.std) == (0.5, 0.5)
    assert config.data.augment._part_ == "augment/inception_crop"
    assert (list(config.data.augment.scale), config.data.augment.flip) == ([0.05, 1.0], 0.5)


@pytest.mark.usefixtures("many_images")
def test_the_papers_run_has_the_papers_numbers(images):
    config = composed("experiment=paper_jft", f"data.root={images}")
    recipe = config.check()
    assert (recipe.steps, recipe.batch_size, recipe.lr, recipe.warmup) == (1_000_000, 4096, 2e-4, 10_000)
    assert (config.encoder.width, config.encoder.depth, config.encoder.patch_size) == (768, 12, 16)
    masking = config.objective.masking
    assert (masking.corrupted, masking.mask, masking.replace, masking.unchanged) == (0.5, 0.8, 0.1, 0.1)
    shorter = composed("experiment=paper_imagenet_100k", f"data.root={images}")
    assert shorter.recipe.steps == 100_000
    for one in (config, shorter):
        is_the_authors_way(one)
        assert (one.encoder.mean, one.encoder.std) == (0.5, 0.5)
        assert (one.encoder.dropout, one.encoder.attention_dropout) == (0, 0)


@pytest.mark.usefixtures("many_images")
def test_dino_brings_its_views_and_imagenet_has_the_authors_numbers(images):
    small = composed("objective=dino").data.augment
    assert (small._part_, small.local_size) == ("augment/multi_crop", 16)
    assert composed("objective=dino", "augment@data.augment=shift_crop").data.augment.padding == 4
    config = composed("experiment=dino_imagenet", f"data.root={images}")
    recipe = config.check()
    augment, objective = config.data.augment, config["objective"]
    assert (augment.size, list(augment.scale), augment.local_size, augment.local_views) == (224, [0.4, 1.0], 96, 8)
    assert (list(augment.local_scale), list(augment.blur)) == ([0.05, 0.4], [1.0, 0.1, 0.5])
    assert (objective["prototypes"], objective["hidden"], objective["bottleneck"]) == (65536, 2048, 256)
    assert objective["teacher_momentum"] == {"start": 0.996, "end": 1.0, "shape": "cosine", "over": 1.0}
    assert objective["teacher_temperature"] == {"start": 0.04, "end": 0.04, "shape": "linear", "over": 0.3}
    assert objective["last_layer"] == {"start": 0.0, "end": 1.0, "shape": "step", "over": 0.01}
    assert (recipe.weight_decay, recipe.weight_decay_end, recipe.clip) == (0.04, 0.4, 3.0)
    assert recipe.lr == pytest.approx(5e-4 * recipe.batch_size / 256)
    assert abs(recipe.steps - 100 * 1_281_167 / 1024) < 100
    assert (config.encoder.width, config.encoder.patch_size, config.encoder.stochastic_depth) == (384, 16, 0.1)


@pytest.mark.usefixtures("many_images")
@pytest.mark.parametrize(
    ("name", "encoder", "epochs", "images_", "lr", "decay", "weight_decay", "dropout", "clip"),
    [
        ("jft_b", (768, 16), 7, 303e6, 8e-4, "linear", 0.1, 0, 0),
        ("jft_l32", (1024, 32), 7, 303e6, 6e-4, "linear", 0.1, 0, 0),
        ("jft_l16", (1024, 16), 14, 303e6, 4e-4, "linear", 0.1, 0, 0),
        ("jft_h14", (1280, 14), 14, 303e6, 3e-4, "linear", 0.1, 0, 0),
        ("jft_r50_b16", (768, 16), 7, 303e6, 8e-4, "linear", 0.1, 0, 0),
        ("jft_r50_l32", (1024, 32), 7, 303e6, 2e-4, "linear", 0.1, 0, 0),
        ("jft_r50_l16", (1024, 16), 14, 303e6, 4e-4, "linear", 0.1, 0, 0),
        ("imagenet21k_b", (768, 16), 90, 14_197_122, 1e-3, "linear", 0.03, 0.1, 0),
        ("imagenet21k_l", (1024, 16), 90, 14_197_122, 1e-3, "linear", 0.03, 0.1, 0),
        ("imagenet", (768, 16), 300, 1_281_167, 3e-3, "cosine", 0.3, 0.1, 1),
    ],
)  # fmt: skip
def test_table_3(images, name, encoder, epochs, images_, lr, decay, weight_decay, dropout, clip):
    config = composed(f"experiment=table3_{name}", f"data.root={images}")
    recipe = config.check()
    assert (config.encoder.width, config.encoder.patch_size) == encoder
    layers = {16: [3, 4, 9], 32: [3, 4, 6, 3]}[encoder[1]] if "r50" in name else None
    assert config.encoder["stem"] == (layers and {"layers": layers, "width": 64, "epsilons": "authors"})
    assert abs(recipe.steps - epochs * images_ / 4096) < 1
    assert (recipe.batch_size, recipe.warmup, tuple(recipe.betas)) == (4096, 10_000, (0.9, 0.999))
    assert (recipe.lr, recipe.decay, recipe.weight_decay, recipe.clip) == (lr, decay, weight_decay, clip)
    assert recipe.learning_rate(recipe.steps) == pytest.approx(0)
    is_the_authors_way(config)
    assert (config.encoder.mean, config.encoder.std, config.encoder.attention_dropout) == (0.5, 0.5, 0)
    assert config.objective.loss == "softmax"
    assert (config.encoder.dropout, config.objective.hidden) == (dropout, "width")
    assert config.encoder.pooling == "class_token"


@pytest.mark.usefixtures("many_images")
@pytest.mark.parametrize(
    ("name", "steps", "rates", "development"),
    [
        ("imagenet", 20_000, [0.003, 0.01, 0.03, 0.06], 0.01),
        ("cifar100", 10_000, [0.001, 0.003, 0.01, 0.03], 0.02),
        ("cifar10", 10_000, [0.001, 0.003, 0.01, 0.03], 0.02),
        ("pets", 500, [0.001, 0.003, 0.01, 0.03], 0.1),
        ("flowers", 500, [0.001, 0.003, 0.01, 0.03], 0.1),
        ("vtab", 2500, [0.01], 0.2),
    ],
)
def test_table_4(images, pretrained_run, name, steps, rates, development):
    task = ["data=flowers102"] if name == "vtab" else []
    config = composed(f"experiment=table4_{name}", f"data.root={images}", *task, tool="finetune")
    recipe = config.check()
    assert (recipe.steps, recipe.batch_size, recipe.optimizer, recipe.momentum) == (steps, 512, "sgd", 0.9)
    assert (recipe.decay, recipe.weight_decay, recipe.clip, recipe.layer_decay) == ("cosine", 0, 1, 1)
    assert config.table4 == {"learning_rates": rates, "development": development}
    assert config.data.image_size == 384
    assert config["encoder"]["image_size"] == 384
    assert config["data"]["view"] == {
        "_part_": "view/center_crop", "size": 384, "resize": None, "fit": "squash"
    }  # fmt: skip
    assert (config.encoder.dropout, config.encoder.attention_dropout) == (0, 0)
    if name == "vtab":
        crop = ResizeCrop(**({k: v for k, v in config["data"]["augment"].items() if k != "_part_"}))
        assert crop == ResizeCrop(size=384, resize=448, flip=0.5, sigma=[0.1, 2.0], erased_area=[0.02, 0.3333])
        assert (config.data.mean, config.data.std) == (0.5, 0.5)
    else:
        is_the_authors_way(config)


@pytest.mark.usefixtures("many_images")
def test_dropout_of_the_larger_models_and_big_visions_evaluation_can_be_said(images, pretrained_run):
    ways = ["encoder.dropout=0.1", "data.view.fit=cover", "data.view.resize=448"]
    for name in ("cifar10", "imagenet", "pets"):
        config = composed(f"experiment=table4_{name}", f"data.root={images}", *ways, tool="finetune")
        config.check()
        view = config.build("data.view").options
        assert (view.size, view.resize, view.fit, config.encoder.dropout) == ((384, 384), 448, "cover", 0.1)


def test_every_file_opens_with_a_comment_that_says_what_it_is():
    for path in CONFIGS.rglob("*.yaml"):
        text = path.read_text()
        assert text.startswith("# "), path
        yaml.safe_load(text)


@pytest.mark.parametrize("name", names("comparison"))
def test_every_stage_of_a_method_composes(name):
    stages = trials.stages(name, CommandLine([]))
    assert sum(stage.share for stage in stages) == pytest.approx(1)
    for stage in stages:
        if not any("{before}" in option for option in stage.options):
            options = [option.replace("{teacher}", str(TEACHER)) for option in stage.options]
            config = composed("encoder=small", *options, "recipe.steps=200", "recipe.warmup=10")
            config.check()
            if options == [*stage.options]:  # a teacher's weights are not loaded on the meta device
                build(config)


def test_a_run_that_is_older_than_an_option_of_its_data_set_has_the_default(tmp_path):
    checkpoint = untrained(tmp_path / "run", "data=shapes")
    file = tmp_path / "run" / "config.yaml"
    stored = yaml.safe_load(file.read_text())
    del stored["data"]["textures"]
    file.write_text(yaml.safe_dump(stored))
    for options, expected in (((), False), (("data.textures=true",), True)):
        config = composed(f"checkpoint={checkpoint}", *options, tool="finetune")
        assert config.config.options.data.textures is expected


def test_compositions_of_the_same_files_are_independent_and_files_of_the_user_may_change(tmp_path):
    usual = composed("data=shapes")
    assert composed("data=shapes", "recipe.lr=0.5", "data.images=640").recipe.lr == 0.5
    assert composed("data=shapes") == usual
    (tmp_path / "encoder").mkdir()
    for width in (16, 32):
        (tmp_path / "encoder" / "mine.yaml").write_text(f"defaults: [small, _self_]\nwidth: {width}\n")
        config = composed("--config-dir", str(tmp_path), "encoder=mine", "encoder.heads=2")
        assert config.encoder.width == width
