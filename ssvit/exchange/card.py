"""A model card: what the weights are, what they were trained on and how, what was measured, and how to open them.

It names no folder of the machine that it was written on.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_OPEN = {
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
{outputs} = session.run(None, {{"images": images}})  # (b, {shape}), float32 in [0, 1]""",
    "torch_export": """import torch

model = torch.export.load("model.pt2").module()
{outputs} = model(images)  # (b, {shape}), float32 in [0, 1]""",
    "safetensors": """import json
from safetensors.torch import load_file
from ssvit.encoder.vit import ViT

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
    *, name: str, format: str, facts: Mapping[str, Any], outputs: Sequence[str], normalisation: Mapping[str, Any],
    results: Mapping[str, Any], configuration: Mapping[str, Any], classes: Sequence[str], remarks: Sequence[str],
) -> str:  # fmt: skip
    """The card in Markdown.

    facts: the checkpoint's manifest. results, configuration: what `measured` and `trained` found. remarks: sentences
    about what was exported.
    """
    encoder = facts["encoder"]
    size = encoder["image_size"]
    height, width = size if isinstance(size, list | tuple) else (size, size)
    kind = "ViTForImageClassification" if classes else "ViTModel"
    opened = _OPEN[format].format(
        outputs=", ".join(outputs), shape=f"{encoder['channels']}, {height}, {width}", type=kind,
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
        + (", inside the program." if format in ("onnx", "torch_export") else "."),
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


def trained(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run that say what it learned and from what, by their full names."""
    chosen = {name: configuration[name] for name in ("objective", "subset", "recipe") if name in configuration}
    return dict(_options({**chosen, "data": configuration.get("data", {}).get("source", {})}, ""))


def _options(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Leaves of the configuration, without those that name a place on its machine, or the encoder once more."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in ("encoder", "root", "path", "download"):
                yield from _options(part, f"{name}.{key}" if name else str(key))
    elif "/" not in str(value) and "\\" not in str(value):
        yield name.replace("_target_", "kind"), value


def _table(values: Mapping[str, Any]) -> list[str]:
    rows = [f"| {name} | {f'{value:.4g}' if isinstance(value, float) else value} |" for name, value in values.items()]
    return ["| | |", "|---|---|", *rows]
