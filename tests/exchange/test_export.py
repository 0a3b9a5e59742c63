"""Exports: other libraries open them and compute the same outputs; the card and the folder are complete."""

import json
from pathlib import Path

import numpy
import pytest
import timm
import tiny
import torch
import transformers
from command import one_line
from exported import CLASSES, LIMIT, SHAPE, classifier, encoder, images, written
from PIL import Image

import ssvit
from ssvit.checkpoints import storage
from ssvit.data.augment.options import CenterCrop
from ssvit.errors import OptionError, UserError
from ssvit.exchange import card, preprocessing
from ssvit.exchange.export import export
from ssvit.exchange.options import FORMATS, Export
from ssvit.kernels.inference import resolved
from ssvit.models import timm_options, vit_options
from ssvit.objectives import classify_options, segment_options
from ssvit.objectives.classify import Classify

STORED = Path(__file__).parents[1] / "fixtures" / "outputs"


ANY = ({}, {"positions": "learned_2d"}, {"positions": "sine_cosine_2d", "pooling": "patch_mean"}, {"positions": "none"},
       {"patch_size": [8, 16]})  # fmt: skip
TIMM = (
    {"class_token": False, "pooling": "patch_mean"}, {"distillation_token": True}, {"layer_scale": 0.5},
    {"registers": 3, "positions": "sine_cosine_2d"},
    {"registers": 2, "layer_scale": 0.5, "class_token": False, "pooling": "patch_mean"}, {"mlp": "swiglu"},
    {"mlp": "swiglu", "layer_scale": 0.5, "registers": 2, "pooling": "patch_mean"}, {"gelu": "tanh"},
    {"gelu": "tanh", "distillation_token": True}, {"class_tokens": 3, "pooling": "patch_mean"},
    {"class_tokens": 3, "registers": 2, "pooling": "patch_mean", "positions": "sine_cosine_2d"},
)  # fmt: skip


@pytest.mark.parametrize("changes", [*ANY, *TIMM])
@torch.no_grad()
def test_timm_opens_an_encoder_which_is_read_back(changes, tmp_path):
    exported = encoder(**changes)
    folder, _ = written(exported, tmp_path, "timm")
    x, model = images(exported.image_size), timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert (model.forward_features(exported.normalise(x)) - exported(x)).abs().max() < LIMIT
    if "distillation_token" not in changes:
        assert (model(exported.normalise(x)) - exported.represent(x)).abs().max() < LIMIT
        assert numpy.allclose(model.pretrained_cfg["mean"], SHAPE["mean"])
    read = tiny.loaded(folder / "model.safetensors")
    assert (read(x) - exported(x)).abs().max() < LIMIT
    assert read.arguments["gelu"] == exported.arguments["gelu"]


@pytest.mark.parametrize("changes", [{}, {"distillation_token": True}, {"pooling": "patch_mean"}])
@torch.no_grad()
def test_timm_opens_a_classifier(changes, tmp_path):
    model = classifier(**changes)
    folder, _ = written(model, tmp_path, "timm")
    opened = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert (opened(model.encoder.normalise(images())) - model.logits(images())).abs().max() < LIMIT
    assert opened.pretrained_cfg["label_names"] == list(CLASSES)


@pytest.mark.parametrize(("format", "make"), [(format, make) for format in FORMATS for make in (encoder, classifier)])
@torch.no_grad()
def test_the_example_in_the_card_opens_the_export(format, make, tmp_path, monkeypatch):
    model = make(depth=1)
    folder, _ = written(model, tmp_path, format)
    _, _, code = (folder / "README.md").read_text().partition("```python\n")
    backbone = model if make is encoder else model.encoder
    pixels = (images(backbone.image_size) * 255).to(torch.uint8)
    x = pixels / 255
    inputs = {"onnx": x.numpy(), "timm": backbone.normalise(x)}.get(format, x)
    names = {"images": inputs}
    monkeypatch.chdir(folder)
    exec(code.partition("```")[0].replace("FOLDER", "."), names)  # as a reader of the card would
    result, expected = (names.get("tokens"), model(x)) if make is encoder else (names.get("logits"), model.logits(x))
    if format == "safetensors" and make is classifier:
        opened = ssvit.load_classifier("model.safetensors", precision=32)
        assert opened.classes == names["classifier"].classes == list(CLASSES)
        result, expected = opened.probabilities(x), model.logits(x).softmax(1)
    elif format == "safetensors":
        assert names["encoder"].precision == resolved("auto", torch.device("cpu"))
        names["encoder"] = ssvit.load("model.safetensors", precision=32)
        result, expected = names["encoder"].features(x), backbone.represent(x)
    assert (torch.as_tensor(result) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("loss", "named"), [("softmax", False), ("multi_label", True)])
