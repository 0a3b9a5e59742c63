"""Write a model card: the weights, their training, their metrics and code to load them, without local paths.

It starts with the front matter that the Hugging Face Hub reads.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ssvit.exchange import front_matter, huggingface
from ssvit.exchange.export_options import GRAPHS, INPUTS, Export
from ssvit.exchange.layout import per_channel
from ssvit.options import markdown, pair

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # a reference to an option, without a resolver call
_DEEPEST = 12  # maximum nesting of options
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
from ssvit.models.timm_options import of

encoder = of(json.load(open("config.json"))["encoder"]).build()
encoder.load_state_dict({{k[8:]: v for k, v in load_file("model.safetensors").items()}})
{represented}  # (b, {shape}), in [0, 1] or uint8""",
    "timm": """import timm

model = timm.create_model("{timm}", pretrained=True).eval()
{answer} = model{method}(images)  # (b, {shape}), less mean, over std""",
    "huggingface": """from transformers import AutoImageProcessor, {type}

model = {type}.from_pretrained("{place}"{extra}).eval()
inputs = AutoImageProcessor.from_pretrained("{place}")(pictures, return_tensors="pt")
{answer} = model(**inputs).{field}""",
}
_OPEN_CLASSIFIER = _OPEN | {
    "safetensors": """import json
from safetensors.torch import load_file
from ssvit.models.timm_options import of
from ssvit.objectives import classify_options
from ssvit.objectives.classify import Classify

facts = json.load(open("config.json"))
model = Classify(classify_options.Classify(**facts["classifier"]), encoder=of(facts["encoder"]).build())
model.load_state_dict(load_file("model.safetensors"))
logits = model.eval()(images)  # (b, {shape}), in [0, 1] or uint8""",
}


def write(
    *, run: Path, step: int, encoder: Mapping[str, Any], options: Export, preprocessing: str, classes: Sequence[str],
    remarks: Sequence[str],
) -> str:  # fmt: skip
    """Return the card in Markdown.

    Args:
        run: Folder of the run that trained the weights.
        step: Number of updates.
        encoder: Options of the encoder.
        options: Options of the export.
        preprocessing: Description of the evaluation transform.
        classes: Class names, empty without a head.
        remarks: Sentences about the export.
    """
    channels, (height, width) = encoder["channels"], pair("image_size", encoder["image_size"])
    mean, std = (per_channel(encoder[name], channels) for name in ("mean", "std"))
    is_vit = "positions" in encoder
    kind = huggingface.architecture(encoder, is_classifier=bool(classes)) if is_vit else ""
    code = (_OPEN_CLASSIFIER if classes else _OPEN)[options.format].format(
        outputs="(logits,)" if classes else "tokens, features",
        answer="logits" if classes else "tokens",
        method="" if classes else ".forward_features",
        field="logits" if classes else "last_hidden_state",
        represented="tokens = encoder.eval()(images)" if is_vit else "features = encoder.eval().represent(images)",
        input=INPUTS[options.input],
        shape=f"{channels}, {height}, {width}",
        type=kind,
        extra=", add_pooling_layer=False" if kind == "ViTModel" else "",
        place=options.push or "FOLDER",
        timm=f"hf-hub:{options.push}" if options.push else "local-dir:FOLDER",
    )
    inside = ", inside the program" if options.format in GRAPHS else ""
    normalised = f"normalised by mean {mean} and std {std} of values in [0, 1]{inside}"
    images = f"Images have {channels} channels and {height}x{width} pixels, {normalised}."
    learned, results = trained(run), measured(run, step)
    sections = {
        "Opening it": f"```python\n{code}\n```\n\n{images}\n\n{preprocessing}",
        "Encoder": _table(encoder),
        "Classes": markdown(", ".join(classes)),
        "Training": _table(learned),
        "Measured": _table(results),
    }
    head = "that names classes" if classes else "without a head"
    network = "A Vision Transformer" if is_vit else "An encoder"
    model = f"{network} {head}, exported by ssvit as {options.format}, from step {step}."
    name = options.push.partition("/")[2] if options.push else run.name
    matter = front_matter.write(
        name=name,
        format=options.format,
        license=options.license,
        trained=learned,
        measured=results,
        is_classifier=bool(classes),
    )
    text = matter + "\n".join([f"\n# {name}", "", model, *(f"- {remark}" for remark in remarks), ""])
    return text + "".join(f"\n## {title}\n\n{part}\n" for title, part in sections.items() if part)


def measured(run: Path, step: int) -> dict[str, Any]:
    """Return the last metrics of each evaluation of a run up to a step, by name.

    If the evaluation report is of the checkpoint of that step, this includes the metrics of the features that the
    evaluation selected by each of its measures.
    """
    found: dict[str, object] = {}
    path = run / "metrics.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:  # an incomplete last line, from a run that was killed
            continue
        if row["step"] <= step:
            found |= {name: value for name, value in row.items() if "/" in name and not name.startswith("train/")}
    path = run / "evaluation" / "report.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"facts": {"checkpoint": ""}}
    if Path(report["facts"]["checkpoint"]).name == f"step_{step:08d}":
        for one in report["measured"]:
            best = one["best"]
            found[f"{one['measure']} of {best}: {one['columns'][-1]}"] = one["values"][best][-1]
    return found


def trained(run: Path) -> dict[str, Any]:
    """Return the options of objective, data and recipe by their full names; {} without a stored configuration."""
    try:
        stored = yaml.safe_load((run / "config.yaml").read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    if not isinstance(stored, dict):
        return {}
    options = {}
    for name in ("choices", "objective", "target", "data", "subset", "recipe"):
        options[name] = _resolved(stored[name], stored) if isinstance(stored.get(name), dict) else {}
    choices = options.pop("choices")
    options["target"] = options["objective"].pop("target", None) or options["target"]
    options["data"] = options["data"].get("source", options["data"])
    named = {name: str(choices[name]) for name in ("objective", "target", "data") if choices.get(name)}
    return named | dict(_options(options, ""))


def _resolved(value: object, root: Mapping[str, object], depth: int = 0) -> Any:
    """Replace references to options by their values; any other reference becomes None."""
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
    meant: object = root
    for key in found[1].split("."):
        meant = meant.get(key) if isinstance(meant, dict) else None
    return _resolved(meant, root, depth + 1)


def _options(value: object, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of the configuration, except those of the encoder and those that name a path."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in ("encoder", "root", "path", "download"):
                yield from _options(part, f"{name}.{key}" if name else str(key))
    elif value is not None and "/" not in str(value) and "\\" not in str(value):
        yield name, value


def _table(values: Mapping[str, object]) -> str:
    """Return a table of names and values in Markdown."""
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""


def _cell(value: object) -> str:
    """Format a value, from any file, as one cell of a table."""
    return markdown(f"{value:.4g}" if isinstance(value, float) else value)
