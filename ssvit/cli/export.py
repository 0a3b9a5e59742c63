"""Write a checkpoint as others open it: python tools/export.py format=onnx|torch_export|safetensors|timm|huggingface"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ssvit.checkpoints import manifest
from ssvit.cli.launch import announce, launch, say
from ssvit.exchange.options import Export
from ssvit.models.options import ViT
from ssvit.options import make, select, within


def run(config: DictConfig, plain: dict[str, Any]) -> None:
    """Check that the encoder can be written in the format, and only then load torch, build and write it."""
    asked = select(Export, plain)
    path = manifest.find(plain["checkpoint"], outputs=plain["outputs"], stage=manifest.PRETRAIN, say=say)
    with within("encoder"):
        facts = manifest.read(path, plain["encoder"])
    size = facts["encoder"]["image_size"] if asked.image_size is None else asked.image_size
    asked.check(make(ViT, facts["encoder"] | {"image_size": size}), facts.get("classifier"))
    run = Path(plain["outputs"]) / path.stem if path.is_file() else path.parent
    folder = Path(plain["output"] or run / "export" / asked.format)
    announce()

    from ssvit.checkpoints.checkpoint import load_classifier, load_encoder
    from ssvit.exchange.export import export

    if "classifier" in facts:
        model = load_classifier(path, image_size=size, resize=asked.resize)
    else:
        model = load_encoder(path, resize=asked.resize, announce=True, image_size=size, **plain["encoder"])
    told = export(
        model,
        folder,
        format=asked.format,
        any_size=asked.resize if asked.any_size else None,
        facts=facts,
        run=run,
        input=asked.input,
        overwrite=asked.overwrite,
    )
    print(f"{folder}: {', '.join(file.name for file in sorted(folder.iterdir()))}", *told, sep="\n")


def main() -> None:
    """Start the tool."""
    launch("export", run)
