"""Write a checkpoint as others open it: python tools/export.py format=onnx|torch_export|safetensors|timm|huggingface"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ssvit.checkpoints import manifest
from ssvit.cli.launch import announce, launch, say
from ssvit.exchange import export_rules
from ssvit.models.options import RESIZE, grid
from ssvit.options import one_of, within


def run(config: DictConfig, plain: dict[str, Any]) -> None:
    """Check that the encoder can be written in the format, and only then load torch, build and write it."""
    path = manifest.find(plain["checkpoint"], outputs=plain["outputs"], stage=manifest.PRETRAIN, say=say)
    with within("encoder"):
        facts = manifest.read(path, plain["encoder"])
    size = facts["encoder"]["image_size"] if plain["image_size"] is None else plain["image_size"]
    grid(size, facts["encoder"]["patch_size"])
    one_of("resize", plain["resize"], RESIZE)
    asked = {name: plain[name] for name in ("format", "any_size", "input", "overwrite")}
    export_rules.check(**asked, encoder=facts["encoder"], classifier=facts.get("classifier"))
    run = Path(plain["outputs"]) / path.stem if path.is_file() else path.parent
    folder = Path(plain["output"] or run / "export" / plain["format"])
    announce()

    from ssvit.checkpoints.checkpoint import load_classifier, load_encoder
    from ssvit.exchange.export import export

    if "classifier" in facts:
        model = load_classifier(path, image_size=size, resize=plain["resize"])
    else:
        model = load_encoder(path, resize=plain["resize"], announce=True, image_size=size, **plain["encoder"])
    told = export(
        model,
        folder,
        format=plain["format"],
        any_size=plain["resize"] if plain["any_size"] else None,
        facts=facts,
        run=run,
        input=plain["input"],
        overwrite=plain["overwrite"],
    )
    print(f"{folder}: {', '.join(file.name for file in sorted(folder.iterdir()))}", *told, sep="\n")


def main() -> None:
    """Start the tool."""
    launch("export", run)
