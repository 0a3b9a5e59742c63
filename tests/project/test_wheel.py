"""The wheel: what it holds, and that it works where there is no checkout."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from command import LIMIT, TINY, tiny_options

ROOT = Path(__file__).resolve().parents[2]


def call(*command: object, folder: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=clean, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, folder=folder)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The programs of a fresh environment with the wheel, and for the libraries that it needs those installed here."""
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", folder, folder=folder)
    python = folder / "bin" / "python"
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, folder=folder)
    site = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip()
    # A path in a .pth file is searched, but no .pth file there is read: the checkout stays unknown.
    Path(site, "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.mark.slow
def test_it_holds_the_package_and_its_configurations_alone(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.check_output(["git", "ls-files", "ssvit", "configs"], cwd=ROOT, text=True).split()
    expected = {name if name.startswith("ssvit/") else f"ssvit/{name}" for name in tracked}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert wheel.stat().st_size < 1 << 20


@pytest.mark.slow
def test_it_pretrains_finetunes_evaluates_and_predicts_from_an_empty_folder(installed, tmp_path):
    ssvit = installed / "ssvit"
    where = call(installed / "python", "-c", "import ssvit; print(ssvit.__file__)", folder=tmp_path)
    assert str(ROOT) not in where
    small = ["recipe.steps=4", "recipe.warmup=1", "recipe.batch_size=8", "recipe.save_every=4"]
    call(ssvit, "pretrain", *TINY, "figures=end", folder=tmp_path)  # a picture to predict
    call(ssvit, "finetune", *small, "recipe.evaluate_every=4", "recipe.precision=32-true", folder=tmp_path)
    assert "report.html" in call(ssvit, "evaluate", "probes=[knn]", folder=tmp_path)
    call(ssvit, "knn", "k=[1,5]", folder=tmp_path)
    call(ssvit, "export", "format=safetensors", folder=tmp_path)
    call(ssvit, "embed", "data=shapes", "data.images=8", "data.image_size=16", "output=f.npz", folder=tmp_path)
    picture = tmp_path / "outputs" / "masked_patch_shapes" / "mosaic.png"
    assert "mosaic.png: " in call(ssvit, "predict", picture, folder=tmp_path)
    assert {"masked_patch_shapes", "finetune_masked_patch_shapes"} <= {
        path.name for path in (tmp_path / "outputs").iterdir()
    }


@pytest.mark.slow
def test_a_configuration_of_one_s_own_is_found(installed, tmp_path):
    (tmp_path / "mine" / "encoder").mkdir(parents=True)
    (tmp_path / "mine" / "encoder" / "two.yaml").write_text("defaults:\n  - small\n  - _self_\ndepth: 2\nwidth: 16\n")
    options = tiny_options("encoder.")
    ssvit = installed / "ssvit"
    call(ssvit, "pretrain", "--config-dir", "mine", "encoder=two", "encoder.heads=2", *options, folder=tmp_path)
    code = "import ssvit; print(ssvit.load().module.arguments['depth'])"
    assert call(installed / "python", "-c", code, folder=tmp_path).strip() == "2"


@pytest.mark.slow
def test_two_processes_start_themselves(installed, tmp_path):
    call(installed / "ssvit", "pretrain", *TINY, "launch.devices=2", folder=tmp_path)
    assert (tmp_path / "outputs" / "masked_patch_shapes" / "step_00000006" / "manifest.json").is_file()
