"""Every configuration file composes, passes the checks, and builds; each experiment has its command on top."""

from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image

from ssvit.data.sources import Data
from ssvit.training import preflight

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def composed(*overrides: str):
    # Names of runs refer to Hydra's own node, which only a started tool has.
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("pretrain", [*overrides, "name=test"])


@pytest.fixture
def images(tmp_path):
    """A small set in ImageNet's layout, which every data set of files accepts."""
    for part in ("train", "val"):
        for wnid in ("n01", "n02"):
            (tmp_path / part / wnid).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (30, 20), (number, 0, 0)).save(tmp_path / part / wnid / f"{number}.png")
    return tmp_path


def build(config) -> None:
    """Everything but the data, on the meta device: a ViT-H has its shapes and takes no memory."""
    with torch.device("meta"):
        objective = instantiate(config.objective, _convert_="all")
        outputs = objective.encoder.encode(torch.zeros(1, objective.encoder.patches, objective.encoder.width))
    assert outputs.shape == (1, objective.encoder.special + objective.encoder.patches, objective.encoder.width)
    for transform in (config.data.augment, config.data.view):
        assert instantiate(transform, _convert_="all").size == objective.encoder.image_size
    for evaluator in config.evaluators.values():
        instantiate(evaluator, source=[], transform=None)


@pytest.mark.parametrize("group", ["encoder", "target", "objective"])
def test_every_choice_builds(group):
    for name in names(group):
        size = ["data.image_size=224"] if group == "encoder" and name != "small" else []
        config = composed(f"{group}={name}", *size)
        preflight.check(OmegaConf.to_container(config, resolve=True))
        build(config)


@pytest.mark.parametrize("name", names("data"))
def test_every_data_set_composes_and_those_of_files_build(name, images):
    root = [] if name == "synthetic" else [f"data.root={images}"]
    rectangle = composed(f"data={name}", *root, "data.image_size=[64,96]", "encoder.patch_size=16")
    preflight.check(OmegaConf.to_container(rectangle, resolve=True) | {"recipe": {"batch_size": 8}})
    build(rectangle)
    small = ["data.images=16", "data.held_out_images=8"] if name == "synthetic" else []
    config = composed(f"data={name}", *root, *small, "encoder.patch_size=16", "recipe.batch_size=8")
    preflight.check(OmegaConf.to_container(config, resolve=True))
    build(config)
    if name in ("synthetic", "folder", "imagenet"):
        data = instantiate(config.data.source, _convert_="all")
        assert isinstance(data, Data)
        assert (len(data.train), len(data.held_out)) == ((16, 8) if name == "synthetic" else (8, 8))


@pytest.mark.parametrize("name", names("experiment"))
def test_every_experiment_composes_and_has_its_command_on_top(name, images, monkeypatch):
    monkeypatch.setattr("ssvit.data.folder.count", lambda root, at_most: at_most)
    config = composed(f"experiment={name}", f"data.root={images}")
    preflight.check(OmegaConf.to_container(config, resolve=True))
    build(config)
    head = [line for line in (CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
    assert any(f"tools/pretrain.py experiment={name} " in line for line in head)


def test_the_papers_run_has_the_papers_numbers(images, monkeypatch):
    monkeypatch.setattr("ssvit.data.folder.count", lambda root, at_most: at_most)
    config = composed("experiment=paper_jft", f"data.root={images}")
    recipe = preflight.check(OmegaConf.to_container(config, resolve=True))
    assert (recipe.steps, recipe.batch_size, recipe.lr, recipe.warmup) == (1_000_000, 4096, 2e-4, 10_000)
    assert (config.encoder.width, config.encoder.depth, config.encoder.patch_size) == (768, 12, 16)
    masking = config.objective.masking
    assert (masking.corrupted, masking.mask, masking.replace, masking.keep) == (0.5, 0.8, 0.1, 0.1)
    assert composed("experiment=paper_imagenet_100k", f"data.root={images}").recipe.steps == 100_000


def test_every_file_opens_with_a_comment_that_says_what_it_is():
    for path in CONFIGS.rglob("*.yaml"):
        text = path.read_text()
        assert text.startswith("# "), path
        yaml.safe_load(text)
