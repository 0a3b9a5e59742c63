"""What is exported opens where it is meant to, and says there what it says here."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import timm
import torch
import transformers
from command import one_line
from exported import CLASSES, LIMIT, SHAPE, classifier, encoder, images, written
from PIL import Image
from safetensors.torch import load_file

from ssvit.checkpoints import storage
from ssvit.data.augment.crop import CenterCrop
from ssvit.exchange import card
from ssvit.exchange.export import export
from ssvit.exchange.export_options import FORMATS, Export
from ssvit.loading import encoder as loading
from ssvit.loading import encoder_options as loading_options
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.options import OptionError, UserError

STORED = Path(__file__).parents[1] / "fixtures" / "outputs"


def normalised(x):
    return (x - torch.tensor(SHAPE["mean"])[:, None, None]) / SHAPE["std"]


ANY = ({}, {"positions": "learned_2d"}, {"positions": "sine_cosine_2d", "pooling": "patch_mean"}, {"positions": "none"},
       {"patch_size": [8, 16]})  # fmt: skip
SCALED = {"layer_scale": 0.5, "mlp_width": 2 * SHAPE["width"], "image_size": [32, 32]}
TIMM = (
    {"class_token": False, "pooling": "patch_mean"}, {"distillation_token": True},
    {"stem": {"layers": [], "width": 64, "epsilons": "timm"}}, {"layer_scale": 0.5},
    {"registers": 3, "positions": "sine_cosine_2d"},
    {"registers": 2, "layer_scale": 0.5, "class_token": False, "pooling": "patch_mean"},
)  # fmt: skip
HYBRIDS = [
    pytest.param("timm", {"stem": {"layers": layers, "width": 64, "epsilons": "timm"}, "patch_size": side,
                          "image_size": [2 * side, 3 * side]}, marks=pytest.mark.slow)
    for layers, side in (([2, 2, 2, 2], 32), ([3, 4, 9], 16))
]  # fmt: skip


def opened(format, folder):
    """A peer's function of normalised images that returns tokens, and its model."""
    if format == "timm":
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        return model.forward_features, model
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    options = {"add_pooling_layer": False} if name == "ViTModel" else {}
    model, report = getattr(transformers, name).from_pretrained(folder, output_loading_info=True, **options)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return lambda x: model.eval()(x).last_hidden_state, model


@pytest.mark.parametrize(
    ("format", "changes"),
    [*(("timm", changes) for changes in (*ANY, *TIMM)), *HYBRIDS,
     *(("huggingface", changes) for changes in (*ANY, SCALED, {**SCALED, "registers": 3}))],
)  # fmt: skip
@torch.no_grad()
def test_a_peer_opens_an_encoder_which_is_read_back(format, changes, tmp_path):
    ours = encoder(**changes)
    folder, _ = written(ours, tmp_path, format)
    x, (tokens, model) = images(ours.image_size), opened(format, folder)
    assert (tokens(ours.normalise(x)) - ours(x)).abs().max() < LIMIT
    if format == "timm" and "distillation_token" not in changes:
        assert (model(ours.normalise(x)) - ours.represent(x)).abs().max() < LIMIT
        assert numpy.allclose(model.pretrained_cfg["mean"], SHAPE["mean"])
    back = loading.load_encoder(loading_options.LoadEncoder(path=folder / "model.safetensors"))
    assert (back(x) - ours(x)).abs().max() < LIMIT


@pytest.mark.parametrize("changes", [{}, {"distillation_token": True}, {"pooling": "patch_mean"}])
@torch.no_grad()
def test_timm_opens_a_classifier(changes, tmp_path):
    ours = classifier(**changes)
    folder, _ = written(ours, tmp_path, "timm")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert (model(normalised(images())) - ours.logits(images())).abs().max() < LIMIT
    assert model.pretrained_cfg["label_names"] == list(CLASSES)


@torch.no_grad()
def test_transformers_opens_a_classifier_and_prepares_pictures(tmp_path):
    ours = classifier()
    folder, _ = written(ours, tmp_path, "huggingface")
    model = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    prepare = transformers.AutoImageProcessor.from_pretrained(folder)
    picture = (images(count=1)[0] * 255).to(torch.uint8)
    prepared = prepare(picture.permute(1, 2, 0).numpy(), return_tensors="pt")
    found = model(**prepared).logits
    assert (found - ours.logits(picture[None])).abs().max() < LIMIT
    assert [model.config.id2label[i] for i in range(3)] == list(CLASSES)


