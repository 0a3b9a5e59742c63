"""Write a model card: the weights, their training, their metrics and code to load them, without local paths.

It starts with the front matter that the Hugging Face Hub reads.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ssvit.checkpoints.configuration import Configuration, flatten
from ssvit.checkpoints.run_folder import rows
from ssvit.errors import MISSING, markdown, pair
from ssvit.exchange.options import OURS, PROGRAMS, Export
from ssvit.exchange.tensor_mapping import per_channel

_LOCAL = ("root", "path", "download")  # options that describe the machine
_OPEN = {
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
{outputs} = session.run(None, {{"images": images}})  # (b, {shape}), float32 in [0, 1]
metadata = session.get_modelmeta().custom_metadata_map  # names of the classes, …""",
    "safetensors": """import ssvit

encoder = ssvit.load("FOLDER/model.safetensors")
features = encoder.features(images)  # (b, {shape}), in [0, 1] or uint8""",
    "torch": """import torch

extra_files = {{"metadata.json": ""}}  # names of the classes, …
program = torch.export.load("model.pt2", extra_files=extra_files).module()
{outputs} = program(images)  # (b, {shape}), float32 in [0, 1]""",
    "timm": """import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
{result} = model{method}(images)  # (b, {shape}), less mean, over std""",
}

_OPEN_CLASSIFIER = """import ssvit

classifier = ssvit.load_classifier("FOLDER/model.safetensors")
probabilities = classifier.probabilities(images)  # (b, {shape}), in [0, 1] or uint8"""


def write(
    *, run: Path, step: int, encoder: Mapping[str, Any], options: Export, preprocessing: str, classes: Sequence[str],
    task: str, remarks: Sequence[str], origins: Sequence[Mapping[str, str]],
) -> str:  # fmt: skip
    """Return the card in Markdown.

    Args:
        run: Folder of the run that trained the weights.
        step: Number of updates.
        encoder: Options of the encoder.
        options: Options of the export.
        preprocessing: Description of the evaluation transform.
        classes: Class names, empty without a head.
        task: Task of the head, classification or segmentation.
        remarks: Sentences about the export.
        origins: Weights of which the training made use, with "use", "name" and possibly "license".
    """
    channels, (height, width) = encoder["channels"], pair("image_size", encoder["image_size"])
    mean, std = (per_channel(encoder[name], channels) for name in ("mean", "std"))
    is_vit = "positions" in encoder
    code = (_OPEN_CLASSIFIER if classes and options.format == OURS else _OPEN[options.format]).format(
        outputs="(logits,)" if classes else "tokens, features",
        result="logits" if classes else "tokens" if is_vit else "features",
        method=".forward_features" if is_vit and not classes else "",
        shape=f"{channels}, height, width" if options.any_size else f"{channels}, {height}, {width}",
    )
    sides = f"{height}x{width} pixels"
    if options.any_size:
        sides = f"sides divisible by {'x'.join(map(str, pair('patch_size', encoder['patch_size'])))} pixels"
    where = ", which the graph does" if options.format in PROGRAMS else ""
    images = (
        f"Images have {channels} channels and {sides}, normalised by mean {mean} and std {std} "
        f"of values in [0, 1]{where}."
    )
    training = training_options(run)
    sections = {
        "Opening it": f"```python\n{code}\n```\n\n{images}\n\n{preprocessing}",
        "Encoder": _table(encoder.items()),
        "Classes": markdown(", ".join(classes)),
        "Origin": _table([(row["use"], _licensed(row)) for row in origins]),
        "Training": _table(training.items()),
        "Metrics": _table(metrics(run, step).items()),
    }
    front_matter: dict[str, object] = {
        "library_name": "ssvit" if options.format == OURS else options.format,
        "pipeline_tag": f"image-{task}" if classes else "image-feature-extraction",
        "tags": ["ssvit", "vision", "vision-transformer"],
    }
    if repositories := sorted({row["name"] for row in origins if "/" in row["name"]}):
        front_matter["base_model"] = repositories
    network = "A Vision Transformer" if is_vit else "An encoder"
    model = f"{network} {'with' if classes else 'without'} a head, exported by ssvit as {options.format}, step {step}."
    lines = ["---", yaml.safe_dump(front_matter, sort_keys=False) + "---", "", f"# {run.name}", "", model]
    text = "\n".join([*lines, *(f"- {remark}" for remark in remarks), ""])
    return text + "".join(f"\n## {title}\n\n{part}\n" for title, part in sections.items() if part)


def metrics(run: Path, step: int) -> dict[str, Any]:
    """Return the last metrics of each evaluation of a run up to a step, by name."""
    latest: dict[str, Any] = {}
    for row in rows(run):
        if row["step"] <= step:
            latest |= {name: value for name, value in row.items() if "/" in name and not name.startswith("train/")}
    return latest


def training_options(run: Path) -> dict[str, Any]:
    """Return the options of objective, data and recipe by their full names; {} without a readable configuration.

    Options with the value of another option, and values that may be paths, are left out.
    """
    if (configuration := Configuration.find(run / "config.yaml")) is None:
        return {}
    groups = ("objective", "target", "data", "subset", "recipe")
    options = {group: configuration.choices[group] for group in groups if configuration.choices.get(group)}
    for name, value in flatten({group: configuration.values.get(group) for group in groups}):
        is_local = name.rpartition(".")[2] in _LOCAL or any(mark in str(value) for mark in ("/", "\\", MISSING))
        if value is not None and not is_local:
            options[name] = value
    return options


def _licensed(row: Mapping[str, str]) -> str:
    """Return the name of weights, with their licence if it is known."""
    return row["name"] + (f" (licence: {row['license']})" if "license" in row else "")


def _table(values: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values in Markdown."""
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in values]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""


def _cell(value: object) -> str:
    """Format a value, from any file, as one cell of a table."""
    return markdown(f"{value:.4g}" if isinstance(value, float) else value)
