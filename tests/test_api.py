"""ssvit from Python: the commands as functions with the same results and errors, and models that take any pictures."""

import json
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from command import LIMIT, TINY, error_of
from PIL import Image

import ssvit
from ssvit import __main__ as program
from ssvit import api, inference
from ssvit.checkpoints import manifest
from ssvit.cli import COMMANDS, find_command, normalization
from ssvit.config import command, help
from ssvit.data.sources.base import Unreadable
from ssvit.data.sources.decode_options import PixelFormat
from ssvit.errors import OptionError, UserError
from ssvit.inference import pictures
from ssvit.options import Evaluate
from ssvit.values import text_of

OPTIONS = {
    "data": "shapes", "data.images": 64, "data.held_out_images": 32, "data.image_size": 16,
    "encoder": {"width": 16, "depth": 2, "heads": 2}, "target.bits": 1, "batch_size": 8, "steps": 6, "warmup": 2,
    "save_every": 2, "evaluate_every": 3, "log_every": 1, "precision": "32-true", "launch.accelerator": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def run(outputs) -> ssvit.Run:
    return ssvit.pretrain(**OPTIONS, outputs=outputs, verbose=False)


@pytest.fixture(scope="module")
def fine(run, outputs) -> ssvit.Run:
    options = {"steps": 3, "batch_size": 8, "warmup": 1, "save_every": 3, "evaluate_every": 3, "figures": "none"}
    options |= {"precision": "32-true", "check_frozen": False}
    return ssvit.finetune(run, outputs=outputs, verbose=False, name="it's fine", **options)


def test_a_run_is_the_command_s_bit_for_bit(run, tool, tmp_path):
    tool("pretrain", *TINY, "data=shapes")
    sums = [manifest.read_manifest(folder / "step_00000006")["sha256"] for folder in (
        run.folder, tmp_path / "outputs" / "masked_patch_shapes")]  # fmt: skip
    assert sums[0] == sums[1]


def test_a_run_has_metrics_figures_and_its_encoder(run):
    assert run.history[0]["step"] == 0
    assert run.metrics["step"] == 6
    assert run.metrics["train/loss"] == [row for row in run.history if "train/loss" in row][-1]["train/loss"]
    assert {"mosaic", "learning"} <= run.figures.keys()
    assert all(file.is_file() for file in run.figures.values())
    assert run.comparison is None
    assert run.encoder().module.width == 16


def test_a_comparison_is_told(run, outputs):
    options = {"steps": 2, "batch_size": 8, "warmup": 0, "save_every": 2, "evaluate_every": 2, "figures": "none"}
    found = ssvit.finetune(
        run, outputs=outputs, verbose=False, precision="32-true", compare="scratch", seeds=1, **options
    )
    assert found.comparison == json.loads((found.folder / "comparison.json").read_text())
    assert found.metrics["test/accuracy"] == found.comparison["accuracy"]["pretrained"]["mean"]
    arms = [ssvit.Run(found.folder / f"{side}_seed0").classifier() for side in ("pretrained", "scratch")]
    picture = tiny.pictures(1)
    ours, pretrained, scratch = (one.predict(picture)[0].probabilities for one in (found.classifier(), *arms))
    assert ours == pretrained != scratch


def test_an_evaluation_has_its_page_and_numbers(run, outputs, capsys):
    found = ssvit.evaluate(run, outputs=outputs, probes=["knn"], verbose=False)
    assert capsys.readouterr() == ("", "")
    assert found.page.is_file()
    assert "knn" in json.dumps(found.metrics)
    assert found.figures == {}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"lr": -1}, "recipe.lr=-1: "),
        ({"recipe": {"lrr": 1}}, "recipe.lrr: "),
        ({"objective": "foo"}, "objective=foo: "),
        ({"data": "/nowhere/at all"}, "data=/nowhere/at all: "),
        ({"seed": object}, "recipe.seed=<class 'object'>: "),
    ],
)
def test_a_wrong_option_is_the_command_s_line(options, line, tmp_path):
    with pytest.raises(UserError) as error:
        ssvit.pretrain(**options, outputs=tmp_path, verbose=False)
    assert str(error.value).startswith(line)
    assert not any(tmp_path.iterdir())