ROTARY = {"positions": "rotary", "registers": 2, "layer_scale": 0.5, "norm_epsilon": 1e-5}


@pytest.mark.parametrize(
    ("format", "made"),
    [
        *((format, made) for format in FORMATS for made in (encoder(), classifier())),
        *(("huggingface", encoder(**changes)) for changes in (SCALED, {**SCALED, "registers": 3}, ROTARY)),
    ],
)
@torch.no_grad()
def test_the_example_in_the_card_opens_the_export(format, made, tmp_path, monkeypatch):
    folder, _ = written(made, tmp_path, format)
    _, _, code = (folder / "README.md").read_text().partition("```python\n")
    own = made if isinstance(made, ViT) else made.encoder
    pixels = (images(own.image_size) * 255).to(torch.uint8)
    x = pixels / 255
    given = {"onnx": x.numpy(), "timm": own.normalise(x)}.get(format, x)
    names = {"images": given, "pictures": [picture.permute(1, 2, 0).numpy() for picture in pixels]}
    monkeypatch.chdir(folder)
    exec(code.partition("```")[0].replace("FOLDER", "."), names)  # as a reader of the card would
    found, expected = (names["tokens"], made(x)) if own is made else (names["logits"], made.logits(x))
    assert (torch.as_tensor(found) - expected).abs().max() < 1e-4


def test_the_card_of_a_multi_label_classifier_states_the_meaning_of_its_logits(tmp_path):
    for loss, stated in (("softmax", False), ("multi_label", True)):
        model = classifier()
        model.options = model.options.changed(loss=loss)
        folder, _ = written(model, tmp_path, "timm", overwrite=True)
        assert ("sigmoid" in (folder / "README.md").read_text()) == stated