def test_the_card_of_a_multi_label_classifier_states_the_meaning_of_its_logits(loss, named, tmp_path):
    model = classifier()
    model.options = model.options.changed(loss=loss)
    folder, _ = written(model, tmp_path, "timm")
    assert ("sigmoid of each logit" in (folder / "README.md").read_text()) == named


def photograph(height, width):
    """Smooth colours with an edge, (height, width, 3) uint8."""
    corners = torch.rand(1, 3, 5, 7, generator=torch.Generator().manual_seed(height * width))
    picture = torch.nn.functional.interpolate(corners, size=(height, width), mode="bicubic").clamp(0, 1)[0]
    picture[:, height // 3 :, : width // 2] *= 0.4
    return (255 * picture).round().to(torch.uint8).permute(1, 2, 0).numpy()


@pytest.mark.parametrize(
    ("size", "resize", "pictures"),
    [
        (32, "squash", [(60, 60), (60, 90), (90, 33), (100, 41)]), ([32, 48], "squash", [(60, 90), (90, 60), (32, 48)]),
        (32, None, [(60, 60), (60, 90), (90, 60), (41, 82), (100, 60), (17, 17)]),
        (32, 40, [(60, 60), (60, 90), (90, 60), (48, 96), (20, 24)]), (32, 37, [(60, 60), (60, 99)]),
        (32, 16, [(60, 90), (20, 16)]), ([32, 48], None, [(64, 96), (40, 60)]),
    ],
)  # fmt: skip
@torch.no_grad()
def test_timm_makes_the_pixels_of_the_evaluation(size, resize, pictures, tmp_path):
    exported, view = encoder(image_size=size), {"size": size, "resize": resize, "fit": "cover"}
    if resize == "squash":
        view |= {"resize": None, "fit": "squash"}
    folder, _ = written(exported, tmp_path, "timm", manifest={"step": 3, "view": view})
    model, crop = timm.create_model(f"local-dir:{folder}", pretrained=True), CenterCrop(**view).build()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    for height, width in pictures:
        picture = photograph(height, width)
        expected = crop([torch.from_numpy(picture).permute(2, 0, 1)])
        prepared = transform(Image.fromarray(picture))[None]
        levels = (prepared - exported.normalise(expected)).abs() * exported.std[:, None, None] * 255
        assert levels.max() < 2.01  # Pillow rounds each pass otherwise than torch


def test_an_export_at_another_size_shows_the_same_part_of_an_image(tmp_path):
    view = {"size": 16, "resize": 20, "fit": "cover"}
    folder, _ = written(encoder(image_size=32), tmp_path, "timm", manifest={"step": 3, "view": view})
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert timm.data.resolve_model_data_config(model)["crop_pct"] == pytest.approx(16 / 20)


@pytest.mark.parametrize("resized", [True, False])
def test_the_card_of_a_segmentation_describes_windows(resized):
    options = segment_options.Segment(classes=CLASSES, resize=resized)
    text = preprocessing.sentence(CenterCrop(size=32), None, None, options)
    assert ("Windows of 32x32" in text, "resized" in text, "crop" in text) == (True, resized, False)


@torch.no_grad()
def test_transformers_opens_an_export_for_timm(tmp_path):
    model, view = classifier(image_size=32), {"size": 32, "resize": 36}
    folder, _ = written(model, tmp_path, "timm", manifest={"step": 3, "view": view})
    opened = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    assert [opened.config.id2label[i] for i in range(3)] == list(CLASSES)
    picture = photograph(50, 80)
    expected = model(CenterCrop(**view).build()([torch.from_numpy(picture).permute(2, 0, 1)]))
    inputs = processor(Image.fromarray(picture), return_tensors="pt")
    assert (opened(**inputs).logits - expected).abs().max() < 0.05  # Pillow rounds each pass otherwise than torch


def test_a_difference_of_timms_preprocessing_is_stated(tmp_path):
    folder, remarks = written(encoder(), tmp_path, "timm", manifest={"step": 3, "view": {"resize": 40}})
    assert any("48:32" in text for text in remarks)
    assert "48:32" in (folder / "README.md").read_text()


def test_an_invalid_evaluation_transform_is_named(tmp_path):
    with pytest.raises(OptionError, match=r"view\.resize=wide: "):
        written(encoder(), tmp_path, "timm", manifest={"step": 3, "view": {"resize": "wide"}})


@pytest.mark.parametrize(
    ("changes", "hidden", "named"),
    [
        ({"positions": "relative"}, None, "positions=relative"), ({"positions": "rotary"}, None, "positions=rotary"),
        ({"positions_at": "every_layer"}, None, "positions_at=every_layer"), ({}, 64, "hidden"),
        ({"stem": {"layers": [1, 1], "width": 64}, "patch_size": 8}, None, "stem"),
        ({"distillation_token": True, "pooling": "patch_mean"}, None, "distillation token.*pooling=class_token"),
        ({"distillation_token": True, "mlp": "swiglu"}, None, "distillation token.*mlp=swiglu"),
        ({"attention": "axial"}, None, "attention=axial"),
        ({"norm_epsilon": 1e-5}, None, "norm_epsilon=1e-05"), ({"class_tokens": 2}, None, " 2 "),
    ],
)  # fmt: skip
def test_an_encoder_that_timm_does_not_support_is_named(changes, hidden, named):
    with pytest.raises(OptionError, match=f"format=timm: .*{named}"):
        Export(format="timm").check_model(vit_options.ViT(**{**SHAPE, **changes}), {"hidden": hidden})


def test_an_export_is_complete_or_the_old_one_stays(tmp_path, monkeypatch):
    folder, _ = written(encoder(), tmp_path, "timm")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(OptionError, match="overwrite=true"):
        written(encoder(), tmp_path, "timm")

    def fail(**options):
        raise OSError(28, "No space left")

    monkeypatch.setattr("ssvit.exchange.card.write", fail)
    with pytest.raises(UserError, match=f"^{folder}: "):
        written(encoder(depth=1), tmp_path, "timm", overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["timm"]


def test_overwrite_replaces_exports_only(tmp_path, monkeypatch):
    options = Export(format="timm", overwrite=True)
    folder, _ = written(encoder(), tmp_path, "timm")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "text.txt").write_text("mine")
    for output in (folder, tmp_path / "link", tmp_path / "new"):
        options.check_folder(output, checkpoint=tmp_path / "other" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    (folder / "thesis.tex").write_text("mine")
    for output, checkpoint, named in (
        (tmp_path / "text.txt", None, r"^output=.*text\.txt: "),
        (Path(), None, r"^output=\.: .*\blink\b"),
        (Path("timm"), folder / "model.safetensors", "^output=timm: "),
        (tmp_path / "link", folder / "model.safetensors", "^output=.*link: "),
        (folder, None, r"^output=.*: .*thesis\.tex"),
    ):
        with pytest.raises(OptionError, match=named):
            options.check_folder(output, checkpoint=checkpoint)


def test_an_export_is_replaced_through_a_link_and_as_the_current_folder(tmp_path, monkeypatch):
    folder, _ = written(encoder(), tmp_path, "timm")
    (tmp_path / "link").symlink_to(folder)
    for depth, output in ((1, tmp_path / "link"), (3, Path())):
        monkeypatch.chdir(folder)
        options = Export(format="timm", overwrite=True)
        export(encoder(depth=depth), output, options, manifest={"step": 3, "encoder": {}}, run=tmp_path)
        assert json.loads((folder / "config.json").read_text())["model_args"]["depth"] == depth
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "timm"]


CONFIGURATION = """
schema: 1
choices: {objective: "a | b", target: mean_color, encoder: small, data: folder}
"""
VALUES = """
objective: {masking: {corrupted: 0.5}}
target: {bits: 3}
data: {image_size: 32, root: at_home, list: /at/home, augment: {scale: [0.4, 1]}, view: {size: "???"}}
"""


def test_the_card_lists_training_and_metrics_without_paths_and_repeated_values(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "test/top1": 0.25}\n{"step": 3, "test/top1": 0.5, "train/loss": 1}\n{"step": 4, "test/top1": 0.75}'
    )
    (tmp_path / "config.yaml").write_text(CONFIGURATION.replace("a | b", "mae") + VALUES)
    assert card.training_options(tmp_path) == {
        "objective": "mae", "target": "mean_color", "data": "folder", "objective.masking.corrupted": 0.5,
        "target.bits": 3, "data.image_size": 32, "data.augment.scale": [0.4, 1],
    }  # fmt: skip
    assert card.metrics(tmp_path, 3) == {"test/top1": 0.5}
    folder, _ = written(encoder(), tmp_path, "safetensors")
    text = (folder / "README.md").read_text()
    for row in ("| test/top1 | 0.5 |", "| target.bits | 3 |", "| width | 48 |", "step 3", "## Training"):
        assert row in text
    options = card.training_options(STORED / "masked_patch_shapes")
    assert (options["objective"], options["data"], options["recipe.lr"]) == ("masked_patch", "shapes", 0.003)