def test_a_command_sets_the_allocator_of_its_process_and_a_function_does_not(outputs, monkeypatch):
    calls = []
    monkeypatch.setattr(command, "keep_memory", lambda: calls.append("set"))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    short = {"steps": 1, "warmup": 0, "probes": [], "figures": "none"}
    ssvit.pretrain(**OPTIONS | short, outputs=outputs, name="allocated", verbose=False)
    assert calls == []
    with pytest.raises(SystemExit):
        find_command("pretrain").main(["objective=none"])
    assert calls == ["set"]


def test_ctrl_c_within_a_callback_stops_the_command(monkeypatch):
    def run(config):
        reference = weakref.ref(part := torch.zeros(1), lambda of: signal.raise_signal(signal.SIGINT))
        del part
        assert reference() is None
        time.sleep(LIMIT / 10)

    monkeypatch.setattr(command, "keep_memory", lambda: None)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs of a shell's background
    try:
        with pytest.raises(SystemExit) as ended:
            replace(find_command("pretrain"), run=run).main([])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130


def test_ctrl_c_during_imports_is_one_line(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "find_command", interrupted)
    monkeypatch.setattr(sys, "argv", ["ssvit", "pretrain"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 130
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_nothing_of_the_process_is_changed_and_within_a_hydra_application_each_keeps_its_own(tmp_path):
    (tmp_path / "app.yaml").write_text("rate: 0.001\nlr: mine")
    code = f"""
import os, signal, sys
import torch, faiss
import hydra, ssvit
from hydra.core.hydra_config import HydraConfig
signals = signal.SIGINT, signal.SIGTERM, signal.SIGCHLD
@hydra.main(version_base="1.3", config_path={str(tmp_path)!r}, config_name="app")
def main(config):
    before = dict(os.environ), [signal.getsignal(number) for number in signals], list(sys.argv), HydraConfig.get()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    run = ssvit.pretrain(**{OPTIONS!r}, lr=config.rate, outputs="outputs", figures="none", probes=[], verbose=False)
    assert torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == threads
    after = dict(os.environ), [signal.getsignal(number) for number in signals], list(sys.argv), HydraConfig.get()
    changed = {{name for name in before[0].keys() | after[0].keys() if before[0].get(name) != after[0].get(name)}}
    # torch and threadpoolctl set these as they are imported.
    of_libraries = ("KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK")
    print([name for name in changed if name not in of_libraries], before[1:] == after[1:])
    print(run.metrics["step"], hydra.compose("app").lr)
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.splitlines()[-2:] == ["[] True", "6 mine"], done.stderr


def test_pictures_of_any_kind_are_one_picture(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    pixels[0, :2] = [[0], [255]]  # both ends of the range
    Image.fromarray(pixels).save(tmp_path / "a.png")
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    kinds = [
        tmp_path, tmp_path / "a.png", str(tmp_path / "a.png"), Image.open(tmp_path / "a.png"), pixels, pixels[None],
        tensor, tensor[None], tensor / 255, tensor.double() / 255, [pixels], (tensor,), pixels / 255,
    ]  # fmt: skip
    for kind in kinds:
        (found,) = pictures(kind)
        assert torch.equal(found, tensor), type(kind)
    (found,) = pictures(Image.open(tmp_path / "a.png"), PixelFormat(channels=1))
    assert (found[0] - torch.from_numpy(pixels @ [0.299, 0.587, 0.114])).abs().max() <= 1
    grey = pixels[:, :, 0]
    (found,) = pictures(grey)
    assert torch.equal(found, torch.from_numpy(grey)[None])


def test_a_picture_is_turned_upright_as_its_file_is(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: to be turned clockwise
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    for kind in (tmp_path / "a.png", Image.open(tmp_path / "a.png")):
        (found,) = pictures(kind)
        assert torch.equal(found, torch.from_numpy(np.rot90(pixels, -1).copy()).permute(2, 0, 1))


@pytest.mark.parametrize(
    "wrong", [3, None, torch.zeros(4, 4), torch.full((3, 4, 4), 2.0), torch.full((3, 4, 4), torch.nan),
              torch.zeros(3, 4, 4, dtype=torch.int64), Image.new("F", (4, 4)),
              *(np.zeros((4, 4, 3), kind) for kind in ("object", "U1", "longdouble", "complex64", "datetime64[s]"))],
)  # fmt: skip
def test_what_is_no_picture_is_refused(wrong):
    with pytest.raises(OptionError, match="images"):
        list(pictures(wrong))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_tensors_of_any_type_are_converted_by_the_range(dtype):
    values = torch.arange(8.0).view(2, 2, 2).to(dtype)
    if dtype.is_floating_point:
        values.requires_grad_()
    (image,) = pictures(values, PixelFormat(channels=2, range=[0, 8]))
    assert torch.equal(image, torch.arange(8.0).view(2, 2, 2) / 8)


def test_arrays_may_have_the_other_order_of_bytes(run):
    pixels = np.random.default_rng(0).random((16, 16, 3), np.float32)
    encoder = ssvit.load(run)
    assert torch.equal(encoder.prepare(pixels), encoder.prepare(pixels.astype(">f4")))


def test_an_evaluation_from_python_needs_its_report(run):
    for given, options in ((run, {"report": False}), (Evaluate(checkpoint=str(run.folder), report=False), {})):
        with pytest.raises(OptionError, match=r"^report=false: "):
            ssvit.evaluate(given, **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lr": 1e-3, "recipe": {"lr": 2e-3}}, r"recipe\.lr=0\.002"),
        ({"lr": 1e-3, "recipe.lr": 2e-3}, r"recipe\.lr=0\.002"),
        ({"data.augment": {"scale": 1}, "data.augment.scale": 0.5}, r"data\.augment\.scale=0\.5"),
    ],
)
def test_an_option_is_passed_once(options, name, tmp_path):
    with pytest.raises(OptionError, match=rf"^{name}: "):
        ssvit.pretrain("/nowhere", **options, outputs=tmp_path, verbose=False)


def test_features_are_the_encoder_s_of_the_prepared_images(run, outputs):
    encoder = ssvit.load(run.folder.name, outputs=outputs, precision=32)
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(encoder.prepare(images), images)
    with torch.no_grad():
        tokens = encoder.module(images)
        features = encoder.module.pool(tokens)
    small = ssvit.load(run, batch_size=2, precision="32")
    torch.testing.assert_close(small.features(images), features)
    torch.testing.assert_close(small.class_token(images), tokens[:, 0])
    torch.testing.assert_close(small.patch_features(images).flatten(1, 2), tokens[:, 1:])
    first = encoder.module.norm(next(encoder.module.layers(images)))
    torch.testing.assert_close(small.features(images, layer=1), encoder.module.pool(first))
    with pytest.raises(OptionError, match="layer"):
        small.features(images, layer=3)
    mixed = [np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4), np.uint8)]
    for images in ([], np.zeros((0, 4, 3), np.uint8), np.zeros(5, np.uint8), np.array(0, np.uint8), mixed):
        for compute in (small.features, small.prepare):
            with pytest.raises(OptionError, match="images"):
                compute(images)


@pytest.mark.parametrize(
    ("option", "value"),
    [("device", "gpu"), ("device", "cuda:99"), ("batch_size", 0), ("batch_size", "4"), ("imagesize", 32),
     ("checkpoint", None), ("checkpoint", "/no/where")],
)  # fmt: skip
def test_an_encoder_that_cannot_be_loaded_so_is_an_error_with_the_option(run, option, value):
    with pytest.raises(OptionError, match=f"^{option}={text_of(value)}: "):
        ssvit.load(**{"checkpoint": run, option: value})


def test_without_a_classifier_there_is_an_error(run):
    with pytest.raises(UserError, match="finetune"):
        ssvit.load_classifier(run)


def test_larger_pictures_are_resized_as_in_the_evaluation_and_a_larger_encoder_takes_them(run):
    encoder = ssvit.load(run, image_size=[32, 32])
    assert encoder.prepare(np.zeros((50, 70, 3), np.uint8)).shape == (1, 3, 32, 32)
    assert encoder.patch_features(np.zeros((50, 70, 3), np.uint8)).shape == (1, 8, 8, 16)


@pytest.mark.parametrize(("option", "value"), [("devices", 2), ("devices", "0,1"), ("devices", -1), ("num_nodes", 2)])
def test_a_program_starts_no_further_processes(option, value, tmp_path):
    error = error_of(ssvit.pretrain, outputs=tmp_path, **{f"launch.{option}": value}, **OPTIONS)
    assert str(error).startswith(f"launch.{option}={value}: ")


def test_one_picture_is_decoded_at_a_time(run, monkeypatch):
    events = []

    def decoded(*_):
        for number in range(3):
            events.append("decoded")
            yield torch.full((3, 40, 30), number, dtype=torch.uint8)

    encoder = ssvit.load(run)
    transform = encoder.transform
    encoder.transform = lambda images: events.append("resized") or transform(images)
    monkeypatch.setattr(inference, "pictures", decoded)
    images = encoder.prepare("folder")
    assert events == ["decoded", "resized"] * 3
    assert torch.equal(images, transform([torch.full((3, 40, 30), number, dtype=torch.uint8) for number in range(3)]))


def test_files_have_the_channels_of_the_encoder(run, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "grey.png")
    encoder = ssvit.load(run, channels=1, image_mean=0.5, image_std=0.5)
    expected = encoder.features(torch.from_numpy(pixels)[None])
    for picture in (tmp_path / "grey.png", Image.fromarray(pixels)):
        assert torch.equal(encoder.features(picture), expected)


def test_a_classifier_names_classes_with_probabilities(fine):
    model = fine.classifier(precision=32)
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    logits = model.module.logits(images).detach()
    answers = model.predict(images)
    for answer, row in zip(answers, logits.softmax(1), strict=True):
        assert answer.name == model.classes[row.argmax()]
        assert list(answer.probabilities) == model.classes
        assert answer.probability == pytest.approx(row.max().item())
        assert sum(answer.probabilities.values()) == pytest.approx(1)


def test_a_file_that_is_no_picture_is_named(run, tmp_path):
    (tmp_path / "a.png").write_bytes(b"nothing")
    with pytest.raises(Unreadable, match=r"a\.png"):
        ssvit.load(run).features(tmp_path / "a.png")


@pytest.mark.parametrize(("value", "written"), [
    (None, "null"), (True, "true"), (3, "3"), (1e-3, "0.001"), ([1, "a"], "[1,a]"), (Path("a/b"), "a/b"), ([], "[]"),
    (np.float64(1e-3), "0.001"), (np.float32(0.5), "0.5"), (np.int64(6), "6"),
    ([{"path": ssvit.Run(Path("a b")), "image_size": 32}, ssvit.Run(Path("c"))], "[{path: 'a b', image_size: 32},c]"),
])  # fmt: skip
def test_values_are_written_as_the_command_line_has_them(value, written):
    assert text_of(value) == written


def test_a_dictionary_in_a_group_changes_a_part_or_is_the_whole_value(run, outputs, monkeypatch):
    def composed(name: str, **options) -> dict:
        found = []
        command = replace(find_command(name), run=lambda config: found.append(config.values) or outputs)
        monkeypatch.setattr("ssvit.cli.find_command", {name: command}.get)
        api._call(name, options, verbose=False, config_dir=None)
        return found[0]

    lora = {"rank": 8, "alpha": np.float64(16)}
    options = composed("finetune", checkpoint=run, objective={"trained": "head", "lora": lora})["objective"]
    assert (options["trained"], options["lora"]) == ("head", {**lora, "matrices": "attention"})
    usual, changed = (composed("pretrain", data={"augment": part}) for part in ({}, {"jitter": 0.8, "scale": [0.5, 1]}))
    expected = usual["data"]["augment"] | {"jitter": 0.8, "scale": [0.5, 1]}
    assert changed["data"]["augment"] == expected
    with pytest.raises(UserError, match=r"^workers=null: "):
        composed("pretrain", data=None, workers=None)
    with pytest.raises(UserError, match=r"^data\.augment\.jiter: .*\bjitter\b"):
        composed("pretrain", data={"augment": {"jiter": 0.8}})


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_name(name):
    assert find_command(name).name == name.replace("-", "_")


def test_each_command_line_spells_other_commands_as_a_shell_does():
    for prefix, normalize in (
        ("ssvit ", replace(normalization.command, prefix="ssvit ")),
        ("ssvit.", normalization.command),
    ):
        assert normalize.line([]).changed([]).command("finetune") == "ssvit finetune"
        assert help.text(normalize, "a purpose", [], everything=False).startswith(f"{prefix}normalization")