def photograph(height, width):
    """Smooth colours with an edge in them, (height, width, 3) uint8."""
    corners = torch.rand(1, 3, 5, 7, generator=torch.Generator().manual_seed(height * width))
    picture = torch.nn.functional.interpolate(corners, size=(height, width), mode="bicubic").clamp(0, 1)[0]
    picture[:, height // 3 :, : width // 2] *= 0.4
    return (255 * picture).round().to(torch.uint8).permute(1, 2, 0).numpy()


def prepared_by(format, folder):
    if format == "huggingface":
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        return lambda picture: processor(picture, return_tensors="pt")["pixel_values"]
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return lambda picture: transform(Image.fromarray(picture))[None]


@pytest.mark.parametrize("format", ["huggingface", "timm"])
@pytest.mark.parametrize(
    ("size", "resize", "pictures"),
    [
        (32, "squash", [(60, 60), (60, 90), (90, 33), (100, 41)]),
        ([32, 48], "squash", [(60, 90), (90, 60), (32, 48)]),
        (32, None, [(60, 60), (60, 90), (90, 60), (41, 82), (100, 60), (17, 17)]),
        (32, 40, [(60, 60), (60, 90), (90, 60), (48, 96), (20, 24)]),
        (32, 37, [(60, 60), (60, 99)]),
        (32, 16, [(60, 90), (20, 16)]),
        ([32, 48], None, [(64, 96), (40, 60)]),
        ([32, 48], 60, [(64, 96), (60, 60), (90, 60)]),
    ],
)
@torch.no_grad()
def test_a_peer_makes_the_pixels_of_the_evaluation(format, size, resize, pictures, tmp_path):
    if format == "timm" and resize == 60:
        pytest.skip("timm has no such crop of a rectangle, and the card says so")
    ours, view = encoder(image_size=size, patch_size=8), {"size": size, "resize": resize, "fit": "cover"}
    if resize == "squash":
        view |= {"resize": None, "fit": "squash"}
    folder, _ = written(ours, tmp_path, format, facts={"step": 3, "view": view})
    prepare, crop = prepared_by(format, folder), CenterCrop(**view)
    for height, width in pictures:
        picture = photograph(height, width)
        right = crop([torch.from_numpy(picture).permute(2, 0, 1)])
        levels = (prepare(picture) - ours.normalise(right)).abs() * ours.std[:, None, None] * 255
        assert levels.max() < 2.01  # Pillow rounds each pass otherwise than torch
        seen = prepare(picture) * ours.std[:, None, None] + ours.mean[:, None, None]
        assert torch.cosine_similarity(ours.represent(seen), ours.represent(right)) > 0.9999


@torch.no_grad()
def test_transformers_answers_for_photographs_what_ssvit_answers(tmp_path):
    ours = classifier(image_size=32)
    folder, _ = written(ours, tmp_path, "huggingface", facts={"step": 3, "view": {"size": 32, "resize": 36}})
    model = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    for height, width in ((50, 80), (80, 50), (60, 60)):
        picture = photograph(height, width)
        right = ours(CenterCrop(size=32, resize=36)([torch.from_numpy(picture).permute(2, 0, 1)]))
        assert (model(**processor(picture, return_tensors="pt")).logits - right).abs().max() < 1e-4


def test_what_a_peers_preprocessing_does_not_do_is_said(tmp_path):
    rectangle, wide = encoder(), {"size": [32, 48], "resize": 40}
    for format, view, said in (
        ("huggingface", {"size": [32, 48], "resize": None}, "squashes images whose aspect ratio is not 48:32"),
        ("timm", wide, "timm enlarges images"),
        ("timm", {"size": [32, 48], "resize": None, "mirror": True}, "does not follow: mirror=True"),
        ("onnx" if find_spec("onnx") else "torch_export", {**wide, "mirror": 3, "off": None}, "follow: mirror=3"),
    ):
        folder, remarks = written(rectangle, tmp_path, format, facts={"step": 3, "view": view}, overwrite=True)
        assert any(said in remark for remark in remarks)
        assert said in (folder / "README.md").read_text()
    folder, _ = written(rectangle, tmp_path, "timm", facts={"step": 3, "view": {"fit": "squash"}}, overwrite=True)
    assert "Whole images are resized to 32x48 pixels" in (folder / "README.md").read_text()
    with pytest.raises(OptionError, match=r"view\.resize=wide: must be a whole number"):
        written(rectangle, tmp_path, "timm", facts={"step": 3, "view": {"resize": "wide"}}, overwrite=True)


@pytest.mark.parametrize(
    ("format", "changes", "hidden", "said"),
    [
        ("timm", {"positions": "relative"}, None, "relative positions"),
        ("huggingface", {"positions_at": "every_layer"}, None, "positions_at=every_layer"),
        ("timm", {"stem": {"layers": [1, 1], "width": 64}, "patch_size": 8}, None, r"stem of layers \[1, 1\]"),
        ("huggingface", {"stem": {"layers": [], "width": 64}, "patch_size": 8}, None, "a hybrid's stem"),
        ("huggingface", {"distillation_token": True}, None, "special tokens"),
        ("huggingface", {"class_token": False, "pooling": "patch_mean"}, None, "special tokens"),
        ("huggingface", {"pooling": "patch_mean"}, 0, "head on pooling=patch_mean"),
        ("timm", {}, 64, "hidden layer"),
        ("torchscript", {}, None, "must be one of onnx"),
    ],
)
def test_what_a_peer_lacks_is_refused(format, changes, hidden, said):
    own = vit_options.ViT(**encoder(**changes).arguments)
    head = None if hidden is None else {"classes": CLASSES, "hidden": hidden or None}
    with pytest.raises(OptionError, match=said):
        Export(format=format).check_model(own, head)


def test_an_export_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    model = encoder()
    folder, _ = written(model, tmp_path, "timm")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(OptionError, match="overwrite=true"):
        written(model, tmp_path, "timm")
    monkeypatch.setattr("ssvit.exchange.card.write", lambda **_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(Exception, match="cannot be written"):
        written(encoder(depth=1), tmp_path, "timm", overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()
    written(encoder(depth=1), tmp_path, "timm", overwrite=True)
    assert json.loads((folder / "config.json").read_text())["model_args"]["depth"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["timm"]


def test_an_export_that_cannot_take_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    folder, _ = written(encoder(), tmp_path, "timm")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rename = Path.rename

    def refused(path, target):
        if path.name.endswith(".part"):
            raise OSError(28, "No space left")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(UserError, match="cannot be written"):
        written(encoder(depth=1), tmp_path, "timm", overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["timm"]


def test_overwrite_replaces_exports_alone(tmp_path, monkeypatch):
    own = Export(format="timm", overwrite=True)
    folder, _ = written(encoder(), tmp_path, "timm")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "text.txt").write_text("mine")
    for output in (folder, tmp_path / "link", tmp_path / "new"):
        own.check_folder(output, checkpoint=tmp_path / "other" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    for output, checkpoint, said in (
        (tmp_path / "text.txt", None, "must be a folder, not a file"),
        (Path(), None, r"output=\.: is there and is no export: it holds link"),
        (Path("timm"), folder / "model.safetensors", "output=timm: holds the checkpoint"),
        (tmp_path / "link", folder / "model.safetensors", "holds the checkpoint"),
    ):
        with pytest.raises(OptionError, match=said):
            own.check_folder(output, checkpoint=checkpoint)
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(OptionError, match=r"is no export: it holds thesis\.tex"):
        written(encoder(depth=1), tmp_path, "timm", overwrite=True)
    assert (folder / "thesis.tex").exists()


def test_an_export_is_replaced_where_a_link_or_the_current_folder_names_it(tmp_path, monkeypatch):
    folder, _ = written(encoder(), tmp_path, "timm")
    (tmp_path / "link").symlink_to(folder)
    for depth, output in ((1, tmp_path / "link"), (3, Path())):
        monkeypatch.chdir(folder)
        own = Export(format="timm", overwrite=True)
        export(encoder(depth=depth), output, own, facts={"step": 3, "encoder": {}}, run=tmp_path)
        assert json.loads((folder / "config.json").read_text())["model_args"]["depth"] == depth
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "timm"]


def test_the_card_tells_what_was_measured_and_no_places(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "test/top1": 0.25}\n{"step": 3, "test/top1": 0.5}\n{"step"')
    configuration = {"recipe": {"lr": 0.002}, "data": {"source": {"name": "pets", "root": "place", "list": "/at/home"}}}
    (tmp_path / "config.yaml").write_text(json.dumps(configuration))
    folder, _ = written(encoder(), tmp_path, "safetensors")
    text = (folder / "README.md").read_text()
    for row in ("| test/top1 | 0.5 |", "| recipe.lr | 0.002 |", "| data.name | pets |", "| width | 48 |", "step 3"):
        assert row in text
    assert "home" not in text
    assert "place" not in text
    state = load_file(folder / "model.safetensors")
    arguments = json.loads((folder / "config.json").read_text())["encoder"]
    back = ViT(vit_options.ViT(**arguments))
    back.load_state_dict({name.removeprefix("encoder."): value for name, value in state.items()})
    assert torch.equal(back.eval()(images()), encoder()(images()))


CHOSEN = """
choices: {objective: masked_patch, target: mean_color, encoder: small, data: folder}
objective: {encoder: "${encoder}", target: "${target}", masking: {corrupted: 0.5}}
target: {bits: 3, patch_size: "${encoder.patch_size}"}
encoder: {patch_size: 8}
data: {image_size: 32, root: at_home, augment: {scale: [0.4, 1]}, source: {size: "${data.image_size}"}}
"""


def test_the_card_tells_what_was_chosen_and_the_values_that_references_mean(tmp_path):
    run = card.trained(STORED / "masked_patch_synthetic")
    assert (run["objective"], run["target"], run["data"]) == ("masked_patch", "mean_color", "synthetic")
    assert (run["target.bits"], run["target.channels"], run["data.size"], run["recipe.lr"]) == (1, 3, 16, 0.003)
    assert card.trained(STORED / "finetune_masked_patch_synthetic")["objective"] == "classify"
    (tmp_path / "config.yaml").write_text(CHOSEN)
    assert card.trained(tmp_path) == {
        "objective": "masked_patch",
        "target": "mean_color",
        "data": "folder",
        "objective.masking.corrupted": 0.5,
        "target.bits": 3,
        "target.patch_size": 8,
        "data.size": 32,
    }
    folder, _ = written(encoder(), tmp_path, "timm")
    text = (folder / "README.md").read_text()
    assert "| target | mean_color |" in text
    assert "$" not in text
    assert "at_home" not in text


@pytest.mark.parametrize(
    "text",
    [
        "recipe: {lr: 2, seed: '${oc.env:CANARY}'}",
        "recipe: {lr: 2, seed: '${${recipe.how}:CANARY}', how: oc.env}",
        "recipe: {lr: 2, seed: '${recipe.other}', other: '${oc.env:CANARY}'}",
        "recipe: {lr: 2, seed: '${nowhere}'}",
        "recipe: {lr: 2, seed: '???'}",
        "recipe: {lr: 2}\nobjective: '${oc.env:CANARY}'",
        "recipe: {lr: 2}\ntarget: [1, '${nowhere}']",
    ],
)
def test_the_card_calls_nothing_that_a_configuration_names(text, tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY", "sung")
    (tmp_path / "config.yaml").write_text(text)
    assert {name: value for name, value in card.trained(tmp_path).items() if name != "recipe.how"} == {"recipe.lr": 2}


@pytest.mark.parametrize("text", ["a: &a [*a]", "data: {a: '${data}'}", "- 1", "null", "{", "\0", "'\\ud800'"])
def test_the_card_is_written_without_a_configuration_that_cannot_be_read(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    folder, _ = written(encoder(), tmp_path, "safetensors")
    assert "## Training" not in (folder / "README.md").read_text()


def test_a_cell_of_the_card_cannot_leave_its_table(tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps({"choices": {"objective": "a | b\n\n# c"}}))
    folder, _ = written(encoder(), tmp_path, "safetensors")
    assert "| objective | a \\| b \\# c |" in (folder / "README.md").read_text().splitlines()


def test_the_card_has_the_evaluation_of_this_checkpoint_and_no_later_numbers(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "test/top1": 0.5}\n{"step": 4, "test/top1": 0.75}\n')
    one = {"measure": "knn", "best": "layer2", "columns": ["1-NN", "20-NN"], "values": {"layer2": [0.25, 0.375]}}
    for name, told in (("step_00000003", {"knn of layer2: 20-NN": 0.375}), ("step_00000004", {})):
        report = {"facts": {"checkpoint": f"outputs/run/{name}"}, "measured": [one]}
        (tmp_path / "evaluation").mkdir(exist_ok=True)
        (tmp_path / "evaluation" / "report.json").write_text(json.dumps(report))
        assert card.measured(tmp_path, 3) == {"test/top1": 0.5, **told}


def test_the_tool_exports_a_run_and_what_it_wrote_is_a_checkpoint(tool, tmp_path, no_torch):
    run = tmp_path / "outputs" / "cats"
    run.mkdir(parents=True)
    ours = classifier()
    storage.save(run, 6, {"model": ours.state_dict()}, {**ours.facts, "stage": "finetune"})
    (run / "metrics.jsonl").write_text('{"step": 6, "test/top1": 0.5}\n')
    for options, said in (
        (["format=tflite"], "format=tflite: must be one of"),
        (["format=timm", "any_size=true"], "any_size=true"),
        (["format=timm", "image_size=17"], "must divide"),
        (["format=timm", "encoder.heads=4"], "encoder.heads=4"),
        (["format=timm", "output=outputs/cats", "overwrite=true"], "output=outputs/cats: holds the checkpoint"),
    ):
        line = one_line(tool("export", "checkpoint=outputs/cats", *options, status=2, PYTHONPATH=no_torch))
        assert said in line
    done = tool("export", "checkpoint=outputs/cats", "format=timm", "image_size=[48,48]")
    folder = run / "export" / "timm"
    assert f"{Path('outputs/cats/export/timm')}: README.md, config.json, model.safetensors" in done.stdout
    assert "| test/top1 | 0.5 |" in (folder / "README.md").read_text()
    right = loading.load_classifier(loading_options.LoadEncoder(path=run / "step_00000006", image_size=[48, 48]))
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        expected = right.logits(images((48, 48)))
        assert (model(normalised(images((48, 48)))) - expected).abs().max() < LIMIT