@pytest.mark.parametrize(
    "text",
    ["a: &a [*a]", "data: {a: '${oc.env:HOME}'}", "- 1", "null", "{", "\0", "'\\ud800'", "recipe: {lr: 1}",
     CONFIGURATION],
)  # fmt: skip
def test_the_card_is_written_without_a_configuration_of_a_run(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    folder, _ = written(encoder(), tmp_path, "safetensors")
    assert "## Training" not in (folder / "README.md").read_text()


def test_the_command_exports_a_run_with_another_image_size(tool, call, tmp_path, no_torch, capsys):
    run = tmp_path / "outputs" / "cats"
    run.mkdir(parents=True)
    model = classifier()
    storage.save(run, 6, {"model": model.state_dict()}, {**model.metadata, "stage": "finetune"})
    for options in (
        ["format=tflite"], ["any_size=true", "format=timm"], ["image_size=17", "format=timm"],
        ["encoder.heads=4", "format=timm"], ["output=outputs/cats", "format=timm", "overwrite=true"],
    ):  # fmt: skip
        line = one_line(tool("export", "checkpoint=outputs/cats", *options, status=2, PYTHONPATH=no_torch))
        assert line.startswith(f"ssvit: {options[0]}") or options[0].partition("=")[2] in line
    call("export", "checkpoint=outputs/cats", "format=timm", "image_size=[48,48]")
    folder = run / "export" / "timm"
    assert f"{Path('outputs/cats/export/timm')}: README.md, config.json, model.safetensors" in capsys.readouterr().out
    loaded = tiny.classifier(run / "step_00000006", image_size=[48, 48])
    opened = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        x = images((48, 48))
        assert (opened(loaded.encoder.normalise(x)) - loaded.logits(x)).abs().max() < LIMIT


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t", "convnext_atto"])
@torch.no_grad()
def test_timm_opens_its_own_models(name, tmp_path):
    torch.manual_seed(0)
    options = timm_options.Timm(model=name, image_size=64, mean=[0.4, 0.5, 0.6], std=0.25)
    student = options.build().eval()
    model = Classify(classify_options.Classify(classes=CLASSES), encoder=student).eval()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    x = images((64, 64))
    for exported, folder, result in (
        (student, tmp_path / "encoder", student.represent(x)),
        (model, tmp_path / "classifier", model.logits(x)),
    ):
        written(exported, folder, "timm")
        opened = timm.create_model(f"local-dir:{folder / 'timm'}", pretrained=True).eval()
        assert (opened(student.normalise(x)) - result).abs().max() < LIMIT
        assert timm.data.resolve_model_data_config(opened)["input_size"] == (3, 64, 64)
    assert opened.pretrained_cfg["label_names"] == list(CLASSES)


def test_a_head_that_timm_does_not_support_is_named():
    torch.manual_seed(0)
    student = timm_options.Timm(model="efficientformer_l1", image_size=224).build()
    with pytest.raises(UserError, match=r"\befficientformer_l1\b"):
        student.with_head(torch.nn.Linear(student.width, 3))
