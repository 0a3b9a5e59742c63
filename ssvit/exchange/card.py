"""A model card: what the weights are, what they were trained on and how, what was measured, and how to open them.

It names no folder of the machine that it was written on.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ssvit.exchange.options import GRAPHS, INPUTS

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # one that names an option and calls nothing
_DEEPEST = 12  # of options within options
_OPEN = {
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
{outputs} = session.run(None, {{"images": images}})  # (b, {shape}), {input}
facts = session.get_modelmeta().custom_metadata_map  # names of the classes, …""",
    "torch_export": """import torch

facts = {{"metadata.json": ""}}  # names of the classes, …
model = torch.export.load("model.pt2", extra_files=facts).module()
{outputs} = model(images)  # (b, {shape}), {input}""",
    "safetensors": """import json
from safetensors.torch import load_file
from ssvit.models.vit import ViT

encoder = ViT(**json.load(open("config.json"))["encoder"])
encoder.load_state_dict({{k[8:]: v for k, v in load_file("model.safetensors").items() if k.startswith("encoder.")}})
tokens = encoder.eval()(images)  # (b, {shape}), in [0, 1] or uint8""",
    "timm": """import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
tokens = model.forward_features(images)  # (b, {shape}), less mean, over std""",
    "huggingface": """from transformers import AutoImageProcessor, {type}

model = {type}.from_pretrained("FOLDER"{extra}).eval()
images = AutoImageProcessor.from_pretrained("FOLDER")(pictures, return_tensors="pt")
found = model(**images)""",
}


def write(
    *, name: str, format: str, facts: Mapping[str, Any], input: str, outputs: Sequence[str], preprocessing: str,
    normalisation: Mapping[str, Any], results: Mapping[str, Any], configuration: Mapping[str, Any],
    classes: Sequence[str], remarks: Sequence[str],
) -> str:  # fmt: skip
    """The card in Markdown.

    facts: the checkpoint's manifest. input: what images a program takes. preprocessing: how images get their size.
    results, configuration: what `measured` and `trained` found. remarks: sentences about what was exported.
    """
    encoder = facts["encoder"]
    size = encoder["image_size"]
    height, width = size if isinstance(size, list | tuple) else (size, size)
    kind = "ViTForImageClassification" if classes else "ViTModel"
    opened = _OPEN[format].format(
        outputs=", ".join(outputs), input=INPUTS[input], shape=f"{encoder['channels']}, {height}, {width}", type=kind,
        extra="" if classes else ", add_pooling_layer=False",
    )  # fmt: skip
    lines = [
        f"# {name}",
        "",
        f"A Vision Transformer {'that names classes' if classes else 'without a head'}, exported by ssvit as {format}, "
        f"from step {facts['step']}.",
        *(f"- {remark}" for remark in remarks),
        "",
        "## Opening it",
        "",
        f"```python\n{opened}\n```",
        "",
        f"Images have {encoder['channels']} channels and {height}x{width} pixels, normalised by mean "
        f"{normalisation['mean']} and std {normalisation['std']} of values in [0, 1]"
        + (", inside the program." if format in GRAPHS else "."),
        "",
        preprocessing,
        "",
        "## Encoder",
        "",
        *_table(encoder),
    ]
    if classes:
        lines += ["", "## Classes", "", ", ".join(classes)]
    if configuration:
        lines += ["", "## Training", "", *_table(configuration)]
    if results:
        lines += ["", "## Measured", "", *_table(results)]
    return "\n".join(lines) + "\n"


def measured(run: Path, step: int) -> dict[str, Any]:
    """What a run's files say of its checkpoint of a step: the last numbers of each evaluation up to there, and those of
    the features that tools/evaluate.py chose by each of its measures, if it was run on it.
    """
    found: dict[str, Any] = {}
    path = run / "metrics.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:  # the line that was being written when a run was killed
            continue
        if row["step"] <= step:
            found |= {name: value for name, value in row.items() if "/" in name and not name.startswith("train/")}
    path = run / "evaluation" / "report.json"
    report = json.loads(path.read_text()) if path.is_file() else {"facts": {"checkpoint": ""}}
    if Path(report["facts"]["checkpoint"]).name == f"step_{step:08d}":
        for one in report["measured"]:
            best = one["best"]
            found[f"{one['measure']} of {best}: {one['columns'][-1]}"] = one["values"][best][-1]
    return found


def trained(run: Path) -> dict[str, Any]:
    """The options of a run that say what it learned and from what, by their full names; none where it keeps none.

    References are followed within the file alone. The objective, its target and the images are named as they were
    chosen, or by their builders in files that do not keep the choices.
    """
    try:
        stored = yaml.safe_load((run / "config.yaml").read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    sections = ("choices", "objective", "target", "data", "subset", "recipe")
    parts = {name: stored.get(name) if isinstance(stored, dict) else None for name in sections}
    options = {name: _resolved(part, stored) if isinstance(part, dict) else {} for name, part in parts.items()}
    choices = options.pop("choices")
    options["target"] = options["objective"].pop("target", None) or options["target"]
    options["data"] = options["data"].get("source", options["data"])
    named = {name: choices.get(name) or _builder(options[name]) for name in ("objective", "target", "data")}
    return {name: str(value) for name, value in named.items() if value} | dict(_options(options, ""))


def _resolved(value: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """Plain data in which references have become values: None for what cannot be followed, or would call a function."""
    if depth > _DEEPEST:
        return None
    if isinstance(value, dict):
        return {key: _resolved(part, root, depth + 1) for key, part in value.items()}
    if isinstance(value, list):
        parts = [_resolved(part, root, depth + 1) for part in value]
        return [part for part in parts if part is not None]
    if not isinstance(value, str) or "${" not in value:
        return None if value == "???" else value
    if (found := _REFERENCE.fullmatch(value)) is None:
        return None
    meant: Any = root
    for key in found[1].split("."):
        meant = meant.get(key) if isinstance(meant, dict) else None
    return _resolved(meant, root, depth + 1)


def _builder(part: Any) -> str:
    """MaskedPatch, of a part that is built by ssvit.objectives.masked_patch.MaskedPatch; "" where none is named."""
    return str(part.get("_target_", "") if isinstance(part, dict) else "").rpartition(".")[2]


def _options(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Leaves of the configuration, without those that name a place on its machine, or the encoder once more."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in ("encoder", "root", "path", "download", "_target_"):
                yield from _options(part, f"{name}.{key}" if name else str(key))
    elif value is not None and "/" not in str(value) and "\\" not in str(value):
        yield name, value


def _table(values: Mapping[str, Any]) -> list[str]:
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items()]
    return ["| | |", "|---|---|", *rows]


def _cell(value: Any) -> str:
    """As one cell of a table, whatever a file holds."""
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text.replace("|", r"\|")
