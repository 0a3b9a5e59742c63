"""Write a checkpoint for other libraries: ssvit export format=onnx|torch_export|safetensors|timm|huggingface"""

from pathlib import Path

from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.checkpoints.finding import find
from ssvit.cli.launch import Tool
from ssvit.config.composed import Config
from ssvit.config.declaration import select
from ssvit.exchange import hub
from ssvit.exchange.export_options import Export
from ssvit.models import build_options
from ssvit.options import print_lines


def run(config: Config) -> None:
    """Check that the encoder can be written in the format; then load torch, build and write it."""
    plain = config.values
    options = select(Export, plain)
    checkpoint = find(
        plain["checkpoint"], outputs=plain["outputs"], stage=PRETRAIN, options=plain["encoder"], say=config.line.say
    )
    size = checkpoint.encoder["image_size"] if options.image_size is None else options.image_size
    options.check_model(
        build_options.vit(checkpoint.encoder | {"image_size": size}), checkpoint.facts.get("classifier")
    )
    run = checkpoint.home(plain["outputs"])
    folder = Path(plain["output"] or run / "export" / options.format)
    options.check_folder(folder, checkpoint=checkpoint.path)
    config.line.announce()

    from ssvit.checkpoints.loading import load_classifier, load_encoder
    from ssvit.exchange.export import export
    from ssvit.models import vit
    from ssvit.objectives.classify import Classify

    model: vit.ViT | Classify
    if checkpoint.has_classifier:
        model = load_classifier(checkpoint.path, image_size=size, resize=options.resize)
    else:
        changes = {"image_size": size, "resize": options.resize, **plain["encoder"]}
        encoder = load_encoder(checkpoint.path, announce=True, **changes)
        assert isinstance(encoder, vit.ViT)
        model = encoder
    remarks = export(model, folder, options, facts=checkpoint.facts, run=run)
    print_lines(f"{folder}: {', '.join(file.name for file in sorted(folder.iterdir()))}", *remarks)
    if options.push is not None:
        print(f"uploaded to {hub.push(folder, options.push, private=options.private)}")


tool = Tool("export", "write weights as others read them", run, options=Export)
